"""How requests wait for a pipeline's models, and how many of them are answered together."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from visionfast.errors import OptionError

__all__ = ["QueueLimits", "Scheduling"]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What the requests of one priority may cost while they wait.

    Attributes:
        requests: that wait in a model's queue at most; the next one is refused at once.
        timeout_ms: that a request has at most until its answer, also where its own deadline is later. SAM's everything
            mode, which takes minutes, is held to its own alone.
    """

    requests: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How requests wait and are put together.

    Attributes:
        max_batch: images that a model is given at once, at most; on a CPU no more than can be computed at once.
        queue_delay_us: that the first model waits for more of them, microseconds. The later ones of an ensemble don't.
        instances: processes of each stage; the processors are shared out among them.
        online, offline: limits of priority 1, which is every request's own unless it says so, and 2.
        cache: answers are kept by the server and given again for the same image.
    """

    max_batch: int = 8
    queue_delay_us: int = 1000
    instances: int = 1
    online: QueueLimits = QueueLimits(requests=256, timeout_ms=10_000)
    offline: QueueLimits = QueueLimits(requests=1024, timeout_ms=60_000)
    cache: bool = False

    def line(self, delay_us: int) -> str:
        """For a stage, how its own line is: JSON, `in_line` reads it."""
        return json.dumps({"delay_us": delay_us, "online": asdict(self.online), "offline": asdict(self.offline)})

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_batch", self.max_batch, 1),
            ("queue_delay_us", self.queue_delay_us, 0),
            ("instances", self.instances, 1),
            ("online: requests", self.online.requests, 1),
            ("online: timeout_ms", self.online.timeout_ms, 1),
            ("offline: requests", self.offline.requests, 1),
            ("offline: timeout_ms", self.offline.timeout_ms, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
                raise OptionError(f"{name}: expected a whole number, at least {least}, got {value!r}")
