"""The life and death of the service's processes. Standard library and frames only.

The supervisor binds the port, starts workers and front ends, gives every front end a socket to
every worker, and replaces what dies or hangs. It sees no request. One thread, one loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from flashwire.local.frames import SUFFIX
from flashwire_service import logs, meter
from flashwire_service.environment import FRONT_ENVIRONMENT, worker_environment
from flashwire_service.ipc import board
from flashwire_service.ipc.board import Board
from flashwire_service.ipc.channel import ChannelClosed, socketpair
from flashwire_service.ipc.frames import (
    Acquit,
    Attach,
    Drain,
    Failure,
    Listen,
    Ready,
    Reload,
    State,
    Suspect,
)
from flashwire_service.ipc.heartbeat import IDLE_LIMIT_S, Heartbeat
from flashwire_service.ipc.memory import Memory
from flashwire_service.keys import Keyring, KeysError
from flashwire_service.listening import Fatal, listen, url
from flashwire_service.logs import Log
from flashwire_service.meter import Meter
from flashwire_service.places import Place
from flashwire_service.process import Child
from flashwire_service.quarantine import Quarantine
from flashwire_service.settings import Settings
from flashwire_service.socket_file import SocketFile

WORKER = "flashwire_service.compute.worker"
FRONT = "flashwire_service.front.server"
LOOK_S = 0.25  # how often children are judged
LATE_S = 1.0  # a look so long after the one before says more about the judge
GIVE_UP = 5  # deaths in a row, none of them ever ready
END_S = 2.0  # from being told to end to SIGKILL
ALWAYS_SHOWN = ("SIGKILL", "SIGSEGV", "hung", "device_lost", "start")  # causes, also if never seen
FORCED = 128  # + the signal's number


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. The exit code is 0 after a drain, else

    EX_UNAVAILABLE  the port is in use        EX_NOPERM    it needs a privilege
    EX_NOHOST       no such local address     EX_CONFIG    the device cannot be used
    EX_CANTCREAT    no unix socket there
    EX_SOFTWARE     a child cannot be started 128 + N      a second signal N forced the end

    and one line on stderr says why.
    """
    try:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(listen(settings.host, settings.port))
            address = url(listener, tls=bool(settings.tls_cert))
            files = [stack.enter_context(file) for file in _files(settings)]
            if settings.uds:
                address += f" and unix://{settings.uds}"
            signals = stack.enter_context(_signals())
            print(f"flashwire: listening on {address}", flush=True)
            return Supervisor(settings, listener, signals, files).run()
    except Fatal as e:
        logs.say(f"flashwire-serve: {e}")
        return e.code


def _files(settings: Settings) -> Iterator[SocketFile]:
    """The unix sockets: that of HTTP, and that of callers who share memory."""
    if settings.uds:
        yield SocketFile(settings.uds, settings.uds_mode)
    if settings.shares_memory:
        yield SocketFile(settings.uds + SUFFIX, settings.uds_mode, socket.SOCK_SEQPACKET)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket from which the numbers of caught signals are read, as the loop comes to it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        before = {number: signal.signal(number, lambda *_: None) for number in caught}
        before_fd = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)


