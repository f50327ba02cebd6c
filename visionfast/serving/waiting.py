"""The line in which a model's requests wait: who is next, how many together, and who is refused, and when.

Triton has a queue of its own, with priorities and time limits, and it is not used for what runs in its Python backend
on a CPU. As measured with Triton 2.51 of nvidia-pytriton 0.7.0:

- It misses the end of a batch. With more requests than fit into one batch, up to one in twelve lay for half a second
  beside a model that had nothing to do: a model of 50 ms a batch, 8 images a batch, answered 84 images a second to 12
  clients where 160 was to be had. It is so with and without priorities and time limits, at any batch size.
- A time limit holds for one queue, and begins anew in every step of an ensemble: a request with 1 s was answered after
  2.9 s. It is looked at when a batch is made, so a refusal may come 0.5 s late.
- HTTP knows no cancelling: all that a client gave up is computed. By gRPC it stops between an ensemble's steps.

Without it the server hands every request on as it comes (`stages.in_line`), and this line has what it takes to keep the
promise: a request is answered in its time, or refused. It is served by strict priority, within one by arrival. A batch
is of one priority: an image that others wait with is not slowed by theirs.

What cannot be in time is refused at once, as the line is long (`QueueFullError`), and what was let in and would now be
late is not begun (`DeadlineError`). Otherwise an overloaded line is full of requests that are about to be late, and all
the work is for nothing. How long a batch takes is taken from those before: an exponentially weighted mean.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from visionfast.errors import DeadlineError, QueueFullError
from visionfast.serving.scheduling import QueueLimits

__all__ = ["LEVELS", "Line", "Place", "Turn", "late_error"]

LEVELS = ("online", "offline")
"""Of priority, the first one first."""

_SAFETY = 1.25
"""What a batch may take beyond its mean."""
_WEIGHT = 0.2
"""Of the newest in a mean."""
_PROMPT_NS = 2_000_000
"""Within it, a request came to a worker that had nothing to do."""
_FORGET = 0.95
"""What remains of a mean by which a request was refused: if it is wrong, nothing else would ever correct it."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Place(Generic[_T]):
    """One request in the line; times are `time.monotonic_ns`, which all processes of a machine share.

    Attributes:
        item: the request.
        images: in it.
        level: index into `LEVELS`.
        received_ns: when it came.
        deadline_ns: when its answer is of no use any more.
    """

    item: _T
    images: int
    level: int
    received_ns: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Turn(Generic[_T]):
    """What is to be done next.

    Attributes:
        batch: to be answered now, together.
        late: to be refused, as `late_error` says.
        begun_ns: now.
    """

    batch: list[Place[_T]]
    late: list[Place[_T]]
    begun_ns: int


