"""The real worker on a device that computes nonsense from the moment its test says `go`.

It does so in the directory of compiled kernels. For tests alone.
"""

import dataclasses
import os
import sys
from pathlib import Path

from flashwire_kernels import api
from flashwire_service.compute import worker

forward = api.forward


def wrong_from_now_on(*tensors, **options):
    result = forward(*tensors, **options)
    if (Path(os.environ["TRITON_CACHE_DIR"]) / "go").exists():
        result = dataclasses.replace(result, lse=result.lse + 0.001)
    return result


if __name__ == "__main__":
    api.forward = wrong_from_now_on
    sys.exit(worker.main(sys.argv[1:]))
