"""Two systems of one record, in one scenario: the one ratio that the terminal, the report and the README show."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from visionfast.bench.records import Record, Samples, Scenario
from visionfast.bench.statistics import Ratio, paired, ratio

__all__ = ["images_per_second", "time_ratio"]


def images_per_second(samples: Samples) -> npt.NDArray[np.float64]:
    """(rounds,) images answered in each round over the time from its first request to its last answer."""
    found = []
    for number in np.unique(samples.round):
        rows = samples[samples.round == number]
        took_ns = int(rows.done_ns.max() - rows.begun_ns.min())
        found.append(int((~rows.failed).sum()) / max(1, took_ns) * 1e9)
    return np.array(found, np.float64)


def time_ratio(record: Record, key: str, than: str, scenario: Scenario) -> Ratio | None:
    """How many times as long `key` takes for an image as `than` does, by pairs within the rounds; in `offline`, whose
    metric is throughput, how many times fewer images it answers in a round's time. `None` where there is nothing to
    compare; in `server`, both are asked at a rate of its own."""
    one, other = record.samples.get((key, scenario)), record.samples.get((than, scenario))
    if one is None or other is None or scenario == "server":
        return None
    if scenario == "offline":
        its, others = images_per_second(one), images_per_second(other)
        shared = min(len(its), len(others))
        found = ratio(others[:shared], its[:shared], np.arange(shared))
    else:
        found = ratio(*paired(one, other))
    return None if math.isnan(found.value) else found
