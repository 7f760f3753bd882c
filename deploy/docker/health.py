"""HEALTHCHECK of the images: exits with 0 if /health answers 200. `health.py SERVICE PORT`.

The port is that of KEPTSET_<SERVICE>__PORT if it is set, else PORT. Standard library only,
and little of that: it runs every few seconds beside a service that needs the cores.
"""

import http.client
import os
import sys


def main(service: str, port: str) -> int:
    """0: healthy, 1: not."""
    port = os.environ.get(f"KEPTSET_{service.upper()}__PORT") or port
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=4)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        text = answer.read(500).decode(errors="replace")
    except OSError as error:
        print(f"port {port}: {error}")
        return 1
    print(answer.status, text)
    return 0 if answer.status == 200 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
