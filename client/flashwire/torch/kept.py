"""What servers keep for the backwards of graphs that are alive here, and its release.

A forward that is kept is in its graph as a tensor of one byte, its *ticket*. Autograd,
torch.compile and checkpointing move tickets as they move any saved tensor, and drop them with the
graph: after a backward, in an exception, with a cycle, in any thread. What is kept is found by the
address of the ticket's memory, which is nobody else's while it lives. (Not by a value in it: equal
calls must give equal tensors.) A copy of a ticket stands for nothing, and its backward sends
tensors.

The memory is a NumPy array's, whose death is noticed by a finaliser. That must not wait, lock or
raise, for it may run within any line of any thread: it takes entries from dicts and puts them into
a SimpleQueue, all of which is atomic. A daemon thread frees them on the servers.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import weakref

import numpy as np
import torch

from flashwire.client import Client
from flashwire.errors import FlashwireError

_PATIENCE = 5.0  # seconds for a release; what is not freed, the server drops in time
_FAREWELL = 2.0  # seconds for all of them, when a client is closed or the interpreter ends
_log = logging.getLogger(__name__)

_residuals: dict[int, tuple[Client, str]] = {}  # by address of the ticket
_origins: dict[int, tuple[Client, str]] = {}  # who computed a forward, kept on the server or not
_queue: queue.SimpleQueue[tuple[Client, str] | threading.Event] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_lock = threading.Lock()
_watched: weakref.WeakSet[Client] = weakref.WeakSet()


def blank() -> torch.Tensor:
    """A ticket that stands for nothing."""
    return torch.zeros(1, dtype=torch.uint8)


def issue(client: Client, residual: str | None, backend: str) -> torch.Tensor:
    """A ticket for a forward that `backend` computed. When it dies, `residual` is freed."""
    _start(client)
    memory = np.zeros(1, np.uint8)
    address = memory.ctypes.data
    if residual is not None:
        _residuals[address] = client, residual
    _origins[address] = client, backend
    weakref.finalize(memory, _drop, address).atexit = False
    return torch.from_numpy(memory)


def take(ticket: torch.Tensor) -> str | None:
    """The residual of a ticket, once: it is the caller's to free."""
    found = _residuals.pop(ticket.data_ptr(), None)
    return None if found is None else found[1]


def put_back(ticket: torch.Tensor, client: Client, residual: str) -> None:
    """Undo `take`: the residual could not be used, and is still there."""
    _residuals[ticket.data_ptr()] = client, residual


def origin(ticket: torch.Tensor) -> tuple[Client, str] | None:
    """Who computed the forward of a ticket: client and backend."""
    return _origins.get(ticket.data_ptr())


def _drop(address: int) -> None:
    """Of a finaliser: see above what it may do."""
    _origins.pop(address, None)
    found = _residuals.pop(address, None)
    if found is not None:
        _queue.put(found)


def _start(client: Client) -> None:
    global _thread
    if _thread is not None and client in _watched:
        return
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_release, name="flashwire-release", daemon=True)
            _thread.start()
        if client not in _watched:
            _watched.add(client)
            client.before_close(_release_all)


def _release() -> None:
    while True:
        item = _queue.get()
        if isinstance(item, threading.Event):
            item.set()
        else:
            client, residual = item
            try:
                client.release(residual, timeout=_PATIENCE)
            except FlashwireError as exc:
                _log.debug("a residual is left to expire: %s", exc)
            del client
        del item


def _release_all(client: Client | None = None) -> None:
    """Free what graphs that are still alive have kept, of one client or of all."""
    for address, (owner, _) in list(_residuals.items()):
        if client is None or owner is client:
            found = _residuals.pop(address, None)
            if found is not None:
                _queue.put(found)
    if _thread is not None:
        done = threading.Event()
        _queue.put(done)
        done.wait(_FAREWELL)


def _forget() -> None:
    """In a forked child: what it has inherited is its parent's to free."""
    global _queue, _thread, _lock
    _residuals.clear()
    _queue, _lock, _thread = queue.SimpleQueue(), threading.Lock(), None


atexit.register(_release_all)
os.register_at_fork(after_in_child=_forget)
