"""Jobs of one kind (batching.py) as one packed problem, and each one's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashwire_kernels import api, support
from flashwire_kernels.packing import Packing, Saved
from flashwire_kernels.tensors import Backward, Forward
from flashwire_kernels.validation import OFFSETS
from flashwire_service.compute.options import OF_BACKWARD, backend_of, spec_of
from flashwire_service.ipc.frames import Job

Tensors = Mapping[str, torch.Tensor]


def compute(jobs: Sequence[tuple[Job, Tensors]]) -> list[Forward | Backward] | None:
    """What the route of these jobs would give each alone, bit for bit, as views of common memory.
    None when they must not be computed together after all.

    Raises what the kernels raise, for any of the jobs.
    """
    calls = [_call(job, tensors) for job, tensors in jobs]
    chosen = [
        api.choose(backend_of(job.options), call.problem, call.inputs.q.device)
        for (job, _), call in zip(jobs, calls, strict=True)
    ]
    backend = chosen[0][0]
    packing = Packing.of(calls, backend)
    if packing is None:
        return None
    said: list[dict[str, Any]] = [
        {"backend": backend, "skipped": skipped, "precision": support.precision(backend, c.problem)}
        for c, (_, skipped) in zip(calls, chosen, strict=True)
    ]
    if jobs[0][0].route == "backward":
        saved = [Saved(**_only(tensors, OF_BACKWARD)) for _, tensors in jobs]
        gradients = packing.backward(saved)
        return [Backward(gradients=g, **more) for g, more in zip(gradients, said, strict=True)]
    results = packing.forward()
    return [Forward(out=o, lse=n, **more) for (o, n), more in zip(results, said, strict=True)]


def _call(job: Job, tensors: Tensors) -> api.Call:
    offsets = _only(tensors, OFFSETS)
    plain = {n: t for n, t in tensors.items() if n not in (*OFFSETS, *OF_BACKWARD)}
    return api.Call.of(spec_of(job.options), plain, offsets)


def _only(tensors: Tensors, names: Sequence[str]) -> dict[str, torch.Tensor]:
    return {name: tensors[name] for name in names if name in tensors}
