"""The side door: callers on the same machine, whose bodies lie in memory that they share with us.

Connections of a SOCK_SEQPACKET socket beside that of HTTP, for the same application. A packet is a
request, and its reply one back (flashwire.local.frames). Callers are strangers: whoever sends what
no client of ours would send is cut off, and harms nobody else. A connection carries one request at
a time; its end, whenever and however it comes, gives that up and lets go of the memory.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from array import array
from collections.abc import Callable

from flashwire.local.frames import MAX_PACKET, FrameError, Request, decode_request
from flashwire_service import meter
from flashwire_service.errors import EXHAUSTED, Refusal, is_exhaustion
from flashwire_service.front.calls import Call, Outcome, fresh_id, unread_bytes
from flashwire_service.front.edge import App
from flashwire_service.front.lent import Lent
from flashwire_service.ipc.memory import Memory
from flashwire_service.logs import Log
from flashwire_service.meter import Meter
from flashwire_service.settings import Settings

_ACCEPTS_PER_TURN = 32
_PAUSE_S = 1.0  # without a descriptor for the next connection
_PAGE = os.sysconf("SC_PAGESIZE")
_MAX_FDS = 4  # that are received, to be closed; more are dropped by the kernel
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Door:
    """Accepts callers, and keeps what all of them together may have. For one event loop only."""

    def __init__(
        self,
        listener: socket.socket,
        app: App,
        settings: Settings,
        log: Log,
        counted: Meter,
        tasks: set[asyncio.Task[None]],
        on_refused: Callable[[Refusal, str], None],
    ) -> None:
        """`tasks` are those that the end of the process waits for; on_refused is told of what is
        refused here, and by which request id.
        """
        listener.setblocking(False)
        self._listener = listener
        self.app = app
        self.settings = settings
        self.log = log
        self.meter = counted
        self.tasks = tasks
        self._on_refused = on_refused
        self.connections: set[Connection] = set()
        self.held_bytes = 0  # of memory that callers share
        self.buffer = memoryview(bytearray(MAX_PACKET))  # every packet is received here, and read
        self.draining = False

    def open(self) -> None:
        """Begin to accept."""
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more. Connections end with their request, if they carry one."""
        if self.draining:
            return
        self.draining = True
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for connection in [c for c in self.connections if not c.busy]:
            connection.close()

    def sweep(self) -> None:
        """Close what was idle for long. To be called now and then."""
        oldest = asyncio.get_running_loop().time() - self.settings.keep_alive_s
        for connection in [c for c in self.connections if not c.busy and c.idle_since < oldest]:
            connection.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as e:
                if not is_exhaustion(e):
                    raise
                self._pause()
                return
            sock.setblocking(False)
            if not self._has_room():
                most = self.settings.max_connections
                said = f"all {most} connections that this server keeps are in use"
                with sock:  # the reply to whatever is going to be asked
                    self.refusal(Refusal("too_many_connections", said)).send(sock)
                continue
            self.connections.add(Connection(self, sock))
            self.meter.add(meter.LOCAL_CONNECTIONS, 1)

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(_PAUSE_S, lambda: None if self.draining else self.open())

    def refusal(self, refusal: Refusal) -> Outcome:
        """A reply without asking the application."""
        request_id = fresh_id()
        self._on_refused(refusal, request_id)
        return Outcome.of(refusal, request_id)

    def make_room(self, nbytes: int) -> bool:
        """Whether so many bytes more of memory may be held, once those who do not use theirs have
        lost it. Else a few who hold much, and ask nothing, would keep all others out.
        """
        most = self.settings.shared_memory_bytes
        idle = [c for c in self.connections if not c.busy and c.held_bytes]
        idle.sort(key=lambda c: c.idle_since, reverse=True)
        while idle and self.held_bytes + nbytes > most:
            idle.pop().close()
        return self.held_bytes + nbytes <= most

    def hold(self, nbytes: int) -> None:
        """So many bytes more of callers' memory, or less."""
        self.held_bytes += nbytes
        self.meter.set(meter.SHARED_BYTES, self.held_bytes)

    def _has_room(self) -> bool:
        """Whether one more connection is taken, perhaps in place of the one idle for longest."""
        if len(self.connections) < self.settings.max_connections:
            return True
        idle = [c for c in self.connections if not c.busy]
        if idle:
            min(idle, key=lambda c: c.idle_since).close()
        return bool(idle)


