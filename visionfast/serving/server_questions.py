"""What a server's own parent asks it, over HTTP by the standard library alone."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any

from visionfast.serving.shared_memory import abandoned, remove_abandoned_files

__all__ = ["forget_dead_clients", "is_ready"]

_REGIONS = "/v2/systemsharedmemory"


def is_ready(host: str, http_port: int, metrics_port: int) -> bool:
    """Every model is, and the metrics are there, which come last."""
    asked = ((http_port, "/v2/health/ready"), (metrics_port, "/metrics"))
    return all(_ask(host, port, "GET", path)[0] == 200 for port, path in asked)


def forget_dead_clients(host: str, http_port: int) -> list[str]:
    """Has the server give back the shared memory of clients that are dead; the regions' names.

    One that a request still uses it refuses to: that one's turn comes again.
    """
    remove_abandoned_files()
    status, body = _ask(host, http_port, "GET", f"{_REGIONS}/status")
    if status != 200:
        return []
    with contextlib.suppress(ValueError, TypeError, KeyError):
        names = abandoned(str(region["name"]) for region in json.loads(body))
        return [
            name for name in names if _ask(host, http_port, "POST", f"{_REGIONS}/region/{name}/unregister")[0] == 200
        ]
    return []


def _ask(host: str, port: int, method: str, path: str) -> tuple[int, Any]:
    """Status and body; 0 where nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
