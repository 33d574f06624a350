"""`python -m flashwire_service` is `flashwire-serve`."""

import sys

from flashwire_service.cli import main

sys.exit(main())