class Connection:
    """One caller's, for one request at a time."""

    def __init__(self, door: Door, sock: socket.socket) -> None:
        self._door = door
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._memory: Memory | None = None
        self._call: Call | None = None
        self.idle_since = self._loop.time()
        self._loop.add_reader(sock, self._readable)

    @property
    def busy(self) -> bool:
        return self._call is not None

    @property
    def held_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.size

    def close(self) -> None:
        """Give up what was asked, and the memory. Harmless when repeated."""
        if self not in self._door.connections:
            return
        self._door.connections.discard(self)
        self._door.meter.add(meter.LOCAL_CONNECTIONS, -1)
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._drop_memory()
        if self._call is not None:
            self._call.leave()

    def _readable(self) -> None:
        try:
            got = self._receive()
            if got is not None:
                self._take(*got)
        except (EOFError, ConnectionResetError):
            self.close()
        except ValueError as e:  # FrameError is one
            self._cut_off(str(e))

    def _cut_off(self, why: str) -> None:
        pid, uid, gid = self._peer()
        self._door.log.warning("caller cut off", why=why, pid=pid, uid=uid, gid=gid)
        self.close()

    def _peer(self) -> tuple[int, int, int]:
        """Who the kernel says connected."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, gid = _CREDENTIALS.unpack(raw)
        return pid, uid, gid

    def _receive(self) -> tuple[Request, int | None, bool] | None:
        """The next request, its descriptor, and whether descriptors were lost on the way."""
        space = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
        try:
            size, ancillary, flags, _ = self._sock.recvmsg_into(
                [self._door.buffer], space, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        fds = array("i")
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        try:
            if size == 0:
                raise EOFError
            if len(fds) > 1 or flags & socket.MSG_TRUNC:
                raise FrameError("more than one frame and one descriptor")
            frame = decode_request(self._door.buffer[:size])
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return frame, fds[0] if fds else None, bool(flags & socket.MSG_CTRUNC)

    def _take(self, request: Request, fd: int | None, lost: bool) -> None:
        """Begin a request. Raises FrameError."""
        try:
            if self.busy or unread_bytes(self._sock):
                raise FrameError("a request before the reply to the last one was taken")
            if fd is not None and not request.size:
                raise FrameError("memory that no body lies in")
            head = len(request.target) + sum(len(n) + len(v) + 4 for n, v in request.headers)
            if head > (limit := self._door.settings.max_header_bytes):
                raise Refusal("headers_too_large", f"the head of a request may have {limit} bytes")
            if fd is not None or lost:
                self._drop_memory()
                fd, attached = None, fd
                self._attach(attached)
            if request.size > self.held_bytes:
                raise FrameError(f"a body of {request.size} bytes in memory of {self.held_bytes}")
            self._begin(request)
        except Refusal as refusal:  # what the caller holds for shared may not be: it starts anew
            self._door.refusal(refusal).send(self._sock)
            self.close()
        finally:
            if fd is not None:
                os.close(fd)

    def _attach(self, fd: int | None) -> None:
        """Take the memory of a descriptor, None for one that was lost for want of descriptors.

        Raises ValueError, Refusal.
        """
        if fd is None:
            raise Refusal("queue_full", EXHAUSTED)
        door = self._door
        try:
            memory = Memory.lent(fd)
        except OSError as e:
            if not is_exhaustion(e):
                raise ValueError(f"memory that cannot be mapped: {e.strerror}") from e
            raise Refusal("queue_full", EXHAUSTED) from e
        try:
            most = door.settings.max_body_bytes
            if memory.size - most >= _PAGE:
                said = f"the memory has {memory.size} bytes, the limit is {most}"
                raise Refusal("too_large", said)
            if not door.make_room(memory.size):
                said = f"callers share {door.held_bytes} of {door.settings.shared_memory_bytes}"
                more = f"and there is no room for {memory.size} more"
                raise Refusal("queue_full", f"{said} bytes of memory, {more}")
        except Refusal:
            memory.close()
            raise
        self._memory = memory
        door.hold(memory.size)

    def _drop_memory(self) -> None:
        """A request that is being answered has it still, by itself."""
        if self._memory is not None:
            self._door.hold(-self._memory.size)
            self._memory.close()
            self._memory = None

    def _begin(self, request: Request) -> None:
        lent = Lent(request.body, len(request.body))
        if request.size and self._memory is not None:
            try:
                lent = Lent(self._memory.again(), request.size)
            except OSError as e:  # no descriptor
                raise Refusal("queue_full", EXHAUSTED) from e
        self._call = Call(request, lent)
        task = self._loop.create_task(self._answer(self._call))
        self._door.tasks.add(task)
        task.add_done_callback(self._door.tasks.discard)

    async def _answer(self, call: Call) -> None:
        outcome = None
        try:
            outcome = await call.run(self._door.app)
            here = self in self._door.connections
            if here and (outcome is None or not outcome.send(self._sock)):
                self.close()
        finally:
            if outcome is not None:
                outcome.close()
            self._call, self.idle_since = None, self._loop.time()
            if self._door.draining:
                self.close()
