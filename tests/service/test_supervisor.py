"""Life and death of processes: real processes and signals, with children that load no torch."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashwire_service import environment, keys, listening, meter, places, supervisor
from flashwire_service.meter import Meter
from flashwire_service.settings import Settings

HERE = Path(__file__).parent
PATH = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
SCRIPT = """
import sys
import os
from flashwire_service import places, supervisor
from flashwire_service.settings import Settings
places.FRONT_LIMIT_S = float(os.environ.get("FRONT_LIMIT_S", "10"))
supervisor.WORKER, supervisor.FRONT = "stub_worker", "stub_front"
sys.exit(supervisor.run(Settings(**eval(sys.argv[1]))))
"""
PATIENCE_S = 20.0


class Service:
    """A supervisor with stub children, seen through its output."""

    def __init__(self, mode: str = "", environ=(), **settings) -> None:
        settings = {"port": 0, "grace_s": 5.0, **settings}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, repr(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": PATH, "FLASHWIRE_STUB": mode, **dict(environ)},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        self.lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def events(self) -> list[dict]:
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    @property
    def pids(self) -> set[int]:
        """Of every child there ever was."""
        return {e["pid"] for e in self.events if e["event"] == "started"}

    def pid_of(self, child: str) -> int:
        """Of the child that was last ready in this place."""
        return [e for e in self.events if e["event"] == "ready" and e["child"] == child][-1]["pid"]

    def ends(self, child: str) -> list[dict]:
        return [e for e in self.events if e["event"] == "died" and e["child"] == child]

    def wait_for(self, event: str, child: str, count: int = 1) -> dict:
        def found():
            seen = [e for e in self.events if e["event"] == event and e.get("child") == child]
            return seen[count - 1] if len(seen) >= count else None

        return wait_until(found)

    def ready(self) -> "Service":
        line = self.process.stdout.readline()
        assert line.startswith("flashwire: listening on http://127.0.0.1:")
        self.port = int(line.rsplit(":", 1)[1])
        self.wait_for("ready", "worker-0")
        self.wait_for("ready", "front-0")
        return self

    def ask(self, word: bytes = b"hello") -> dict:
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            connection.sendall(word)
            return json.loads(connection.makefile().read())

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()


def wait_until(check):
    deadline = time.monotonic() + PATIENCE_S
    while not (result := check()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return result


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.fixture
def start():
    services = []

    def make(mode: str = "", environ=(), **settings) -> Service:
        services.append(Service(mode, environ, **settings))
        return services[-1]

    yield make
    for service in services:
        service.close()
        wait_until(lambda s=service: not any(alive(pid) for pid in s.pids))


def test_sigterm_ends_all_with_exit_code_0(start):
    service = start().ready()
    assert service.ask() == {
        "pid": service.pid_of("front-0"),
        "workers": [service.pid_of("worker-0")],
    }
    assert service.stop() == 0
    assert not any(alive(pid) for pid in service.pids)
    with pytest.raises(ConnectionRefusedError):
        service.ask()
    assert service.process.stdout.read() == ""


def test_a_request_in_flight_outlives_sigterm(start):
    service = start().ready()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(service.ask(b"slow")))
    asking.start()
    time.sleep(0.3)
    assert service.stop() == 0
    asking.join()
    assert answers[0]["workers"]


def test_every_front_reaches_every_worker(start):
    service = start(workers=2, frontends=2).ready()
    for child in ("worker-1", "front-1"):
        service.wait_for("ready", child)
    workers = {service.pid_of("worker-0"), service.pid_of("worker-1")}
    fronts = {service.pid_of("front-0"), service.pid_of("front-1")}
    seen = set()
    wait_until(lambda: seen.add(service.ask()["pid"]) or seen == fronts)
    wait_until(lambda: set(service.ask()["workers"]) == workers)


def test_children_do_not_inherit_secrets(start):
    secrets = {"FLASHWIRE_API_KEYS": "a-secret-key", "FLASHWIRE_SIGNING_KEY": "sixteen letters!"}
    service = start("", {**secrets, "FLASHWIRE_HARMLESS": "seen"}).ready()
    for pid in service.pids:
        environ = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert "FLASHWIRE_HARMLESS=seen" in environ
        assert not {line.partition("=")[0] for line in environ} & secrets.keys()


def test_workers_are_told_no_key(monkeypatch):
    told = {}

    class Living:
        pid = 1

        def __init__(self, module, index, settings, *_: object) -> None:
            told[module] = [key.name for key in settings.api_keys]
            self.control, self.other = supervisor.socketpair()

        def tell(self, *_: object) -> None:
            pass

    monkeypatch.setattr(supervisor, "Child", Living)
    with socket.socket() as listener, socket.socket() as signals:
        settings = Settings(log_level="error", api_keys=keys.listed("first-key"))
        judge = supervisor.Supervisor(settings, listener, signals)
        judge._fill_places(0.0)
        judge._selector.close()
        for place in (*judge._workers, *judge._fronts):
            place.child.control.close()
            place.child.other.close()
            if place.heartbeat is not None:
                place.heartbeat.close()
    assert told == {supervisor.WORKER: [], supervisor.FRONT: ["env:1"]}


def test_what_a_dead_child_held_is_gone_and_what_it_counted_stays():
    with socket.socket() as listener, socket.socket() as signals:
        judge = supervisor.Supervisor(Settings(log_level="error"), listener, signals)
        counting = Meter(judge._board.regions["worker-0"])
        counting.set(meter.RESIDUALS, 3, "0")
        counting.add(meter.LOG_LINES_DROPPED, 2)
        judge._failed(judge._workers[0], -9, time.monotonic())
        assert counting.region.pid == 0
        assert counting.value(meter.RESIDUALS, "0") == 0
        assert counting.value(meter.LOG_LINES_DROPPED) == 2
        assert judge._meter.value(meter.WORKER_RESTARTS, "SIGKILL") == 1
        judge._kill_all()
        judge._selector.close()


def test_hanging_up_ends_nothing(start):
    """A terminal that goes signals the whole group: to the supervisor it means to read again."""
    service = start().ready()
    for pid in (*service.pids, service.process.pid):
        os.kill(pid, signal.SIGHUP)
    wait_until(lambda: any(e["event"] == "keys read" for e in service.events))
    answer = service.ask()
    assert {answer["pid"], *answer["workers"]} == service.pids
    service.process.send_signal(signal.SIGHUP)
    assert service.stop() == 0


def test_a_killed_worker_is_replaced_at_once_and_reached(start):
    service = start().ready()
    first = service.pid_of("worker-0")
    os.kill(first, signal.SIGKILL)
    assert service.wait_for("died", "worker-0")["restart_in_s"] == 0
    second = service.wait_for("ready", "worker-0", count=2)["pid"]
    assert second != first
    wait_until(lambda: service.ask()["workers"] == [second])


def test_a_killed_front_is_replaced_on_the_same_port(start):
    service = start().ready()
    first = service.ask()["pid"]
    os.kill(first, signal.SIGKILL)
    answer = service.ask()
    assert answer["pid"] != first
    wait_until(lambda: service.ask()["workers"] == [service.pid_of("worker-0")])


def test_a_stopped_worker_counts_as_hung_and_is_replaced(start):
    service = start().ready()
    os.kill(service.pid_of("worker-0"), signal.SIGSTOP)
    started = time.monotonic()
    assert "idle and silent" in service.wait_for("hung", "worker-0")["why"]
    assert time.monotonic() - started > 1.5
    service.wait_for("ready", "worker-0", count=2)


def test_a_stopped_front_counts_as_hung_and_is_replaced(start):
    service = start("", {"FRONT_LIMIT_S": "3"}).ready()
    stopped = service.pid_of("front-0")
    os.kill(stopped, signal.SIGSTOP)
    assert "silent" in service.wait_for("hung", "front-0")["why"]
    assert service.wait_for("died", "front-0")["cause"] == "hung"
    answer = service.ask()
    assert answer["pid"] != stopped
    wait_until(lambda: service.ask()["workers"] == [service.pid_of("worker-0")])


def test_a_crash_loop_is_seen_by_every_front(start):
    service = start("", {"FRONT_LIMIT_S": "3"}).ready()
    (before,) = service.ask(b"state")["state"]
    assert (before["ready"], before["cause"], before["restarts"]) == (True, "", 0)
    for number, cause in ((signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "hung")):
        os.kill(service.pid_of("worker-0"), number)
        service.wait_for("ready", "worker-0", count=len(service.ends("worker-0")) + 2)
        assert service.ends("worker-0")[-1]["cause"] == cause
    count = {"SIGKILL": 1, "hung": 1}
    wait_until(lambda: service.ask(b"state")["restarts"] == count)
    os.kill(service.pid_of("front-0"), signal.SIGKILL)  # its successor is told at its start
    found = wait_until(lambda: service.ask(b"state"))
    assert found["restarts"] == count
    os.kill(service.pid_of("worker-0"), signal.SIGKILL)
    service.wait_for("died", "worker-0", count=3)
    waiting = wait_until(
        lambda: [w for w in service.ask(b"state")["state"] if not w["ready"] and w["next_try"]]
    )
    assert (waiting[0]["cause"], waiting[0]["restarts"]) == ("SIGKILL", 3)
    assert waiting[0]["next_try"] - waiting[0]["since"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("code", "was_ready", "cause"),
    [(-9, False, "SIGKILL"), (-9, True, "SIGKILL"), (-40, True, "signal_40"), (74, False,
     "device_lost"), (74, True, "device_lost"), (1, False, "start"), (1, True, "exit_1"),
     (0, True, "exit_0"), (None, False, "start"), (78, False, "no_device")],
)  # fmt: skip
def test_causes_are_few_words(code, was_ready, cause):
    place = places.Place("worker", 0)
    if was_ready:
        place.ready(0.0)
    place.failed(1.0, code)
    assert place.cause == cause


def test_a_machine_that_slept_has_no_hung_worker(start):
    service = start().ready()
    everyone = (service.process.pid, *service.pids)
    for number, seconds in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 1.0)):
        for pid in everyone:
            os.kill(pid, number)
        time.sleep(seconds)
    assert not [e for e in service.events if e["event"] == "hung"]
    os.kill(service.pid_of("worker-0"), signal.SIGSTOP)
    service.wait_for("hung", "worker-0")


def test_a_worker_busy_beyond_its_limit_is_replaced(start):
    service = start("busy too long")
    assert "beyond its limit" in service.wait_for("hung", "worker-0")["why"]
    service.wait_for("started", "worker-0", count=2)


def test_replacements_come_ever_more_slowly(start):
    service = start().ready()
    for count in range(1, 4):
        service.wait_for("ready", "worker-0", count=count)
        os.kill(service.pid_of("worker-0"), signal.SIGKILL)
        wait = service.wait_for("died", "worker-0", count=count)["restart_in_s"]
        assert wait == places.BACKOFF_S[count - 1]


def test_children_die_with_a_killed_supervisor(start):
    service = start().ready()
    service.process.kill()
    service.process.wait()
    wait_until(lambda: not any(alive(pid) for pid in service.pids))


def test_children_leave_signals_to_the_supervisor(start):
    service = start().ready()
    for number in (signal.SIGINT, signal.SIGTERM):
        for pid in service.pids:
            os.kill(pid, number)
    time.sleep(0.3)
    answer = service.ask()
    assert {answer["pid"], *answer["workers"]} == service.pids
    assert service.stop(signal.SIGINT) == 0


def test_a_second_signal_ends_at_once(start):
    service = start(grace_s=60.0).ready()
    with socket.create_connection(("127.0.0.1", service.port)):  # the front waits for its word
        service.process.send_signal(signal.SIGINT)
        wait_until(lambda: any(e["event"] == "stopping" for e in service.events))
        assert service.stop(signal.SIGINT) == 128 + signal.SIGINT
    assert not any(alive(pid) for pid in service.pids)


def test_a_worker_that_will_not_end_is_killed(start):
    service = start("stubborn").ready()
    assert service.stop() == 0
    assert service.wait_for("overstayed", "worker-0")


def test_a_missing_device_ends_the_service_with_one_line(start):
    service = start("no device")
    assert service.process.wait(PATIENCE_S) == os.EX_CONFIG
    service.close()
    assert service.lines[-1] == "flashwire-serve: there is no such device\n"
    assert len([e for e in service.events if e["event"] == "started"]) == 2


def test_a_device_that_vanishes_is_waited_for_and_never_replaced_by_the_cpu(start):
    service = start("device vanishes", device="auto").ready()
    os.kill(service.pid_of("worker-0"), signal.SIGKILL)
    assert service.wait_for("died", "worker-0", count=3)["cause"] == "no_device"
    assert service.wait_for("no device", "worker-0")["why"] == "there is no such device"
    (place,) = wait_until(lambda: service.ask(b"state")["state"])
    assert (place["ready"], place["cause"]) == (False, "no_device")
    assert service.stop() == 0


def test_a_worker_that_never_starts_ends_the_service(start):
    service = start("crash")
    assert service.process.wait(PATIENCE_S) == os.EX_SOFTWARE
    service.close()
    assert service.lines[-1].startswith("flashwire-serve: worker-0 failed 5 times")


def test_a_worker_that_dies_of_its_warm_up_is_replaced_by_one_without(start):
    service = start("warm-up kills", warmup="float16:d64").ready()
    died = [e for e in service.events if e["event"] == "died"]
    assert [e["child"] for e in died] == ["worker-0"]
    os.kill(service.pid_of("worker-0"), signal.SIGKILL)  # it was ready: the next one tries again
    service.wait_for("died", "worker-0", count=3)
    service.wait_for("ready", "worker-0", count=2)


def test_a_worker_may_compile_for_as_long_as_its_heart_beats():
    child, now = SimpleNamespace(started=0.0), places.START_LIMIT_S
    place = places.Place("worker", 0, child, heartbeat=supervisor.Heartbeat.create())
    assert place.complaint(now) is None
    assert "not ready" in place.complaint(now + 1)
    place.heartbeat.busy(now + 50)
    assert place.complaint(now + 49) is None
    assert "beyond its limit" in place.complaint(now + 51)
    place.heartbeat.close()


def test_a_port_in_use_is_one_line_and_an_exit_code(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = start(port=port)
        assert service.process.wait(PATIENCE_S) == os.EX_UNAVAILABLE
        service.close()
    assert service.lines == [
        f"flashwire-serve: cannot listen: port {port} of 127.0.0.1 is in use\n"
    ]


def test_a_supervisor_without_descriptors_waits_for_better_times(start):
    service = start().ready()
    _, most = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (3, most))
    os.kill(service.pid_of("worker-0"), signal.SIGKILL)
    assert "cannot be started" in service.wait_for("died", "worker-0", count=2)["reason"]
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (most, most))
    second = service.wait_for("ready", "worker-0", count=2)["pid"]
    wait_until(lambda: service.ask()["workers"] == [second])


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(listening.Fatal) as caught:
        listening.listen(host, 0)
    assert caught.value.code == os.EX_NOHOST
    assert host in str(caught.value)


def test_ipv6_urls_have_brackets():
    with listening.listen("::1", 0) as listener:
        assert listening.url(listener).startswith("http://[::1]:")


def test_workers_share_the_cores():
    cores = environment.usable_cores()
    assert environment.worker_threads(Settings()) == cores
    assert environment.worker_threads(Settings(workers=cores + 1)) == 1
    assert environment.worker_threads(Settings(threads=7)) == 7


def test_a_child_that_cannot_be_connected_is_replaced(monkeypatch):
    """A descriptor may be lacking for the socket between two children that have been started."""
    killed = []

    class Living:
        pid = 1

        def __init__(self, *_: object) -> None:
            self.control, self.other = supervisor.socketpair()

        def tell(self, *_: object) -> None:
            pass

        def kill(self) -> None:
            killed.append(self)
            self.control.close()
            self.other.close()

    def no_socket(*_: object) -> None:
        raise OSError(24, "no descriptor")

    monkeypatch.setattr(supervisor, "Child", Living)
    monkeypatch.setattr(supervisor, "_connect", no_socket)
    with socket.socket() as listener, socket.socket() as signals:
        judge = supervisor.Supervisor(Settings(log_level="error"), listener, signals)
        judge._start(judge._fronts[0])
        assert [place.child for place in judge._fronts] == killed
        judge._selector.close()
