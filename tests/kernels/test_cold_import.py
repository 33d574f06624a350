"""What a front end reads of this library loads no torch."""

import pkgutil
import subprocess
import sys

import pytest

import flashwire_kernels

TORCHLESS = ("types", "errors", "geometry", "validation", "support", "plan")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_modules_for_front_ends_load_no_torch():
    imports = "".join(f"import flashwire_kernels.{name}\n" for name in TORCHLESS)
    assert run(f"import sys\n{imports}print('torch' in sys.modules)") == "False"


def test_they_work_where_torch_is_missing():
    code = """
import sys
sys.modules["torch"] = None
from flashwire_kernels import AttentionSpec, TensorHeader, InvalidAttention
from flashwire_kernels.support import reasons
from flashwire_kernels.validation import resolve
q = TensorHeader("float32", (1, 2, 8, 16))
problem = resolve(AttentionSpec(causal=True), {"q": q, "k": q, "v": q})
print(reasons("cpu", problem, "cpu"), len(reasons("triton", problem, "cpu")) > 0)
"""
    assert run(code) == "() True"


def test_torch_is_loaded_by_the_first_name_that_needs_it():
    code = """
import sys, flashwire_kernels as f
f.AttentionSpec, f.NotEnoughMemory, f.Problem
before = "torch" in sys.modules
f.forward
print(before, "torch" in sys.modules)
"""
    assert run(code) == "False True"


@pytest.mark.parametrize("name", flashwire_kernels.__all__)
def test_every_exported_name_exists(name):
    assert getattr(flashwire_kernels, name).__name__ == name
    assert name in dir(flashwire_kernels)


def test_no_exported_name_is_that_of_a_module():
    """It would mean one thing or the other, by who was imported first."""
    modules = {module.name for module in pkgutil.iter_modules(flashwire_kernels.__path__)}
    assert not modules & set(flashwire_kernels.__all__)


def test_no_other_name_does():
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        flashwire_kernels.flash  # noqa: B018
