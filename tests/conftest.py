"""What every test runs under."""

import os

# Read when torch is loaded. Waiting threads that spin would take the cores from the servers that
# tests start, and from whatever else the machine does; a worker of the service sets the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
