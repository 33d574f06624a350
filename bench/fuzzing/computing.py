"""A worker's part: whatever a front end lets through is computed, or refused for what it is."""

from __future__ import annotations

import math

import torch

from flashwire_service.compute.intake import Ticket
from flashwire_service.compute.jobs import Jobs
from flashwire_service.ipc.channel import Channel
from flashwire_service.ipc.frames import Failure, Job
from flashwire_service.logs import Log
from fuzzing.serving import SETTINGS
from fuzzing.targets import require

_MOST_ELEMENTS = 20_000  # of a tensor that is worth the time


class Worker:
    """Computes jobs in this process, on the CPU."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._jobs = Jobs(torch.device("cpu"), SETTINGS, 0, Log("fuzz", "error"))
        self._channel, peer = Channel.pair()  # a ticket has one; nothing is sent over it
        self._channel.close()
        peer.close()

    def answered(self, job: Job) -> str:
        """ "computed", the code of a failure, or "not tried"."""
        if any(math.prod(slot.shape) > _MOST_ELEMENTS for slot in job.tensors.values()):
            return "not tried"
        answer = self._jobs.run(Ticket(job, self._channel))
        answer.close()
        if not isinstance(answer.frame, Failure):
            return "computed"
        require(answer.frame.code != "internal", f"internal: {job.route} {job.options}")
        return answer.frame.code
