"""The compute process: `python -m flashwire_service.compute.worker FD`, started by the supervisor.

The main thread imports torch, proves its device and then computes, one job after the other; a side
thread (links.py) owns the sockets. torch is imported after this process has tied its life to its
parent's, hence the imports inside functions.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashwire_service.compute.intake import Intake
from flashwire_service.compute.links import Links
from flashwire_service.ipc.frames import Failure, Hello, Ready
from flashwire_service.ipc.heartbeat import BEAT_S, Heartbeat
from flashwire_service.logs import Log
from flashwire_service.process import Adopted, adopt

if TYPE_CHECKING:
    from flashwire_service.compute.jobs import Jobs

BUSY_GRACE_S = 5.0  # beyond the longest deadline, before a busy loop counts as hung


def main(arguments: Sequence[str]) -> int:
    """Serve until told to end. The exit code is EX_CONFIG when the device is not there."""
    adopted = adopt(arguments)
    log = Log(f"worker-{adopted.index}", adopted.settings.log_level)
    heartbeat = Heartbeat.receive(adopted.fd)
    from flashwire_service.compute import device

    try:
        chosen = device.choose(adopted.settings.device)
    except device.NoDevice as e:
        adopted.control.send(Failure(id=0, code="no_device", detail=str(e)))
        return os.EX_CONFIG
    device.prove(chosen)
    facts = device.facts(chosen)

    from flashwire_service.compute.jobs import Jobs

    jobs = Jobs(chosen, adopted.settings, adopted.index, log)
    intake = Intake(adopted.settings.queue_requests, adopted.settings.queue_bytes)
    hello = Hello(worker=adopted.index, pid=os.getpid(), facts=facts)
    links = Links(adopted.control, intake, hello)
    heartbeat.idle()
    adopted.control.send(Ready(facts=facts))
    gc.freeze()  # what was imported stays: collections need not look at it again
    threading.Thread(target=_link, args=(links, log), name="intake", daemon=True).start()
    return _compute(adopted, heartbeat, intake, links, jobs)


def _link(links: Links, log: Log) -> None:
    """The intake thread. The process ends with it, at once, whatever is being computed."""
    try:
        links.run()
        code = os.EX_OK
    except Exception as e:
        log.error("intake failed", error=repr(e))
        code = os.EX_SOFTWARE
    os._exit(code)


def _compute(
    adopted: Adopted, heartbeat: Heartbeat, intake: Intake, links: Links, jobs: Jobs
) -> int:
    """The compute loop, until the intake is closed and empty."""
    busy_limit = adopted.settings.max_timeout_ms / 1000 + BUSY_GRACE_S
    while not intake.exhausted:
        heartbeat.idle()
        jobs.sweep()
        ticket = intake.take(BEAT_S)
        if ticket is None:
            continue
        started = time.monotonic()
        heartbeat.busy(started + busy_limit)
        answer = jobs.run(ticket, queue_depth=intake.depth)
        intake.finish(ticket, time.monotonic() - started)
        try:
            if ticket.abandoned or not links.answer(ticket, answer.frame, answer.fd):
                jobs.discard(ticket, answer)
        finally:
            answer.close()
        if jobs.broken:
            return os.EX_SOFTWARE
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
