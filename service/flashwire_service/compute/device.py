"""The device of a worker: choosing it, proving that it computes, measuring it.

PyTorch calls ROCm's devices cuda, too.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashwire_kernels import api
from flashwire_kernels.types import AttentionSpec
from flashwire_service.kernel_cache import unusable

# Scores [3, 1, 6, 2] (q = 1, k = scores, scale 1) and v = [1, 2, 3, 4]: by hand,
# lse = 6 + ln(1 + e^-3 + e^-5 + e^-4), p = exp(s - lse), out = p.v, and with dout = 1
# dk = p (v - out), dv = p, dq = dk.k.
_SCORES = (3.0, 1.0, 6.0, 2.0)
_VALUES = (1.0, 2.0, 3.0, 4.0)
_OUT, _LSE, _DQ = 2.918131, 6.072172, 0.221582
_DK = (-0.088849, -0.005756, 0.076169, 0.018435)
_DV = (0.046320, 0.006269, 0.930370, 0.017040)
_DIM = 64
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of everything but lse
_LSE_TOLERANCE = 1e-5
# (queries, how often the four keys are repeated): a decode, whose keys are shared out between
# programs, and a block.
_PROOFS = ((1, 512), (128, 64))
PARTS = tuple(itertools.product(_TOLERANCE, _PROOFS))  # of the proof
_MEASURE_REPEATS = 3


class NoDevice(Exception):
    """What the settings demand is not there. The message is for the operator."""


class WrongAnswer(Exception):
    """The device computes, but not what is known to be right."""


def choose(setting: str, worker: int = 0) -> torch.device:
    """auto, cpu, cuda or cuda:N as a device that exists. Raises NoDevice.

    auto and cuda give each worker a GPU of its own while there are enough. auto takes a GPU only
    where Triton, without which it is of no use, is installed.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usable = importlib.util.find_spec("triton") is not None
    if setting == "cpu" or (setting == "auto" and not (count and usable)):
        return torch.device("cpu")
    if count == 0:
        raise NoDevice(f"device {setting!r} was asked for, but torch finds no GPU")
    if not usable:
        raise NoDevice(f"device {setting!r} needs triton: pip install 'flashwire[gpu]'")
    number = setting.partition(":")[2]
    index = int(number) if number else worker % count
    if index >= count:
        raise NoDevice(f"device {setting!r} was asked for, but there are {count} GPUs")
    return torch.device("cuda", index)


def require_kernel_cache(device: torch.device) -> None:
    """Raises NoDevice when Triton cannot keep what it compiles for a GPU, and so not load it."""
    if device.type == "cpu":
        return
    from triton import knobs

    if why_not := unusable(knobs.cache.dir):
        raise NoDevice(f"FLASHWIRE_TRITON_CACHE_DIR: {knobs.cache.dir} {why_not}")


def prove(device: torch.device, step: Callable[[], object] = lambda: None) -> None:
    """Compute real attentions, forward, backward and decoding, and compare.

    `step` is called before each of them, all of which may compile. Raises WrongAnswer.
    """
    for number in range(len(PARTS)):
        step()
        prove_part(device, number)


def prove_part(device: torch.device, number: int) -> None:
    """Compute one of PARTS, and compare. Raises WrongAnswer."""
    dtype, (queries, repeats) = PARTS[number]
    for name, (got, want) in _known_attention(device, dtype, queries, repeats).items():
        error = (got.double().cpu() - want).abs().max().item()
        if not error <= (_LSE_TOLERANCE if name == "lse" else _TOLERANCE[dtype]):
            told = f"{name} of a known attention in {dtype} is off by {error:g}"
            raise WrongAnswer(f"{told} on {device}")


def _known_attention(
    device: torch.device, dtype: torch.dtype, queries: int, repeats: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(computed, known) of each result. All queries are alike, and the keys come `repeats` times:
    out stays as it is, and each key's gradient is `queries` times a repetition's share, which is
    scaled away. Only the first of the head's dimensions is used: all others are 0 throughout.
    """

    def first(values: tuple[float, ...]) -> torch.Tensor:
        t = torch.zeros(1, 1, len(values), _DIM, dtype=torch.float64)
        t[..., 0] = torch.tensor(values, dtype=torch.float64)
        return t

    ones = first((1.0,) * queries).to(device, dtype)
    k, v = (first(x * repeats).to(device, dtype) for x in (_SCORES, _VALUES))
    spec = AttentionSpec(scale=1.0)
    forward = api.forward(ones, k, v, spec=spec)
    backward = api.backward(ones, ones, k, v, out=forward.out, lse=forward.lse, spec=spec)
    found, share = backward.gradients, repeats / queries
    lse = torch.full((1, 1, queries), _LSE + math.log(repeats), dtype=torch.float64)
    return {
        "out": (forward.out, first((_OUT,) * queries)),
        "lse": (forward.lse, lse),
        "dq": (found.dq, first((_DQ,) * queries)),
        "dk": (found.dk.double() * share, first(_DK * repeats)),
        "dv": (found.dv.double() * share, first(_DV * repeats)),
    }


def measure(device: torch.device) -> float:
    """GFLOP/s of a plain forward, the best of a few: what plans estimate times with."""
    on_cpu = device.type == "cpu"
    heads, length, dim = (4, 512, 64) if on_cpu else (16, 4096, 128)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, heads, length, dim, generator=generator)
    x = x.to(device, torch.float32 if on_cpu else torch.bfloat16)
    flops = 4 * heads * length * length * dim
    best = float("inf")
    for _ in range(_MEASURE_REPEATS):
        started = time.perf_counter()
        api.forward(x, x, x)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return flops / best / 1e9


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; raises what it failed with."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def answers(device: torch.device) -> bool:
    """Whether the device still computes. After some faults only a new process can make it."""
    try:
        synchronize(device)
        return torch.ones((), device=device).item() == 1.0
    except RuntimeError:
        return False


def release_cached(device: torch.device) -> None:
    """Give back the memory that is held for later, of which there may be much in small pieces."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> tuple[int, int] | None:
    """What torch has given out of a GPU's memory, and the most it ever had; None for a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return None


def available_bytes(device: torch.device) -> int:
    """Memory that a request may still take on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    return available_host_bytes()


def available_host_bytes() -> int:
    """What the machine and this container have left."""
    return max(0, min(_meminfo("MemAvailable"), _container_bytes()))


def _container_bytes() -> int:
    """What is left under the limit of the control group; file pages that can be dropped count."""
    root = Path("/sys/fs/cgroup")
    try:
        most = (root / "memory.max").read_text().strip()
        if most == "max":
            return sys.maxsize
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return int(most) - used + int(stat["inactive_file"])
    except (OSError, KeyError):  # no cgroup v2 here
        return sys.maxsize


def facts(device: torch.device) -> dict[str, Any]:
    """What /info says about this worker."""
    on_cpu = device.type == "cpu"
    memory = _meminfo("MemTotal") if on_cpu else torch.cuda.mem_get_info(device)[1]
    return {
        "device": str(device),
        "device_name": _cpu_name() if on_cpu else torch.cuda.get_device_name(device),
        "memory_bytes": memory,
        "threads": torch.get_num_threads(),
        "gflops": round(measure(device), 1),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "triton": None if on_cpu else _triton_version(),
            "python": platform.python_version(),
        },
    }


def _triton_version() -> str:
    import triton  # only where there is a GPU

    version: str = triton.__version__
    return version


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
