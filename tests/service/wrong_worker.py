"""The real worker on a device that computes nonsense. For tests alone."""

import dataclasses
import sys

from flashwire_kernels import api
from flashwire_service.compute import worker

forward = api.forward


def wrong(*tensors, **options):
    result = forward(*tensors, **options)
    return dataclasses.replace(result, lse=result.lse + 0.001)


if __name__ == "__main__":
    api.forward = wrong
    sys.exit(worker.main(sys.argv[1:]))
