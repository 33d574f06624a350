"""As many threads as a job is worth.

Waking a second thread and waiting for it takes longer than what it would save of a small job, and
far longer where another process has the core. On the host equal work gives equal bits with one
thread and with several (tests/kernels/test_repeatability.py), so this changes times alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

_WORTH_IT = 16e6  # FLOPs: about 0.2 ms of one thread


class Threads:
    """The threads that this process may use, as it was started with."""

    def __init__(self) -> None:
        self._all = torch.get_num_threads()

    @contextlib.contextmanager
    def fitting(self, *jobs: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within, torch uses one thread where the tensors of these jobs, if q and k are among them,
        are little work.
        """
        few = self._all > 1 and sum(map(_work, jobs)) < _WORTH_IT
        if few:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if few:
                torch.set_num_threads(self._all)


def _work(tensors: Mapping[str, torch.Tensor]) -> float:
    """FLOPs of a forward at most; infinite where that cannot be told."""
    q, k = tensors.get("q"), tensors.get("k")
    if q is None or k is None or k.dim() < 2:
        return float("inf")
    return 4.0 * q.numel() * max(k.shape[:-1])
