"""flashwire-serve with a worker that can be held up: held_worker.py."""

import os
import sys

from flashwire_service import cli, supervisor

os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
supervisor.WORKER = "held_worker"
sys.exit(cli.main(sys.argv[1:]))
