"""flashwire-serve with a worker that fails where a request asks for it: faulty_worker.py."""

import os
import sys

from flashwire_service import cli, supervisor

os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
supervisor.WORKER = "faulty_worker"
sys.exit(cli.main(sys.argv[1:]))
