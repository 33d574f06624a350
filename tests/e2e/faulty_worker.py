"""A worker with faults, each at a scale of its own: an error that nobody foresaw, the end of the
process, and seconds of doing nothing.
"""

import os
import sys
import time
from typing import Any

from flashwire_kernels import api
from flashwire_service.compute import worker

RAISE, DIE, SLEEP = 6001.0, 6002.0, 6003.0
SLEEP_S = 2.0
forward = api.forward


def faulty(*tensors: Any, **more: Any) -> Any:
    scale = more["spec"].scale if "spec" in more else None
    if scale == RAISE:
        raise RuntimeError(f"{__file__}: secret-of-the-server")
    if scale == DIE:
        os._exit(1)
    if scale == SLEEP:
        time.sleep(SLEEP_S)
    return forward(*tensors, **more)


if __name__ == "__main__":
    api.forward = faulty
    sys.exit(worker.main(sys.argv[1:]))