class Line(Generic[_T]):
    """Where requests wait for one worker. Any thread lets them in; the worker alternates `turn` and `done`.

    Args:
        limits: of each level: how many requests wait at most, and how long.
        images: of one batch at most; a request that has more is a batch by itself.
        delay_ns: how long the first of a batch waits for others while the worker has nothing to do, where others came
            lately: who asks alone, one request after the other, waits for nobody.
        even: images take about the same time each, so that those before tell how long the next ones will take.
        clock: nanoseconds.
    """

    def __init__(
        self,
        limits: Sequence[QueueLimits],
        *,
        images: int,
        delay_ns: int = 0,
        even: bool = True,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._limits, self._images, self._delay_ns = tuple(limits), images, delay_ns
        self._even, self._clock = even, clock
        self._waiting: tuple[deque[Place[_T]], ...] = tuple(deque() for _ in self._limits)
        self._changed = threading.Condition()
        self._closed = False
        self._company = False  # others came lately
        self._begun_ns = 0
        self._at_work = 0  # images
        self._image_ns = 0.0  # mean, of any batch, a share for each image
        self._batch_ns: dict[int, float] = {}  # mean, by the number of images

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    # ---- coming in --------------------------------------------------------------------------------------------

    def join(
        self,
        item: _T,
        *,
        images: int = 1,
        level: int = 0,
        timeout_ns: int = 0,
        deadline_ns: int = 0,
        behind_ns: int = 0,
    ) -> None:
        """Lets a request in.

        Args:
            item: the request.
            images: in it.
            level: index into `LEVELS`.
            timeout_ns: that it has from now on; 0: what the level's limit says, which is also the most.
            deadline_ns: instead, when another process has already said it; 0: none has.
            behind_ns: how long it will wait in the lines of the steps behind.

        Raises:
            QueueFullError: as many wait already as may, or it could not be answered in time behind those that do.
            DeadlineError: its time is over.
        """
        limits = self._limits[level]
        with self._changed:
            now_ns = self._clock()
            if not deadline_ns:
                deadline_ns = now_ns + min(timeout_ns or limits.timeout_ms * 1_000_000, limits.timeout_ms * 1_000_000)
            place = Place(item, images, level, now_ns, deadline_ns)
            if deadline_ns <= now_ns:
                raise late_error(place, now_ns)
            if len(self._waiting[level]) >= limits.requests:
                raise QueueFullError(
                    f"too many requests wait already, {limits.requests} {LEVELS[level]} ones; send fewer at a time, or "
                    "try later"
                )
            if (wait_ns := self._wait_ns(level, now_ns) + behind_ns) and now_ns + _SAFETY * wait_ns > deadline_ns:
                raise QueueFullError(
                    f"too many requests wait already, {wait_ns / 1e6:.0f} ms of work, and this one has "
                    f"{(deadline_ns - now_ns) / 1e6:.0f} ms; send fewer at a time, or try later"
                )
            self._company |= bool(self._at_work or len(self))
            self._waiting[level].append(place)
            self._changed.notify()

    def waits_ns(self) -> tuple[int, list[int]]:
        """Now, and of each level, how long an image that comes now will take; 0 if nothing is ahead of it."""
        with self._changed:
            now_ns = self._clock()
            return now_ns, [round(self._wait_ns(level, now_ns)) for level in range(len(self._limits))]

    def _wait_ns(self, level: int, now_ns: int) -> float:
        """How long an image that comes now will take, as those before did; 0 if nothing is ahead of it."""
        ahead = sum(place.images for waiting in self._waiting[: level + 1] for place in waiting)
        if not ahead and not self._at_work:
            return 0.0
        at_work_ns = self._batch_ns.get(self._at_work, 0.0) - (now_ns - self._begun_ns) if self._at_work else 0.0
        return max(0.0, at_work_ns) + ahead * self._image_ns + self._batch_ns.get(1, self._image_ns)

    # ---- the worker -------------------------------------------------------------------------------------------

    def turn(self) -> Turn[_T] | None:
        """Waits for what is next; None once the line is closed and nobody waits."""
        with self._changed:
            while True:
                now_ns = self._clock()
                late = self._late(now_ns)
                delay_ns = self._delay_ns if self._company else 0
                waited = self._is_full() or self._closed or self._eldest_ns(now_ns) >= delay_ns
                if late or (waited and len(self)):
                    self._company = self._company and len(self) > 1
                    batch = self._take(now_ns, late)
                    self._at_work, self._begun_ns = sum(place.images for place in batch), now_ns
                    return Turn(batch, late, now_ns)
                if self._closed:
                    return None
                wait_ns = delay_ns - self._eldest_ns(now_ns) if len(self) else None
                self._changed.wait(None if wait_ns is None else wait_ns / 1e9)

    def _late(self, now_ns: int) -> list[Place[_T]]:
        """Takes out all whose time is over: who waits behind others also gets to know it."""
        late: list[Place[_T]] = []
        for waiting in self._waiting:
            if any(place.deadline_ns <= now_ns for place in waiting):
                late += (place for place in waiting if place.deadline_ns <= now_ns)
                left = [place for place in waiting if place.deadline_ns > now_ns]
                waiting.clear()
                waiting.extend(left)
        return late

    def _eldest_ns(self, now_ns: int) -> int:
        return max((now_ns - waiting[0].received_ns for waiting in self._waiting if waiting), default=0)

    def _is_full(self) -> bool:
        return any(sum(place.images for place in waiting) >= self._images for waiting in self._waiting)

    def _take(self, now_ns: int, late: list[Place[_T]]) -> list[Place[_T]]:
        """The next batch, of the first level that has one; adds to `late` those that it would make late."""
        for waiting in self._waiting:
            batch: list[Place[_T]] = []
            images = 0
            while waiting and (not batch or images + waiting[0].images <= self._images):
                place, together = waiting[0], images + waiting[0].images
                ready_ns = now_ns + _SAFETY * self._batch_ns.get(together, 0.0)
                if any(ready_ns > other.deadline_ns for other in batch):
                    break  # it would make those late that are not
                waiting.popleft()
                # One that came to an idle worker has waited for nobody: it is let to try.
                if ready_ns > place.deadline_ns and now_ns - place.received_ns > self._delay_ns + _PROMPT_NS:
                    self._batch_ns[together] *= _FORGET
                    late.append(place)
                    continue
                batch.append(place)
                images = together
            if batch:
                return batch
        return []

    def done(self) -> None:
        """The batch of the last `turn` is answered."""
        with self._changed:
            images, self._at_work = self._at_work, 0
            if not images or not self._even:
                return
            spent_ns = self._clock() - self._begun_ns
            before_ns = self._batch_ns.get(images)
            self._batch_ns[images] = spent_ns if before_ns is None else _mean(before_ns, spent_ns)
            share_ns = spent_ns / images
            self._image_ns = _mean(self._image_ns, share_ns) if self._image_ns else share_ns

    def close(self) -> None:
        """Nobody else comes; `turn` goes on until nobody waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _mean(before: float, newest: float) -> float:
    return before + _WEIGHT * (newest - before)


def late_error(place: Place[_T], now_ns: int) -> DeadlineError:
    """What a request is told that is not begun."""
    given_ms, waited_ms = (place.deadline_ns - place.received_ns) / 1e6, (now_ns - place.received_ns) / 1e6
    return DeadlineError(
        f"the request's time ran out: it had {max(0.0, given_ms):.0f} ms here, waited {waited_ms:.0f} ms, and was not "
        "begun; give it more time, or send fewer"
    )
