"""Two systems of one record, in one scenario: the one ratio that the terminal, the report and the README show."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from visionfast.bench.records import Record, Samples, Scenario
from visionfast.bench.statistics import Ratio, paired, ratio

__all__ = ["answered_by_round", "time_ratio"]


def answered_by_round(samples: Samples) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """(rounds,) images that each round answered, and (rounds,) seconds from its first request's beginning to its last
    one's end. What failed is no answer, and took its time."""
    rounds, index = np.unique(samples.round, return_inverse=True)
    first_ns, last_ns = np.full(len(rounds), np.iinfo(np.int64).max), np.zeros(len(rounds), np.int64)
    np.minimum.at(first_ns, index, samples.begun_ns)
    np.maximum.at(last_ns, index, samples.done_ns)
    answered = np.bincount(index[~samples.failed], minlength=len(rounds))
    return answered, (last_ns - first_ns).clip(min=1) / 1e9


def time_ratio(record: Record, key: str, than: str, scenario: Scenario) -> Ratio | None:
    """How many times as long `key` takes for an image as `than` does, by pairs within the rounds; in `offline`, whose
    metric is throughput, how many times fewer images it answers in a round's time. `None` where there is nothing to
    compare; in `server`, both are asked at a rate of its own."""
    one, other = record.samples.get((key, scenario)), record.samples.get((than, scenario))
    if one is None or other is None or scenario == "server":
        return None
    if scenario == "offline":
        shared = min(len(np.unique(samples.round)) for samples in (one, other))
        its, others = (np.divide(*answered_by_round(samples))[:shared] for samples in (one, other))
        both = (its > 0) & (others > 0)
        found = ratio(others[both], its[both], np.flatnonzero(both))
    else:
        found = ratio(*paired(one, other))
    return None if math.isnan(found.value) else found
