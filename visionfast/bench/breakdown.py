"""Where one system's time goes: the stages that it times itself, the wait before them, and what is between them.

They add up to the latency, or a stage was counted twice: `Breakdown.excess` says by how much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from visionfast.bench.records import Samples

__all__ = ["ADDS_UP", "QUEUE", "REST", "Breakdown", "breakdown"]

QUEUE = "queue"
"""From a request's arrival to the moment at which somebody begins with it."""

REST = "between stages"
"""What no stage has timed: the calls between them, waiting for another thread's turn, the interpreter."""

ADDS_UP = 0.03
"""Share of the latency that the parts may be off."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One system's mean latency in one scenario, part by part. Means add up where percentiles do not.

    Attributes:
        parts_ns: part → its mean nanoseconds, in the order in which they come: `QUEUE`, each stage, `REST`.
        total_ns: the mean latency.
        excess: of the latency, what the parts have too much, 0..: of requests whose stages take longer than they do.
        requests: that it is of.
    """

    parts_ns: Mapping[str, float]
    total_ns: float
    excess: float
    requests: int

    @property
    def adds_up(self) -> bool:
        return self.excess <= ADDS_UP


def breakdown(samples: Samples) -> Breakdown:
    """The parts of the answered requests' latency.

    A stage counts for a request that did not reach it as nothing, so that a stage which few of them need is as long
    as it is on average.
    """
    answered = samples.answered
    n = len(answered)
    if n == 0:
        return Breakdown({QUEUE: math.nan, REST: math.nan}, math.nan, 0.0, 0)
    stages = {name: column.clip(min=0) for name, column in answered.stage_ns.items()}
    queue = answered.begun_ns - answered.due_ns
    rest = answered.latency_ns - queue - sum(stages.values())
    total_ns = float(answered.latency_ns.mean())
    parts_ns = {
        QUEUE: float(queue.mean()),
        **{name: float(column.mean()) for name, column in stages.items()},
        REST: float(rest.clip(min=0).mean()),  # one request's overlap is not another's rest
    }
    excess = (sum(parts_ns.values()) - total_ns) / total_ns if total_ns else 0.0
    return Breakdown(parts_ns, total_ns, max(0.0, excess), n)
