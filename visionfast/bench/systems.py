"""Systems under test: encoded bytes in, final results in host memory out, whoever it is.

The harness itself is measured by one that answers at once (`NullSystem`), and the machine's mood by one that does the
same work whatever visionfast becomes (`ControlSystem`).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol, TypeAlias

import cv2
import numpy as np

from visionfast.bench.records import System

__all__ = ["Answer", "Call", "ControlSystem", "NullSystem", "SystemUnderTest", "taking_turns"]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a system says about one image.

    Attributes:
        found: the results, in host memory.
        stage_ns: nanoseconds of each stage that the system times itself; empty where it does not.
    """

    found: Any = field(repr=False)
    stage_ns: Mapping[str, int] = field(default_factory=dict)


Call: TypeAlias = Callable[[bytes], Answer]


class SystemUnderTest(Protocol):
    """Whoever is measured. What fails for one image raises a `VisionfastError`.

    Attributes:
        system: who it is, for the record.
        caches: it keeps answers by the image's bytes, so that the harness gives every request bytes of its own.
    """

    system: System
    caches: bool

    def call(self, encoded: bytes) -> Answer:
        """Answers one image, as fast as one alone can be; for one thread at a time."""
        ...

    def parallel(self, n: int) -> Sequence[Call]:
        """`n` functions, one for each of `n` threads that ask at the same time; open until the system is closed."""
        ...

    def close(self) -> None:
        """Frees what it holds; closing twice is harmless."""
        ...


# ---- what measures the measuring --------------------------------------------------------------------------


class NullSystem:
    """Answers at once: what is measured of it is the harness."""

    caches = False

    def __init__(self) -> None:
        self.system = System("null", "null system", "null")
        self._answer = Answer(None)

    def call(self, encoded: bytes) -> Answer:
        return self._answer

    def parallel(self, n: int) -> Sequence[Call]:
        return [self.call] * n

    def close(self) -> None:
        pass


class ControlSystem:
    """Fixed work on all processors, of what an image costs anywhere: a JPEG decoded, resized and filtered (OpenCV).

    It says how fast the machine is at the moment. Nothing of visionfast is in it, so no build changes it.
    """

    caches = False
    _HW = (480, 640)

    def __init__(self) -> None:
        self.system = System("control", "control: fixed work in OpenCV", "control", {"opencv": cv2.__version__})
        random = np.random.default_rng(0)
        rough = random.integers(0, 256, (self._HW[0] // 8, self._HW[1] // 8, 3), np.uint8)
        smooth = np.asarray(cv2.resize(rough, self._HW[::-1], interpolation=cv2.INTER_CUBIC))  # (480, 640, 3) u8
        self._encoded = cv2.imencode(".jpg", smooth)[1]
        self._kernel = random.random((9, 9), np.float32)

    def call(self, encoded: bytes) -> Answer:
        pixels = np.asarray(cv2.imdecode(self._encoded, cv2.IMREAD_COLOR))  # (480, 640, 3) u8
        resized = cv2.resize(pixels, (640, 640), interpolation=cv2.INTER_LINEAR).astype(np.float32)
        return Answer(cv2.filter2D(resized, -1, self._kernel))

    def parallel(self, n: int) -> Sequence[Call]:
        return [self.call] * n

    def close(self) -> None:
        pass


def taking_turns(calls: Iterable[Call], n: int) -> list[Call]:
    """`n` functions for `n` threads over fewer sessions: who finds none free waits, and the wait is a stage, `turn`."""
    free: queue.SimpleQueue[Call] = queue.SimpleQueue()
    for call in calls:
        free.put(call)

    def turn(encoded: bytes) -> Answer:
        started = perf_counter_ns()
        call = free.get()
        waited = perf_counter_ns() - started
        try:
            answer = call(encoded)
        finally:
            free.put(call)
        return Answer(answer.found, {"turn": waited, **answer.stage_ns})

    return [turn] * n
