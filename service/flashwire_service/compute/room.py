"""Whether a job fits: what it will take against what there is, before anything is launched.

The system promises more host memory than it has, and kills whoever then uses it; a GPU that is
full fails in the middle of a job. So both are asked first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashwire_kernels.errors import NotEnoughMemory
from flashwire_kernels.types import ITEM_SIZE
from flashwire_service.compute import device as devices
from flashwire_service.compute import replies
from flashwire_service.ipc.frames import Job

# Up to here nobody asks how much memory is left, which costs as much as a small attention.
_SURELY_THERE = 64 * 2**20
_SMALL_INPUTS = 2**20


class HostFull(NotEnoughMemory):
    """A reply larger than the memory that the machine has left."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of one worker: its device's, and the host's, where replies are written."""

    device: torch.device
    max_materialise: int

    def require_inputs(self, job: Job) -> None:
        """Raises NotEnoughMemory when a job's tensors do not fit the device. On a CPU they are
        there already.
        """
        if self.device.type == "cpu":
            return
        slots = job.tensors.values()
        needed = sum(math.prod(slot.shape) * ITEM_SIZE[slot.dtype] for slot in slots)
        if needed > _SMALL_INPUTS:
            self._require_device(needed)

    def for_backend(
        self,
        job: Job,
        backend: str,
        tensors: dict[str, torch.Tensor],
        result_bytes: int,
        kept_bytes: int = 0,
    ) -> int | None:
        """What a backend may take beside inputs and results; None for what is surely there.

        kept_bytes are copies of inputs and results that outlive the job. Raises NotEnoughMemory
        when there is no room for the results, as tensors and as a reply, and for these.
        """
        reply_bytes = result_bytes
        if job.accept == "json":
            elements = result_bytes // tensors["q"].dtype.itemsize
            reply_bytes += elements * replies.JSON_BYTES_PER_ELEMENT
        limit = self.max_materialise if backend == "reference" else None
        needed = result_bytes + reply_bytes + kept_bytes
        if needed <= _SURELY_THERE and _is_small(tensors):
            return limit
        if self.device.type != "cpu":  # where nothing that is kept has to be copied
            there = devices.available_host_bytes()
            if reply_bytes > there:
                raise HostFull(reply_bytes, there)
            needed = result_bytes
        there = self._require_device(needed)
        return min(there - needed, limit or there)

    def _require_device(self, needed: int) -> int:
        there = devices.available_bytes(self.device)
        if needed > there:
            raise NotEnoughMemory(needed, there)
        return there


def _is_small(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether nothing a backend takes can be large. A small bias may be one that many heads share,
    whose gradient is first summed for each of them.
    """
    return "bias" not in tensors and total_bytes(tensors) <= _SMALL_INPUTS


def total_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Of all of them."""
    return sum(t.nbytes for t in tensors.values())


def forward_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """out and lse, from the shapes of q and v: one row for each query of each head."""
    q, v = tensors["q"], tensors["v"]
    rows = q.numel() // q.shape[-1]
    return rows * (v.shape[-1] * v.dtype.itemsize + (8 if q.dtype is torch.float64 else 4))
