"""Attention as a compute endpoint: the client.

    from flashwire import Client
    with Client("http://host:8000") as client:
        result = client.attention(q, k, v, causal=True)     # result.out, result.meta

`flashwire.torch` has the same as a differentiable torch function, and is imported by name.
"""

from flashwire import errors
from flashwire._version import __version__
from flashwire.client import AsyncClient, Client
from flashwire.errors import FlashwireError, RequestError
from flashwire.merge import merge
from flashwire.results import CheckReport, Gradients, Plan, Result, TensorCheck, Worst

__all__ = [
    "AsyncClient",
    "CheckReport",
    "Client",
    "FlashwireError",
    "Gradients",
    "Plan",
    "RequestError",
    "Result",
    "TensorCheck",
    "Worst",
    "__version__",
    "errors",
    "merge",
]
