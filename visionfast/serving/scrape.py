"""What a server's metrics say at one moment."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import urlsplit

from visionfast.errors import BackendUnavailableError, OptionError, ServerError

__all__ = ["Scrape", "metrics_url", "parse", "scrape"]

_MOST = 64 << 20  # bytes; a server with a hundred models has about one million
_PORT = 8002  # Triton's own default


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one moment.

    Attributes:
        taken_s: when, by a clock of this process that only ever goes forward.
        samples: sample's name → its labels, sorted, → value.
    """

    taken_s: float
    samples: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]

    def of(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """The labels and values of the samples of this name that have these labels."""
        asked = set(labels.items())
        for those, value in self.samples.get(name, {}).items():
            if asked <= set(those):
                yield dict(those), value

    def total(self, name: str, **labels: str) -> float:
        """The sum of them; 0 for none."""
        return sum(value for _, value in self.of(name, **labels))


def metrics_url(url: str) -> str:
    """`localhost:8002`, `http://localhost:8002` or `http://localhost:8002/metrics` → the last of them.

    Raises:
        OptionError: it is none of these.
    """
    forms = "expected http://localhost:8002/metrics, where a server's metrics are"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise OptionError(f"{url}: {forms} ({error})") from None
    if parts.scheme != "http" or not host or parts.query or parts.fragment or parts.username or parts.password:
        raise OptionError(f"{url}: {forms}")
    if any(c.isspace() or not c.isprintable() for c in url):
        raise OptionError(f"{url!r}: {forms}")
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{_PORT if port is None else port}{parts.path.rstrip('/') or '/metrics'}"


def scrape(url: str, *, timeout_s: float = 5.0) -> Scrape:
    """Asks a server for its metrics.

    Args:
        url: of `metrics_url`.
        timeout_s: seconds that each wait of it may take.

    Raises:
        BackendUnavailableError: prometheus-client is not installed.
        ServerError: nobody answers there in time, or what answers are no metrics.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            body = response.read(_MOST + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise ServerError(f"{url}: no metrics there (HTTP status {error.code}); {_WHERE}") from None
    except (OSError, HTTPException, ValueError) as error:
        said = " ".join((str(getattr(error, "reason", "") or error) or type(error).__name__).split())[:200]
        shown = said if said.isprintable() else "what answers is no HTTP"
        raise ServerError(f"{url}: no metrics there ({shown}); {_WHERE}") from error
    taken_s = time.monotonic()
    if len(body) > _MOST:
        raise ServerError(f"{url}: expected metrics, got more than {_MOST >> 20} MiB; {_WHERE}")
    try:
        return Scrape(taken_s, parse(body.decode()))
    except ValueError as error:
        raise ServerError(f"{url}: expected metrics in Prometheus's form, got {body[:40]!r}; {_WHERE}") from error


_WHERE = "`visionfast serve` says where its metrics are, by default at port 8002"


def parse(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Prometheus's text → `Scrape.samples`.

    Raises:
        BackendUnavailableError: prometheus-client is not installed.
        ValueError: it is another text.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as error:
        raise BackendUnavailableError(
            "prometheus-client: expected the package that reads metrics; `pip install 'visionfast[triton]'`"
        ) from error
    # The package gives every counter the ending that it should have. Triton's own don't have it.
    counters = set(re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE))
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name
                if family.type == "counter" and name not in counters:
                    name = name.removesuffix("_total")
                samples.setdefault(name, {})[tuple(sorted(sample.labels.items()))] = float(sample.value)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"no metrics: {error}") from error
    if not samples:
        raise ValueError("no metrics: no sample in it")
    return samples
