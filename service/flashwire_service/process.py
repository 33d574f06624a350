"""One child process: verbs of its parent (`Child`), and how the child takes up its life (`adopt`).

A child is a fresh interpreter that inherits one socket, its control channel, whose number is its
only argument. The first frame on it is Start. The channel is also the child's lifeline: end of
file means that the parent is gone, or wants the child gone now.

Children are born with SIGINT, SIGTERM and SIGHUP blocked: a Ctrl-C, a service manager or a terminal
that goes signals the whole group, and what happens then is the supervisor's to decide.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashwire_service.ipc.board import Board
from flashwire_service.ipc.channel import Channel, ChannelClosed, socketpair
from flashwire_service.ipc.frames import Frame, Listen, Share, Start
from flashwire_service.settings import Settings, secret_variables

DEVICE_LOST = os.EX_IOERR  # exit code: the device failed, and a new process may find it well
_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 10.0  # the first frames are sent before the child runs


class Child:
    """A running child, from its parent's side. Make it in the main thread: PR_SET_PDEATHSIG ends
    a child together with the *thread* that made it.
    """

    def __init__(
        self,
        module: str,
        index: int,
        settings: Settings,
        page: int,
        board: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `python -m module` and hand it the descriptors of the page of its heartbeat and of
        the board. `environment` is added to this process's own,
        without its secrets.
        """
        ours, theirs = socketpair()
        self.control = Channel(ours)
        self.started = time.monotonic()
        try:
            start = Start(index=index, parent=os.getpid(), settings=settings.to_bytes())
            self.control.send(start, page)
            self.control.send(Share(), board)
            self._popen = _spawn(
                # -P: modules are not looked for in the working directory
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                theirs.fileno(),
                environment or {},
            )
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives, -N when signal N ended it. Reaps it."""
        return self._popen.poll()

    def tell(self, frame: Frame, fd: int | None = None) -> None:
        """Post a frame; a child that just died is not told."""
        with contextlib.suppress(ChannelClosed):
            self.control.post(frame, fd)
            self.control.flush()  # what waits since it was slow to listen

    def terminate(self) -> None:
        """Cut its lifeline: it ends by itself, without finishing what it does."""
        self.control.close()

    def kill(self) -> None:
        """SIGKILL, which ends a stopped process too."""
        self._popen.kill()

    def join(self, timeout: float) -> bool:
        """Wait for its end; true when it came."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True


def _spawn(
    command: Sequence[str], fd: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """A signal mask is inherited, so there is no moment at which Ctrl-C could hit the child.

    Secrets come with the settings, over the control channel; its environment is for all to inherit.
    """
    secrets = secret_variables()
    inherited = {name: value for name, value in os.environ.items() if name not in secrets}
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        return subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # the supervisor's stdout is for its one line
            pass_fds=[fd],
            env={**inherited, **environment},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class Adopted:
    """What a child was born with. `page`, of its heartbeat, is a descriptor of its own."""

    control: Channel
    index: int
    settings: Settings
    page: int
    board: Board

    def listener(self) -> socket.socket:
        """A listening socket, which a front end is sent next: first TCP's, then perhaps another."""
        frame, fd = self.control.recv(_START_TIMEOUT_S)
        if not isinstance(frame, Listen) or fd is None:
            raise ValueError("a front end must be sent Listen next, with a descriptor")
        return socket.socket(fileno=fd)


def adopt(arguments: Sequence[str]) -> Adopted:
    """Called first by a child, in its main thread, with sys.argv[1:]. Exits when orphaned."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    (number,) = arguments
    inherited = socket.socket(fileno=int(number))
    inherited.set_inheritable(False)
    control = Channel(inherited)
    start, fd = control.recv(_START_TIMEOUT_S)
    if not isinstance(start, Start) or fd is None:
        raise ValueError("the first frame of a child must be Start, with a descriptor")
    if os.getppid() != start.parent:  # it died before prctl could tell
        sys.exit(os.EX_UNAVAILABLE)
    settings = Settings.from_bytes(start.settings)
    share, shared = control.recv(_START_TIMEOUT_S)
    if not isinstance(share, Share) or shared is None:
        raise ValueError("the second frame of a child must be Share, with a descriptor")
    board = Board.receive(shared, settings.frontends, settings.workers)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each waiting request may hold one
    return Adopted(control, start.index, settings, fd, board)
