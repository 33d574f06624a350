"""What a request is estimated to take of the device."""

from __future__ import annotations

import pytest

from flashwire.wire import TensorRef
from flashwire_kernels import support
from flashwire_kernels.types import AttentionSpec, TensorHeader
from flashwire_kernels.validation import Problem, resolve
from flashwire_service.front.estimates import device_bytes
from flashwire_service.front.message import Message

SHAPE = (1, 2, 64, 32)
TENSOR = 2 * 64 * 32 * 4
LSE = 2 * 64 * 4


def message(*names: str, shape: tuple[int, ...] = SHAPE) -> Message:
    return Message({}, {n: TensorRef("float32", shape, ((0, 1),)) for n in names}, b"", 0)


def problem(shape: tuple[int, ...] = SHAPE) -> Problem:
    return resolve(AttentionSpec(), {name: TensorHeader("float32", shape) for name in "qkv"})


@pytest.mark.parametrize(
    ("asked", "device", "runs"),
    [("auto", "cpu", "cpu"), ("auto", "cuda:0", "triton"), ("reference", "cuda:0", "reference")],
)
def test_inputs_results_and_what_the_backend_needs(asked: str, device: str, runs: str) -> None:
    forward = device_bytes("attention", message(*"qkv"), problem(), asked, device)
    extra = support.extra_bytes(runs, problem(), backward=False)
    assert forward == 4 * TENSOR + LSE + extra
    given = message(*"qkv", "dout")
    backward = device_bytes("backward", given, problem(), asked, device)
    assert backward == 7 * TENSOR + support.extra_bytes(runs, problem(), backward=True)


def test_a_check_runs_the_reference() -> None:
    long = (1, 2, 2048, 32)
    given = message("request.q", "request.k", "request.v", shape=long)
    assert device_bytes("check", given, problem(long), "auto", "cpu") > 2 * 2048 * 2048 * 8


def test_by_residual_dout_tells() -> None:
    assert device_bytes("backward", message("dout"), None, "auto", "cpu") == 4 * TENSOR
    assert device_bytes("release", None, None, "auto", "cpu") == 0


def test_an_estimate_fits_its_frame() -> None:
    huge = (1, 2**10, 2**30, 1)
    given = message(*"qkv", shape=huge)
    assert device_bytes("check", given, problem(huge), "reference", "cpu") == 2**62
