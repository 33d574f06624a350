"""The judge in a process of its own: building and judging disturb no latency that is measured."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from load.connection import Reply, Request


class Judge:
    """`valid.build` and `valid.judge`, awaited. `with` ends the process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin)

    async def build(self, kind: str, seed: int, residual: str | None = None) -> Request:
        request: Request = await self._run(_build, kind, seed, residual)
        return request

    async def judge(self, kind: str, seed: int, reply: Reply) -> str | None:
        """What is wrong with a reply of status 200, or None."""
        wrong: str | None = await self._run(_judge, kind, seed, reply)
        return wrong

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


# torch is imported in the child alone.


def _begin() -> None:
    import torch

    torch.set_num_threads(1)


def _build(kind: str, seed: int, residual: str | None) -> Request:
    from load import valid

    return valid.build(kind, seed, residual)


def _judge(kind: str, seed: int, reply: Reply) -> str | None:
    from load import valid

    return valid.judge(kind, seed, reply)
