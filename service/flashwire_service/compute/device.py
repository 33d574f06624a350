"""The device of a worker: choosing it, proving that it computes, measuring it."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from flashwire_kernels import api
from flashwire_kernels.types import AttentionSpec

# Scores [3, 1, 6, 2] (q = 1, k = scores, scale 1) and v = [1, 2, 3, 4]: by hand,
# lse = 6 + ln(1 + e^-3 + e^-5 + e^-4), p = exp(s - lse), out = p.v, and with dout = 1
# dk = p (v - out), dv = p.
_SCORES = (3.0, 1.0, 6.0, 2.0)
_VALUES = (1.0, 2.0, 3.0, 4.0)
_KNOWN = {
    "out": (2.918131,),
    "lse": (6.072172,),
    "dk": (-0.088849, -0.005756, 0.076169, 0.018435),
    "dv": (0.046320, 0.006269, 0.930370, 0.017040),
}
_TOLERANCE = 1e-5
_MEASURE_REPEATS = 3


class NoDevice(Exception):
    """The device that the settings demand is not there. The message is for the operator."""


class WrongAnswer(Exception):
    """The device computes, but not what is known to be right."""


def choose(setting: str) -> torch.device:
    """auto, cpu, cuda or cuda:N as a device that exists. Raises NoDevice."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cpu" or (setting == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise NoDevice(f"device {setting!r} was asked for, but torch finds no CUDA device")
    index = int(setting.partition(":")[2] or 0)
    if index >= count:
        raise NoDevice(f"device {setting!r} was asked for, but there are {count} CUDA devices")
    return torch.device("cuda", index)


def prove(device: torch.device) -> None:
    """Compute a real attention, forward and backward, and compare. Raises WrongAnswer."""
    q = torch.ones(1, 1, 1, 1, device=device)
    k, v = (torch.tensor(x, device=device).view(1, 1, 4, 1) for x in (_SCORES, _VALUES))
    spec = AttentionSpec(scale=1.0)
    forward = api.forward(q, k, v, spec=spec)
    backward = api.backward(
        torch.ones_like(q), q, k, v, out=forward.out, lse=forward.lse, spec=spec
    )
    got = {
        "out": forward.out,
        "lse": forward.lse,
        "dk": backward.gradients.dk,
        "dv": backward.gradients.dv,
    }
    for name, known in _KNOWN.items():
        want = torch.tensor(known, dtype=torch.float64)
        error = (got[name].double().cpu().view(-1) - want).abs().max().item()
        if not error <= _TOLERANCE:
            raise WrongAnswer(f"{name} of a known attention is off by {error:g} on {device}")


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
            "python": platform.python_version(),
        },
    }


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
