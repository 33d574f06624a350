"""The compute process: `python -m flashwire_service.compute.worker FD`, started by the supervisor.

The main thread imports torch, proves its device, warms up and then computes, one job after the
other; a side thread looks after the sockets meanwhile (links.py). torch is imported after this
process has tied its life to its parent's, hence the imports inside functions.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from flashwire_service import logs
from flashwire_service import meter as meters
from flashwire_service.compute.intake import Intake, Ticket
from flashwire_service.compute.lines import Load
from flashwire_service.compute.links import Links
from flashwire_service.ipc.frames import Failure, Hello, Ready
from flashwire_service.ipc.heartbeat import BEAT_S, Heartbeat
from flashwire_service.logs import Log
from flashwire_service.meter import Meter
from flashwire_service.process import DEVICE_LOST, Adopted, adopt
from flashwire_service.settings import Settings

if TYPE_CHECKING:
    import torch

    from flashwire_service.compute.batching import Batching
    from flashwire_service.compute.jobs import Answer, Jobs
    from flashwire_service.compute.proving import Proving

BUSY_GRACE_S = 5.0  # beyond the longest deadline, before a busy loop counts as hung
STEP_LIMIT_S = 300.0  # for a few kernels to compile, on cores that others use, too


def main(arguments: Sequence[str]) -> int:
    """Serve until told to end. The exit code is EX_CONFIG when the device is not there, or kernels
    cannot be kept; DEVICE_LOST when it failed; EX_SOFTWARE when it computes nonsense.
    """
    adopted = adopt(arguments)
    log = Log(f"worker-{adopted.index}", adopted.settings.log_level)
    meter = Meter(adopted.board.regions[f"worker-{adopted.index}"])
    log.count_on(meter)
    log.forward_logging()
    page = os.dup(adopted.page)
    heartbeat = Heartbeat.receive(adopted.page)
    if adopted.settings.triton_cache_dir:
        os.environ["TRITON_CACHE_DIR"] = adopted.settings.triton_cache_dir  # read by triton
    from flashwire_service.compute import device

    try:
        chosen = device.choose(adopted.settings.device, adopted.index)
        device.require_kernel_cache(chosen)
    except device.NoDevice as e:
        adopted.control.send(Failure(id=0, code="no_device", detail=str(e)))
        return os.EX_CONFIG
    facts = _prepare(chosen, adopted.settings, heartbeat, log)

    from flashwire_service.compute.batching import Batching
    from flashwire_service.compute.jobs import Jobs
    from flashwire_service.compute.proving import Proving

    proving = Proving(chosen, adopted.settings.prove_s, heartbeat, log)
    jobs = Jobs(chosen, adopted.settings, adopted.index, log, meter)
    own = adopted.settings
    intake = Intake(
        own.queue_requests, own.queue_bytes, own.queue_device_bytes,
        watch=_queue_gauges(meter, str(adopted.index)),
    )  # fmt: skip
    hello = Hello(worker=adopted.index, pid=os.getpid(), facts=facts)
    links = Links(adopted.control, intake, hello, page)
    heartbeat.idle()
    adopted.control.send(Ready(facts=facts))
    gc.freeze()  # what was imported stays: collections need not look at it again
    threading.Thread(target=_link, args=(links, log), name="intake", daemon=True).start()
    batching = Batching(chosen, own.batch_tokens)
    return _compute(adopted, heartbeat, intake, links, jobs, proving, batching, log)


def _prepare(
    chosen: torch.device, settings: Settings, heartbeat: Heartbeat, log: Log
) -> dict[str, Any]:
    """What /info says of the device, once it has been proved and measured and its kernels are
    compiled. Ends the process when the device cannot be used.
    """
    from flashwire_service.compute import device, warming
    from flashwire_service.compute.failures import is_fatal

    def step() -> None:
        """There is progress, and as much time again for what comes next."""
        heartbeat.busy(time.monotonic() + STEP_LIMIT_S)

    try:
        device.prove(chosen, step)
        step()
        facts = device.facts(chosen)
        warming.run(settings.warmup, chosen, log, step)
    except Exception as e:
        log.error("start failed", error=repr(e))
        _end(DEVICE_LOST if is_fatal(e) else os.EX_SOFTWARE)
    return facts


def _queue_gauges(meter: Meter, worker: str) -> Callable[[Load], None]:
    """What shows the load of a worker's queue. The rows are there from now on: the compute loop
    and the intake thread write them.
    """

    def show(load: Load) -> None:
        meter.set(meters.QUEUE_REQUESTS, load.requests, worker)
        meter.set(meters.QUEUE_BYTES, load.nbytes, worker)
        meter.set(meters.QUEUE_DEVICE_BYTES, load.memory, worker)

    show(Load())
    return show


def _end(code: int) -> NoReturn:
    """At once: what is left of a broken device may never come down."""
    logs.flush()
    os._exit(code)


def _link(links: Links, log: Log) -> None:
    """The intake thread. The process ends with it, at once, whatever is being computed."""
    with _ended(log):
        links.run()
    _end(os.EX_OK)


def _attend(links: Links, intake: Intake, log: Log) -> None:
    """Wait for a job, or for a beat. The process ends with its lifeline."""
    with _ended(log):
        links.attend(BEAT_S, lambda: intake.depth > 0 or intake.closed)
    if links.closed:
        _end(os.EX_OK)


@contextlib.contextmanager
def _ended(log: Log) -> Iterator[None]:
    """A worker that hears nobody is none: an exception ends it."""
    try:
        yield
    except Exception as e:
        log.error("intake failed", error=repr(e))
        _end(os.EX_SOFTWARE)


def _compute(
    adopted: Adopted,
    heartbeat: Heartbeat,
    intake: Intake,
    links: Links,
    jobs: Jobs,
    proving: Proving,
    batching: Batching,
    log: Log,
) -> int:
    """The compute loop, until the intake is closed and empty."""
    from flashwire_service.compute.failures import DeviceLost

    busy_limit = adopted.settings.max_timeout_ms / 1000 + BUSY_GRACE_S

    def mark(tickets: Sequence[Ticket]) -> None:
        heartbeat.busy(time.monotonic() + busy_limit, *(ticket.job.id for ticket in tickets))

    while not intake.exhausted:
        heartbeat.idle()
        jobs.sweep()
        jobs.measure()
        _attend(links, intake, log)
        first = intake.take(0)
        try:
            if first is None:
                proving.turn()
                continue
            batch = batching.batch(first, intake)
            for ticket, answer, seconds in batching.answered(batch, jobs, mark):
                intake.finish(ticket, seconds)
                _send(links, jobs, ticket, answer)
        except DeviceLost:  # whoever waits for this worker learns it from the end of the socket
            _end(DEVICE_LOST)
    heartbeat.busy(time.monotonic() + STEP_LIMIT_S)  # the supervisor's patience with an end is less
    return os.EX_OK


def _send(links: Links, jobs: Jobs, ticket: Ticket, answer: Answer) -> None:
    try:
        if ticket.abandoned or not links.answer(ticket, answer.frame, answer.fd):
            jobs.discard(ticket, answer)
    finally:
        answer.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
