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

Several workers may share it, each with an engine of its own that computes on one thread. A batch that nobody of its
priority waits behind is one worker's alone, and has all threads; otherwise each worker takes the next batch when it is
through with its own, *beside* the others', and none waits for another.

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


@dataclass(frozen=True, slots=True, eq=False)
class Turn(Generic[_T]):
    """What is to be done next.

    Attributes:
        batch: to be answered now, together.
        late: to be refused, as `late_error` says.
        begun_ns: now.
        beside: other workers answer others meanwhile; else the batch has all processors.
    """

    batch: list[Place[_T]]
    late: list[Place[_T]]
    begun_ns: int
    beside: bool = False

    @property
    def images(self) -> int:
        return sum(place.images for place in self.batch)


class Line(Generic[_T]):
    """Where requests wait for their workers. Any thread lets them in; each worker alternates `turn` and `done`.

    Args:
        limits: of each level: how many requests wait at most, and how long.
        images: of one batch at most; a request that has more is a batch by itself, and beside no other.
        delay_ns: how long the first of a batch waits for others while the workers have nothing to do, where others came
            lately: who asks alone, one request after the other, waits for nobody.
        even: images take about the same time each, so that those before tell how long the next ones will take.
        workers: that take turns.
        clock: nanoseconds.
    """

    def __init__(
        self,
        limits: Sequence[QueueLimits],
        *,
        images: int,
        delay_ns: int = 0,
        even: bool = True,
        workers: int = 1,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._limits, self._images, self._delay_ns = tuple(limits), images, delay_ns
        self._even, self._workers, self._clock = even, workers, clock
        self._waiting: tuple[deque[Place[_T]], ...] = tuple(deque() for _ in self._limits)
        self._changed = threading.Condition()
        self._closed = False
        self._company = False  # others came lately
        self._at_work: list[Turn[_T]] = []  # if one of them is not beside others, it is the only one
        self._image_ns = 0.0  # mean between the ends of two images, whoever answers them
        self._spent_ns: dict[tuple[int, bool], float] = {}  # mean of a batch, by its images and whether it was beside

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
                self._forget(1)
                raise QueueFullError(
                    f"too many requests wait already, {wait_ns / 1e6:.0f} ms of work, and this one has "
                    f"{(deadline_ns - now_ns) / 1e6:.0f} ms; send fewer at a time, or try later"
                )
            self._company |= bool(self._at_work or len(self))
            self._waiting[level].append(place)
            self._changed.notify_all()

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
        left_ns = [self._expected_ns(turn.images, turn.beside) - (now_ns - turn.begun_ns) for turn in self._at_work]
        is_free = not left_ns or (self._at_work[0].beside and len(left_ns) < self._workers)
        first_ns = 0.0 if is_free else max(0.0, min(left_ns))
        # Behind one that is alone, and before anybody else, it will be alone, too.
        beside = self._workers > 1 and (ahead > 0 or is_free or len(left_ns) > 1)
        return first_ns + ahead * self._image_ns + (self._expected_ns(1, beside) or self._image_ns)

    def _expected_ns(self, images: int, beside: bool) -> float:
        """What a batch takes; 0 as long as nobody knows. Beside others it does not take longer than all workers' would
        alone: one that took seconds because of its size says nothing of the others."""
        alone_ns, beside_ns = (self._spent_ns.get((images, which), 0.0) for which in (False, True))
        if beside and alone_ns and beside_ns:
            return min(beside_ns, _SAFETY * self._workers * alone_ns)
        return (beside_ns or alone_ns) if beside else (alone_ns or beside_ns)

    # ---- who is late ------------------------------------------------------------------------------------------

    def late(self) -> list[Place[_T]] | None:
        """Waits for those whose time is over while no worker comes by, and takes them out; None once the line is
        closed: its workers do the rest. For a thread of its own, where a turn may take minutes."""
        with self._changed:
            while not self._closed:
                now_ns = self._clock()
                if late := self._late(now_ns):
                    return late
                deadlines_ns = [place.deadline_ns for waiting in self._waiting for place in waiting]
                wait_s = (min(deadlines_ns) - now_ns) / 1e9 if deadlines_ns else threading.TIMEOUT_MAX
                self._changed.wait(min(wait_s, threading.TIMEOUT_MAX))  # a client may say anything
            return None

    # ---- the workers ------------------------------------------------------------------------------------------

    def turn(self) -> Turn[_T] | None:
        """Waits for what is next; None once the line is closed and nobody waits."""
        with self._changed:
            while True:
                now_ns = self._clock()
                late = self._late(now_ns)
                delay_ns = self._delay_ns if self._company and not self._at_work else 0
                waited = self._is_full() or self._closed or self._eldest_ns(now_ns) >= delay_ns
                begins = waited and self._may_begin()
                if late or begins:
                    return self._begun(now_ns, late) if begins else Turn([], late, now_ns)
                if self._closed and not len(self):
                    return None
                wait_ns = delay_ns - self._eldest_ns(now_ns) if len(self) and not self._at_work else None
                self._changed.wait(None if wait_ns is None else wait_ns / 1e9)

    def _may_begin(self) -> bool:
        """Somebody waits, and a worker may begin with it now."""
        if not self._at_work:
            return len(self) > 0
        first = next((waiting[0] for waiting in self._waiting if waiting), None)
        return first is not None and self._at_work[0].beside and first.images <= self._images

    def _begun(self, now_ns: int, late: list[Place[_T]]) -> Turn[_T]:
        self._company = self._company and (len(self) > 1 or bool(self._at_work))
        batch, others = self._take(now_ns, late)
        beside = bool(self._at_work) or (self._workers > 1 and others and batch[0].images <= self._images)
        turn = Turn(batch, late, now_ns, beside)
        if batch:
            self._at_work.append(turn)
            self._changed.notify_all()  # the next one may begin beside it
        return turn

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
        most = self._images * self._workers
        return any(sum(place.images for place in waiting) >= most for waiting in self._waiting)

    def _take(self, now_ns: int, late: list[Place[_T]]) -> tuple[list[Place[_T]], bool]:
        """The next batch, of the first level that has one, and whether others of that level wait behind it; adds to
        `late` those that it would make late."""
        for waiting in self._waiting:
            batch: list[Place[_T]] = []
            images = 0
            beside = bool(self._at_work) or (self._workers > 1 and len(waiting) > 1)
            while waiting and (not batch or images + waiting[0].images <= self._images):
                place, together = waiting[0], images + waiting[0].images
                if self._at_work and place.images > self._images:
                    return [], False  # it is beside nobody, and nobody overtakes it
                ready_ns = now_ns + _SAFETY * self._expected_ns(together, beside)
                if any(ready_ns > other.deadline_ns for other in batch):
                    break  # it would make those late that are not
                waiting.popleft()
                # One that came to an idle worker has waited for nobody: it is let to try.
                if ready_ns > place.deadline_ns and now_ns - place.received_ns > self._delay_ns + _PROMPT_NS:
                    self._forget(together)
                    late.append(place)
                    continue
                batch.append(place)
                images = together
            if batch:
                return batch, bool(waiting)
        return [], False

    def _forget(self, images: int) -> None:
        for key in ((images, False), (images, True)):
            if key in self._spent_ns:
                self._spent_ns[key] *= _FORGET

    def done(self, turn: Turn[_T]) -> None:
        """The batch of a turn is answered."""
        with self._changed:
            if not turn.batch:
                return
            self._at_work.remove(turn)
            self._changed.notify_all()  # somebody may wait for the processors that it had
            if not self._even:
                return
            key, spent_ns = (turn.images, turn.beside), self._clock() - turn.begun_ns
            before_ns = self._spent_ns.get(key)
            self._spent_ns[key] = spent_ns if before_ns is None else _mean(before_ns, spent_ns)
            share_ns = spent_ns / turn.images / (self._workers if turn.beside else 1)
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
