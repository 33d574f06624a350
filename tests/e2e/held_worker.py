"""A worker that jobs of scale HOLD hold up while there is a file $HELD, and that dies of DEADLY in
a q, alone or in company.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from flashwire_kernels import api
from flashwire_kernels.packing import Packing
from flashwire_service.compute import worker

HOLD, DEADLY = 6004.0, 77.0
forward, packed_forward = api.forward, Packing.forward


def held(q: torch.Tensor, *more: Any, **options: Any) -> Any:
    _die_of(q)
    scale = options["spec"].scale if "spec" in options else None
    while scale == HOLD and Path(os.environ["HELD"]).exists():
        time.sleep(0.005)
    return forward(q, *more, **options)


def packed(self: Packing) -> Any:
    _die_of(self.inputs.q)
    return packed_forward(self)


def _die_of(q: torch.Tensor) -> None:
    if (q == DEADLY).any():
        os._exit(1)


if __name__ == "__main__":
    api.forward = held
    Packing.forward = packed  # type: ignore[method-assign]
    sys.exit(worker.main(sys.argv[1:]))