class Supervisor:
    """The loop over all places. `signals` yields the bytes of caught signal numbers."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        signals: socket.socket,
        files: Sequence[SocketFile] = (),
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._files = files
        self._signals = signals
        self._log = Log("supervisor", settings.log_level)
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._workers = [Place("worker", i) for i in range(settings.workers)]
        self._fronts = [Place("front", i) for i in range(settings.frontends)]
        processes = settings.frontends, settings.workers
        self._board_memory = Memory.create(board.size_of(*processes))
        self._board = Board(self._board_memory.view, *processes)
        self._meter = Meter(self._board.regions["supervisor"])
        self._log.count_on(self._meter)
        for cause in ALWAYS_SHOWN:
            self._meter.add(meter.WORKER_RESTARTS, 0, cause)
        self._quarantine = Quarantine(settings.quarantine_s)
        self._told = State()  # what every front end knows
        self._stopping = False
        self._looked = 0.0  # when children were last judged
        self._trust_from = 0.0  # when silence begins to count

    def run(self) -> int:
        """Until told to stop, then drain. Returns the exit code; raises Fatal. Leaves no child."""
        own = self._settings
        self._log.info(
            "starting", version=version("flashwire"), pid=os.getpid(),
            device=own.device, workers=own.workers, frontends=own.frontends,
        )  # fmt: skip
        try:
            while not self._stopping:
                self._fill_places(time.monotonic())
                self._wait(LOOK_S)
                self._judge(time.monotonic())
                self._tell_fronts()
            return self._drain()
        finally:
            self._kill_all()
            self._selector.close()
            self._board_memory.close()

    # Births

    def _fill_places(self, now: float) -> None:
        for place in (*self._workers, *self._fronts):
            if place.child is None and now >= place.not_before:
                self._start(place)

    def _start(self, place: Place) -> None:
        try:
            if place.role == "worker":
                module, environment = WORKER, worker_environment(self._settings)
                peers = self._fronts
            else:
                module, environment = FRONT, FRONT_ENVIRONMENT
                peers = self._workers
            place.heartbeat, place.hung = Heartbeat.create(), False
            settings = self._settings
            if place.role == "worker":  # it sees no key, nor needs one
                settings = dataclasses.replace(settings, api_keys=Keyring())
            if place.device:  # what was served by a GPU is not computed at a CPU's pace unasked
                settings = dataclasses.replace(settings, device=place.device)
            if place.stillborn:  # warming up may be what killed it
                settings = dataclasses.replace(settings, warmup="")
            page = place.heartbeat.memory.fd
            board_fd = self._board_memory.fd
            child = Child(module, place.index, settings, page, board_fd, environment)
        except OSError as e:  # no process, memory or descriptor to be had, for now
            self._failed(place, None, time.monotonic(), reason=f"cannot be started: {e.strerror}")
            return
        place.child, place.ready_since = child, None
        self._selector.register(child.control, selectors.EVENT_READ, place)
        self._log.info("started", child=place.name, pid=child.pid)
        try:
            if place.role == "front":
                child.tell(Listen(), self._listener.fileno())
                for file in self._files:
                    child.tell(Listen(), file.socket.fileno())
                child.tell(self._told)
            for peer in peers:
                _connect(place, peer)
        except OSError as e:  # one that nobody can reach is of no use
            self._log.warning("unreachable", child=place.name, why=e.strerror)
            child.kill()

    # What happens

    def _wait(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._take_signals()
            else:
                self._listen_to(key.data)

    def _take_signals(self) -> None:
        for number in self._signals.recv(4096):
            if number == signal.SIGCHLD:
                continue  # only to wake up: the dead are found by looking
            if number == signal.SIGHUP:
                self._reload()
                continue
            if self._stopping:
                raise Fatal(FORCED + number, "stopped at once by a second signal")
            self._log.info("stopping", signal=signal.Signals(number).name)
            self._stopping = True

    def _reload(self) -> None:
        """Read the keys again, and have the front ends take them and read their certificate. What
        cannot be used changes nothing.
        """
        path, ring = self._settings.api_keys_file, self._settings.api_keys
        try:
            ring = ring.with_file(path) if path else ring
            self._log.info("keys read", names=[key.name for key in ring])
        except KeysError as e:
            self._log.error("keys not read, those before hold", mistakes=e.mistakes)
            self._meter.add(meter.RELOAD_FAILURES, 1, "keys")
        self._settings = dataclasses.replace(self._settings, api_keys=ring)
        for place in self._fronts:
            if place.child is not None:
                place.child.tell(Reload(keys=ring.packed()))

    def _listen_to(self, place: Place) -> None:
        child = place.child
        if child is None:
            return
        try:
            while (got := child.control.try_recv()) is not None:
                frame = got[0]
                if isinstance(frame, Ready):
                    place.ready(time.monotonic(), str(frame.facts.get("device", "")))
                    self._log.info("ready", child=place.name, pid=child.pid, **frame.facts)
                elif isinstance(frame, Suspect):
                    self._quarantine.died(frame.head, frame.digest, alone=frame.alone)
                    refused = self._quarantine.refuses(frame.digest)
                    self._log.warning("suspect", digest=frame.digest.hex(), refused=refused)
                elif isinstance(frame, Acquit):
                    self._quarantine.survived(frame.digest)
                elif isinstance(frame, Failure):
                    if not place.ever_ready:
                        raise Fatal(os.EX_CONFIG, frame.detail)
                    self._log.error("no device", child=place.name, why=frame.detail)
        except ChannelClosed:  # it is dying, and its death will be seen
            self._selector.unregister(child.control)
            child.control.close()

    def _tell_fronts(self) -> None:
        """What has changed since they were last told."""
        self._meter.set(meter.QUARANTINED, self._quarantine.refused)
        state = State(
            workers=tuple(place.state for place in self._workers),
            suspects=self._quarantine.entries,
        )
        if state == self._told:
            return
        self._told = state
        for place in self._fronts:
            if place.child is not None:
                place.child.tell(state)

    # Deaths

    def _judge(self, now: float) -> None:
        if now - self._looked > LATE_S:  # this process slept, so all the machine may have
            self._trust_from = now + IDLE_LIMIT_S
        self._looked = now
        for place in (*self._workers, *self._fronts):
            if place.child is None:
                continue
            if (code := place.child.exit_code) is not None:
                self._bury(place, place.child, code, now)
            elif place.hung:
                continue  # killed, and about to end
            elif now >= self._trust_from and (complaint := place.complaint(now)):
                self._log.error("hung", child=place.name, pid=place.child.pid, why=complaint)
                place.hung = True
                place.child.kill()

    def _bury(self, place: Place, child: Child, code: int, now: float) -> None:
        if not child.control.closed:
            self._listen_to(place)  # its last words
        self._failed(place, code, now, reason=f"exit code {code}", pid=child.pid)

    def _failed(self, place: Place, code: int | None, now: float, **why: object) -> None:
        """Make room for a replacement, later when its predecessors failed too."""
        wait = place.failed(now, code)
        self._forget(place)
        if self._stopping:
            return
        restarts = {"worker": meter.WORKER_RESTARTS, "front": meter.FRONTEND_RESTARTS}
        self._meter.add(restarts[place.role], 1, place.cause)
        self._log.warning(
            "died",
            child=place.name,
            cause=place.cause,
            **why,
            in_a_row=place.deaths,
            restarts=place.restarts,
            restart_in_s=wait,
        )
        if not place.ever_ready and place.deaths >= GIVE_UP:
            line = f"{place.name} failed {place.deaths} times and was never ready"
            raise Fatal(os.EX_SOFTWARE, line)

    def _forget(self, place: Place) -> None:
        child, place.child, place.ready_since = place.child, None, None
        meter.leave(self._board.regions[place.name])
        if child is not None and not child.control.closed:
            self._selector.unregister(child.control)
            child.control.close()
        if place.heartbeat is not None:
            place.heartbeat.close()
            place.heartbeat = None

    # The end

    def _drain(self) -> int:
        """Fronts finish what is in flight, then workers end. Whoever overstays is killed."""
        self._listener.close()
        for file in self._files:
            file.close()
        grace = self._settings.grace_s
        self._end(self._fronts, Drain(grace=grace), grace + END_S)
        self._end(self._workers, Drain(grace=0.0), END_S)
        self._log.info("stopped")
        return 0

    def _end(self, places: list[Place], order: Drain, patience: float) -> None:
        deadline = time.monotonic() + patience
        for place in places:
            if place.child is not None:
                place.child.tell(order)
        while any(place.child for place in places) and time.monotonic() < deadline:
            self._wait(min(LOOK_S, max(0.0, deadline - time.monotonic())))
            self._judge(time.monotonic())
        for place in places:
            if place.child is not None:
                self._log.warning("overstayed", child=place.name, pid=place.child.pid)
                place.child.kill()

    def _kill_all(self) -> None:
        places = [p for p in (*self._fronts, *self._workers) if p.child is not None]
        for place in places:
            if place.child is not None:
                place.child.kill()
        for place in places:
            if place.child is not None:
                place.child.join(END_S)
            self._forget(place)


def _connect(a: Place, b: Place) -> None:
    """Give two living children the ends of a new socket."""
    if a.child is None or b.child is None:
        return
    end_a, end_b = socketpair()
    with end_a, end_b:
        a.child.tell(Attach(peer=b.index), end_a.fileno())
        b.child.tell(Attach(peer=a.index), end_b.fileno())
