"""`import flashwire` is cheap, and works with httpx, msgpack and numpy alone."""

import subprocess
import sys
import textwrap

import pytest

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""
OPTIONAL = (
    "torch", "transformers", "jax", "ml_dtypes", "triton", "fastapi", "uvicorn", "pydantic",
    "prometheus_client",
)  # fmt: skip
OURS = ("flashwire_kernels", "flashwire_service")


def run(code: str, blocked: tuple[str, ...] = ()) -> str:
    source = BLOCK.format(blocked=blocked) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["flashwire", "flashwire.cli", "flashwire.wire"])
def test_nothing_optional_is_loaded(module: str) -> None:
    loaded = set(run(f"import {module}; print(*sys.modules)").split())
    assert not loaded & {*OPTIONAL, *OURS}


def test_the_base_packages_suffice() -> None:
    run(
        """
        import httpx, numpy as np
        import flashwire
        from flashwire import wire

        def serve(request):
            sent = wire.decode(request.read(), wire.ATTENTION).tensors["q"]
            body = wire.encode({"meta": {}}, {"out": (sent.header, memoryview(bytes(sent.nbytes)))})
            return httpx.Response(200, content=body, headers={"content-type": wire.MEDIA_TYPE})

        http = httpx.Client(transport=httpx.MockTransport(serve))
        q = np.ones((1, 1, 2, 4), np.float32)
        out = flashwire.Client("http://host", http=http).attention(q, q, q, causal=True).out
        assert out.shape == q.shape and not out.any()
        assert np.isfinite(flashwire.merge([out], [out[..., 0]])[0]).all()
        assert "torch" not in sys.modules
        """,
        blocked=(*OPTIONAL, *OURS),
    )


def test_bfloat16_without_ml_dtypes_says_what_is_missing() -> None:
    out = run(
        """
        import numpy as np
        from flashwire import FlashwireError
        from flashwire.tensors import pack
        try:
            pack("q", np.ones(2), "bfloat16")
        except FlashwireError as exc:
            print(exc)
        """,
        blocked=OPTIONAL,
    )
    assert "flashwire[bf16]" in out


def test_exports_are_explicit() -> None:
    import flashwire

    assert sorted(flashwire.__all__, key=str.lower) == sorted(set(flashwire.__all__), key=str.lower)
    assert all(hasattr(flashwire, name) for name in flashwire.__all__)


def test_the_version_is_the_distributions() -> None:
    from importlib.metadata import version

    import flashwire

    assert flashwire.__version__ == version("flashwire")


@pytest.mark.parametrize("name", ["torch", "transformers", "jax"])
def test_what_is_missing_says_so(name: str) -> None:
    out = run(
        f"""
        try:
            import flashwire.{name}
        except ImportError as exc:
            print(exc)
        """,
        blocked=(name,),
    )
    assert out.startswith(f"flashwire.{name} needs ")
    assert out.endswith(f": pip install 'flashwire[{name}]'\n")
