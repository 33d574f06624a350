"""What one would write by hand: FastAPI, msgpack, and SDPA in a thread.

    python -m wiring.plain THREADS

listens on loopback and prints where. The reply's meta has the milliseconds that SDPA took.
"""

from __future__ import annotations

import math
import socket
import sys
import time
import warnings
from typing import Any

import msgpack
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from torch.nn.functional import scaled_dot_product_attention

app = FastAPI()


@app.post("/attention")
async def attention(request: Request) -> Response:
    message = msgpack.unpackb(await request.body())
    out, took = await run_in_threadpool(_compute, *(_tensor(message[name]) for name in "qkv"))
    reply = {"out": packed(out), "meta": {"compute_ms": took}}
    return Response(msgpack.packb(reply), media_type="application/msgpack")


def packed(tensor: torch.Tensor) -> dict[str, Any]:
    data = tensor.contiguous().numpy().tobytes()
    return {"dtype": "float32", "shape": list(tensor.shape), "data": data}


def _tensor(packed: dict[str, Any]) -> torch.Tensor:
    if len(packed["data"]) != 4 * math.prod(packed["shape"]):
        raise ValueError("the data is not of that shape")
    return torch.frombuffer(packed["data"], dtype=torch.float32).reshape(packed["shape"])


def _compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    out = scaled_dot_product_attention(q, k, v)
    return out, 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    warnings.filterwarnings("ignore", message="The given buffer is not writable")
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"listening on {listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=600)
    server = uvicorn.Server(config)  # http.client does not open a connection anew by itself
    server.run(sockets=[listener])
