"""Frames over one end of a SOCK_SEQPACKET pair, each with at most one descriptor.

The kernel keeps packets whole and a descriptor with its packet, so nothing is reassembled here.
Sending never blocks unless asked to: what the socket has no room for waits in an outbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable

from flashwire_service.ipc import frames
from flashwire_service.ipc.frames import Frame

# A packet must fit the kernel's default socket buffer (about 208 KiB) with room to spare.
MAX_PACKET = 128 * 1024
# Bodies up to this size travel in their frame: cheaper than a memfd and its descriptor.
MAX_INLINE = 32 * 1024
_READS_PER_TURN = 32  # of an event loop, so that one busy peer does not starve the others
_MAX_FDS = 4
_GONE = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF}


class ChannelClosed(Exception):
    """The peer is gone, or this end was closed."""


class PacketTooLarge(ValueError):
    """The frame does not fit one packet of MAX_PACKET bytes."""


class Channel:
    """One end of a connection. Takes over the socket and makes it non-blocking.

    `post` and `flush` may be called from several threads, `try_recv` and `recv` from one.
    A descriptor given for sending stays the caller's; one received is the receiver's to close.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray(MAX_PACKET)
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected channels, for use inside one process."""
        a, b = socketpair()
        return cls(a), cls(b)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waiting(self) -> int:
        """Frames in the outbox; when not 0, call `flush` once the socket is writable."""
        return len(self._outbox)

    def post(self, frame: Frame, fd: int | None = None) -> None:
        """Send now, or keep the frame (and a duplicate of fd) in the outbox. Never blocks.

        Raises ChannelClosed when the peer is gone, PacketTooLarge.
        """
        packet = _packet(frame)
        with self._lock:
            if self._outbox or not self._try_send(packet, fd):
                self._outbox.append((packet, None if fd is None else os.dup(fd)))

    def flush(self) -> bool:
        """Send what the socket takes; true when the outbox is empty. Raises ChannelClosed."""
        with self._lock:
            while self._outbox:
                packet, fd = self._outbox[0]
                if not self._try_send(packet, fd):
                    return False
                self._outbox.popleft()
                if fd is not None:
                    os.close(fd)
            return True

    def send(self, frame: Frame, fd: int | None = None, timeout: float | None = None) -> None:
        """Send and wait until the kernel has it. Raises ChannelClosed, TimeoutError."""
        self.post(frame, fd)
        while not self.flush():
            if not _wait(self._sock, select.POLLOUT, timeout):
                raise TimeoutError("the peer does not read")

    def try_recv(self) -> tuple[Frame, int | None] | None:
        """The next frame and its descriptor, None when none has come. Raises ChannelClosed.

        A process that has no descriptor to spare gets the frame alone: its receiver sees that it
        lacks what it tells of.
        """
        try:
            size, ancillary, flags = self._recvmsg()
        except BlockingIOError:
            return None
        except OSError as e:
            raise ChannelClosed from e
        fds = _descriptors(ancillary)
        try:
            if size == 0:
                raise ChannelClosed
            cut = socket.MSG_TRUNC | (socket.MSG_CTRUNC if fds else 0)
            if flags & cut or len(fds) > 1:
                raise ValueError("a packet of more than one frame and one descriptor")
            frame = frames.decode(memoryview(self._buffer)[:size])
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return frame, fds[0] if fds else None

    def recv(self, timeout: float | None = None) -> tuple[Frame, int | None]:
        """The next frame and its descriptor. Raises ChannelClosed, TimeoutError."""
        while (got := self.try_recv()) is None:
            if not _wait(self._sock, select.POLLIN, timeout):
                raise TimeoutError("no frame came")
        return got

    def close(self) -> None:
        """Close the socket and drop the outbox. Harmless when repeated."""
        with self._lock:
            self._closed = True
            self._sock.close()
            while self._outbox:
                _, fd = self._outbox.popleft()
                if fd is not None:
                    os.close(fd)

    def _recvmsg(self) -> tuple[int, list[tuple[int, int, bytes]], int]:
        space = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)

        def receive() -> tuple[int, list[tuple[int, int, bytes]], int]:
            return self._sock.recvmsg_into([self._buffer], space, socket.MSG_CMSG_CLOEXEC)[:3]

        try:
            return receive()
        except ConnectionResetError:
            # The peer ended without reading all it was sent. This is said once, ahead of what the
            # peer itself had sent before.
            return receive()

    def _try_send(self, packet: bytes, fd: int | None) -> bool:
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
        try:
            self._sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as e:
            if e.errno == errno.ETOOMANYREFS:  # too many descriptors in flight: a full socket
                return False
            if e.errno in _GONE:
                raise ChannelClosed from e
            raise
        return True


class AsyncChannel:
    """A Channel on an event loop. Use it from the loop's thread only.

    on_frame(frame, fd) is called for each frame and owns fd; on_close() once, when the peer is
    gone (not after `close`).
    """

    def __init__(
        self,
        channel: Channel,
        on_frame: Callable[[Frame, int | None], None],
        on_close: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._on_frame = on_frame
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._writing = False
        self._loop.add_reader(channel.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        return self._channel.closed

    def send(self, frame: Frame, fd: int | None = None) -> None:
        """Send now or as soon as the socket takes it. Raises ChannelClosed, PacketTooLarge."""
        if self._channel.closed:
            raise ChannelClosed
        self._channel.post(frame, fd)
        if self._channel.waiting and not self._writing:
            self._writing = True
            self._loop.add_writer(self._channel.fileno(), self._writable)

    def close(self) -> None:
        """Leave the loop and close. Harmless when repeated."""
        if self._channel.closed:
            return
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()

    def _readable(self) -> None:
        try:
            for _ in range(_READS_PER_TURN):
                if self._channel.closed or (got := self._channel.try_recv()) is None:
                    return
                self._on_frame(*got)
        except ChannelClosed:
            self._lost()

    def _writable(self) -> None:
        with contextlib.suppress(ChannelClosed):  # the reader sees the same end of file, and acts
            if not self._channel.flush():
                return
        self._writing = False
        self._loop.remove_writer(self._channel.fileno())

    def _lost(self) -> None:
        self.close()
        self._on_close()


def socketpair() -> tuple[socket.socket, socket.socket]:
    """A connected pair for channels, both ends close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _packet(frame: Frame) -> bytes:
    packet = frames.encode(frame)
    if len(packet) > MAX_PACKET:
        raise PacketTooLarge(f"a frame of {len(packet)} bytes; at most {MAX_PACKET} fit a packet")
    return packet


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _wait(sock: socket.socket, event: int, timeout: float | None) -> bool:
    if sock.fileno() < 0:
        raise ChannelClosed
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(None if timeout is None else timeout * 1000))
