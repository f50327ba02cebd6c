"""The highest rate of random arrivals at which a server keeps a latency bound."""

from __future__ import annotations

from collections.abc import Callable

from visionfast.bench.records import Samples

__all__ = ["BOUND_PERCENT", "highest_rate", "keeps", "late_share"]

BOUND_PERCENT = 99.0
"""Of the requests, those that must be answered within the bound."""

_WINDOWS = 6
_LEAST_SHARE = 1 / 8
_WINDOW_SHARE = 1 / 6  # of the scenario's seconds


def late_share(samples: Samples, bound_ns: float) -> float:
    """0..1 of the requests: those that came after the bound, or not at all."""
    if not len(samples):
        return 0.0
    return float(((samples.latency_ns > bound_ns) | samples.failed).mean())


def keeps(samples: Samples, bound_ns: float) -> bool:
    """Whether the bound was kept: no more than 1 % were late or failed."""
    return late_share(samples, bound_ns) <= 1 - BOUND_PERCENT / 100


def highest_rate(
    window: Callable[[float, float], Samples], capacity_per_s: float, bound_ns: float, seconds: float
) -> float:
    """Halves the range between nothing and all that the system can do, six times, or until an eighth of it is too much:
    then it is not waiting that breaks the bound, and slower still would only take longer.

    Args:
        window: (rate a second, seconds) → its requests' samples.
        capacity_per_s: images a second where nobody waits for a single one; at that rate a queue only grows.
        bound_ns: that 99 % of the requests are to keep.
        seconds: that the rate will be measured for; the search takes as long again.

    Returns:
        requests a second; where none of the rates keeps the bound, the lowest one that was tried.
    """
    low, high = 0.0, capacity_per_s
    for _ in range(_WINDOWS):
        rate = (low + high) / 2
        if keeps(window(rate, seconds * _WINDOW_SHARE), bound_ns):
            low = rate
        else:
            high = rate
            if high <= capacity_per_s * _LEAST_SHARE:
                break
    return low or high
