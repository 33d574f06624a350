"""The parts of bench/gpu_check.py and bench/tune.py. They need torch, triton and numpy only.

runner      a part's items in child processes; `child` is such a process, `items` what it runs
place       the device and its clock; in a dry run, the CPU
conformance is it right? over `cases`, `extremes` and `results`
speed       forward and backward beside PyTorch's; `decode` beside a copy; `compilation` before
report      rows -> tables
trials      a pass by a configuration of choice; `tune_compile` predicts, `tune_time` times
tables      the shipped tables as text
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))  # installed or not
