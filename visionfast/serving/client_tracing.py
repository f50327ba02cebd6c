"""One request, and the server's statistics before and after it: what a trace is made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Protocol, TypeVar

from visionfast.preprocess.limits import DecodeLimits
from visionfast.serving.client_questions import Question
from visionfast.serving.client_transport import AsyncTransport, Transport
from visionfast.serving.tracing import Measured, Sums, Traced, server_time, steps_of, sums_of, trace_of
from visionfast.sessions import ImageSource

__all__ = ["Timed", "traced", "traced_async"]

_BETWEEN_LOOKS_S = 0.01
_STEADY_LOOKS = 5
_MOST_LOOKS = 100
"""The server adds a request to its sums after it has answered, up to 5 ms on 2 quiet cores: they are taken as they are
once they stay so."""


class Timed(Protocol):
    """An answer with the nanoseconds of each stage."""

    @property
    def stage_ns(self) -> Mapping[str, int]: ...


_Answer = TypeVar("_Answer", bound=Timed)


def traced(
    transport: Transport,
    model: str,
    image: ImageSource,
    question: Question[_Answer],
    timeout_s: float,
    limits: DecodeLimits,
) -> Traced[_Answer]:
    """An image's answer and its trace. Raises as `Client.traced`."""
    steps = steps_of(transport.config(model, timeout_s))

    def look() -> Sums:
        return sums_of(transport.statistics(timeout_s), model, steps)

    settling = _Settling()
    while not settling.is_done(look()):
        time.sleep(_BETWEEN_LOOKS_S)
    before = settling.sums
    began = perf_counter_ns()
    request = question.request(image, None, limits)
    packed = perf_counter_ns()
    arrays = transport.infer(model, request, question.terms.patience_s)
    arrived = perf_counter_ns()
    answer = question.only(arrays, image)
    measured = Measured(packed - began, arrived - packed, perf_counter_ns() - arrived)
    settling = _Settling(before)
    while not settling.is_done(look()):
        time.sleep(_BETWEEN_LOOKS_S)
    return Traced(answer, trace_of(measured, answer.stage_ns, server_time(before, settling.sums)))


async def traced_async(
    transport: AsyncTransport,
    model: str,
    image: ImageSource,
    question: Question[_Answer],
    timeout_s: float,
    limits: DecodeLimits,
) -> Traced[_Answer]:
    """As `traced`."""
    steps = steps_of(await transport.config(model, timeout_s))

    async def look() -> Sums:
        return sums_of(await transport.statistics(timeout_s), model, steps)

    settling = _Settling()
    while not settling.is_done(await look()):
        await asyncio.sleep(_BETWEEN_LOOKS_S)
    before = settling.sums
    began = perf_counter_ns()
    request = question.request(image, None, limits)
    packed = perf_counter_ns()
    arrays = await transport.infer(model, request, question.terms.patience_s)
    arrived = perf_counter_ns()
    answer = question.only(arrays, image)
    measured = Measured(packed - began, arrived - packed, perf_counter_ns() - arrived)
    settling = _Settling(before)
    while not settling.is_done(await look()):
        await asyncio.sleep(_BETWEEN_LOOKS_S)
    return Traced(answer, trace_of(measured, answer.stage_ns, server_time(before, settling.sums)))


class _Settling:
    """Looks at sums until several in a row are the same, and all of a request that came after `before` is in them.

    Attributes:
        sums: of the last look.
    """

    def __init__(self, before: Sums | None = None) -> None:
        self._before = before
        self._looks = self._same = 0
        self.sums: Sums = {}

    def is_done(self, sums: Sums) -> bool:
        self._same = self._same + 1 if sums == self.sums else 0
        self._looks += 1
        self.sums = sums
        is_in = self._before is None or server_time(self._before, sums).requests > 0
        return (is_in and self._same >= _STEADY_LOOKS) or self._looks == _MOST_LOOKS
