"""`python -m flashwire_service.health`: status 0 when the service on this machine is ready.

For the health check of a container, which has no curl. It asks the port of FLASHWIRE_PORT, over TLS
where FLASHWIRE_TLS_CERT is set. Whose certificate it is does not matter: it asks itself.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

_TIMEOUT_S = 4.0


def main(environ: Mapping[str, str]) -> int:
    """0 when /readyz says so, else 1."""
    port = int(environ.get("FLASHWIRE_PORT", "8000"))
    if environ.get("FLASHWIRE_TLS_CERT"):
        itself = ssl.create_default_context()
        itself.check_hostname, itself.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=_TIMEOUT_S, context=itself
        )
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        return int(connection.getresponse().status != http.HTTPStatus.OK)
    except (OSError, http.client.HTTPException):
        return 1
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(os.environ))
