"""The real worker with a device that is lost when a request's scale says so. For tests alone.

The launch goes well, as launches do: the fault is met when the results are waited for.
"""

import sys
import time

import torch

from flashwire_kernels import api
from flashwire_service.compute import device, worker

FATAL_SCALE = 0.123
DELAY_S = 1.5  # in which others can queue

forward, synchronize = api.forward, device.synchronize
lost = False


def faulty_forward(*tensors, spec=api._PLAIN, **options):
    global lost
    lost = spec.scale == FATAL_SCALE
    return forward(*tensors, spec=spec, **options)


def faulty_synchronize(on):
    if lost:
        time.sleep(DELAY_S)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    synchronize(on)


if __name__ == "__main__":
    api.forward, device.synchronize = faulty_forward, faulty_synchronize
    sys.exit(worker.main(sys.argv[1:]))
