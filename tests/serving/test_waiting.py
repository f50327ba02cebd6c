"""The line: who is next and who is refused, by a clock of the test's own."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.errors import DeadlineError, QueueFullError
from visionfast.serving.guarded import guarded
from visionfast.serving.scheduling import QueueLimits
from visionfast.serving.waiting import Line, Place, Turn

MS = 1_000_000
LIMITS = (QueueLimits(requests=4, timeout_ms=1000), QueueLimits(requests=8, timeout_ms=5000))


class Clock:
    def __init__(self) -> None:
        self.ns = 10**12

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, ms: float) -> None:
        self.ns += round(ms * MS)


def a_line(
    images: int = 2, limits: Sequence[QueueLimits] = LIMITS, *, even: bool = True, delay_ms: int = 0, workers: int = 1
) -> tuple[Line[str], Clock]:
    clock = Clock()
    return Line(limits, images=images, delay_ns=delay_ms * MS, even=even, workers=workers, clock=clock), clock


def next_turn(line: Line[str]) -> Turn[str]:
    turn = line.turn()
    assert turn is not None
    return turn


def served(line: Line[str]) -> list[str]:
    """The next batch, answered at once."""
    turn = next_turn(line)
    line.done(turn)
    return names(turn.batch)


def names(places: Sequence[Place[str]]) -> list[str]:
    return [place.item for place in places]


def learn(line: Line[str], clock: Clock, ms: float, images: int = 1) -> None:
    """The line sees one batch that takes so long."""
    line.join("before", images=images)
    turn = next_turn(line)
    assert names(turn.batch) == ["before"]
    clock.pass_ms(ms)
    line.done(turn)


def learn_beside(line: Line[str], clock: Clock, ms: float) -> None:
    """The line sees two batches, one beside the other, that take so long."""
    for name in "ab":
        line.join(name)
    turns = [next_turn(line), next_turn(line)]
    clock.pass_ms(ms)
    for turn in turns:
        line.done(turn)


# ---- who is next --------------------------------------------------------------------------------------------------


def test_online_before_offline_and_first_come_first_served_within() -> None:
    line, _ = a_line()
    for name, level in (("a", 1), ("b", 1), ("c", 0), ("d", 1), ("e", 0), ("f", 0)):
        line.join(name, level=level)
    batches = []
    while len(line):
        batches.append(served(line))
    assert batches == [["c", "e"], ["f"], ["a", "b"], ["d"]]


def test_a_batch_has_as_many_images_as_it_may_and_a_larger_request_is_one_by_itself() -> None:
    line, _ = a_line(images=3)
    for name, images in (("a", 2), ("b", 2), ("c", 1), ("d", 7)):
        line.join(name, images=images)
    assert [served(line) for _ in range(3)] == [["a"], ["b", "c"], ["d"]]


def test_who_asks_alone_waits_for_nobody() -> None:
    """One request after the other: nobody will come meanwhile, however long the first one waits."""
    line, _ = a_line(delay_ms=1000)
    for name in "abc":
        line.join(name)
        assert served(line) == [name]  # the clock stands still


def test_where_others_come_the_first_of_a_batch_waits_for_them() -> None:
    line, clock = a_line(delay_ms=50)
    line.join("before")
    busy = next_turn(line)
    line.join("a")  # while the worker is busy: there is more than one who asks
    line.done(busy)
    turns: list[Turn[str]] = []
    worker = threading.Thread(target=lambda: turns.append(next_turn(line)))
    worker.start()
    worker.join(0.1)
    assert worker.is_alive()  # the clock stands still, and it waits
    line.join("b")
    worker.join(10)
    assert names(turns[0].batch) == ["a", "b"]
    line.join("c")
    line.done(turns[0])
    clock.pass_ms(50)
    assert served(line) == ["c"]  # it has waited in vain
    line.join("d")
    assert names(next_turn(line).batch) == ["d"]  # and so the next one does not


def test_who_waits_when_the_line_is_closed_is_still_served() -> None:
    line, _ = a_line(delay_ms=1000)
    line.join("before")
    busy = next_turn(line)
    line.join("a")
    line.done(busy)
    line.close()
    assert served(line) == ["a"]
    assert line.turn() is None


def test_closing_wakes_a_worker_that_waits() -> None:
    line, _ = a_line()
    ended = []
    worker = threading.Thread(target=lambda: ended.append(line.turn()))
    worker.start()
    line.close()
    worker.join(10)
    assert ended == [None]


# ---- who is refused -----------------------------------------------------------------------------------------------


def test_a_full_line_refuses_at_once_and_each_priority_has_its_own() -> None:
    line, _ = a_line()
    for name in "abcd":
        line.join(name)
    with pytest.raises(QueueFullError, match="too many requests wait already, 4 online ones; send fewer"):
        line.join("e")
    line.join("f", level=1)
    next_turn(line)
    line.join("e")


def test_a_request_whose_time_is_over_is_not_begun_and_not_let_in() -> None:
    line, clock = a_line()
    line.join("a", timeout_ns=10 * MS)
    line.join("b", timeout_ns=100 * MS)
    clock.pass_ms(10)
    turn = next_turn(line)
    assert (names(turn.batch), names(turn.late)) == (["b"], ["a"])
    with pytest.raises(DeadlineError, match=r"time ran out: it had 0 ms here"):
        line.join("c", deadline_ns=clock.ns)


def test_who_waits_behind_one_that_takes_long_is_told_when_its_time_is_over() -> None:
    line = Line[str](LIMITS, images=1, even=False)
    line.join("a")
    long = next_turn(line)
    line.join("b", timeout_ns=60 * MS)
    line.join("c", level=1, timeout_ns=30 * MS)
    for name in "cb":
        late = line.late()
        assert late is not None
        assert names(late) == [name]
        assert 0 <= time.monotonic_ns() - late[0].deadline_ns < 1000 * MS
    told: list[list[Place[str]] | None] = []
    watch = threading.Thread(target=lambda: told.append(line.late()))
    watch.start()
    line.join("d", deadline_ns=1 << 80)
    time.sleep(0.05)
    line.close()
    watch.join(10)
    assert told == [None]
    line.done(long)
    assert served(line) == ["d"]


def test_the_limit_is_also_the_most_that_a_request_may_ask_for() -> None:
    line, clock = a_line()
    line.join("a", timeout_ns=60_000 * MS)
    line.join("b")
    line.join("c", level=1)
    clock.pass_ms(1000)
    turn = next_turn(line)
    assert (names(turn.batch), names(turn.late)) == (["c"], ["a", "b"])


def test_another_steps_deadline_holds_as_it_is() -> None:
    line, clock = a_line()
    line.join("a", deadline_ns=clock.ns + 2000 * MS)
    clock.pass_ms(1500)
    assert names(next_turn(line).batch) == ["a"]


def test_what_cannot_be_in_time_behind_the_others_is_refused_at_once() -> None:
    line, clock = a_line(images=1)
    learn(line, clock, 100)
    line.join("a")
    next_turn(line)
    clock.pass_ms(50)  # a has 50 ms to go
    line.join("b")  # 100 ms
    with pytest.raises(QueueFullError, match="wait already, 250 ms of work, and this one has 300 ms"):
        line.join("c", timeout_ns=300 * MS)  # 250 ms, and a quarter for safety
    line.join("c", timeout_ns=320 * MS)
    line.join("d", level=1, timeout_ns=500 * MS)  # 350 ms
    with pytest.raises(QueueFullError):
        line.join("e", level=1, timeout_ns=500 * MS)  # 450 ms
    line.join("e", level=0, timeout_ns=500 * MS)  # who comes before d and e


def test_what_would_be_late_is_not_begun_unless_it_waited_for_nobody() -> None:
    line, clock = a_line(images=1)
    learn(line, clock, 100)
    line.join("a", timeout_ns=20 * MS)  # nothing is ahead of it: it is let to try, and the mean is corrected
    busy = next_turn(line)
    assert names(busy.batch) == ["a"]
    clock.pass_ms(100)
    line.join("b", timeout_ns=130 * MS)
    line.done(busy)
    clock.pass_ms(10)
    turn = next_turn(line)
    assert (names(turn.batch), names(turn.late)) == ([], ["b"])


def test_one_that_takes_longer_together_does_not_make_the_first_late() -> None:
    line, clock = a_line(images=2)
    learn(line, clock, 100, images=2)
    line.join("a", timeout_ns=90 * MS)
    line.join("b", timeout_ns=1000 * MS)
    assert [served(line), served(line)] == [["a"], ["b"]]


def test_a_mean_that_is_wrong_is_forgotten() -> None:
    line, clock = a_line(images=1, limits=(QueueLimits(1000, 1000), QueueLimits(1000, 1000)))
    learn(line, clock, 10_000)  # a machine that slept, say
    refused = 0
    for _ in range(200):
        line.join("a", timeout_ns=200 * MS)
        clock.pass_ms(5)
        if not next_turn(line).late:
            break
        refused += 1
    assert 0 < refused < 150


def test_without_even_times_nothing_is_foretold() -> None:
    line, clock = a_line(images=1, even=False)
    learn(line, clock, 10_000)
    line.join("a")
    line.join("b", timeout_ns=100 * MS)
    clock.pass_ms(99)
    assert [served(line) for _ in range(2)] == [["a"], ["b"]]


# ---- several workers ----------------------------------------------------------------------------------------------


def test_who_comes_alone_has_all_processors_and_others_wait_for_its_end() -> None:
    line, clock = a_line(images=1, workers=2)
    line.join("a")
    alone = next_turn(line)
    assert (names(alone.batch), alone.beside) == (["a"], False)
    line.join("b")
    line.join("c")
    turns: list[Turn[str]] = []
    other = threading.Thread(target=lambda: turns.append(next_turn(line)))
    other.start()
    other.join(0.1)
    assert other.is_alive()
    clock.pass_ms(40)
    line.done(alone)
    other.join(10)
    assert (names(turns[0].batch), turns[0].beside) == (["b"], True)
    beside = next_turn(line)  # at once, beside the other
    assert (names(beside.batch), beside.beside) == (["c"], True)


def test_none_of_several_waits_for_another() -> None:
    line, clock = a_line(images=1, workers=2)
    for name in "abcd":
        line.join(name)
    first, second = next_turn(line), next_turn(line)
    clock.pass_ms(70)
    line.done(second)
    third = next_turn(line)
    clock.pass_ms(10)
    line.done(first)
    fourth = next_turn(line)
    assert [names(turn.batch) for turn in (first, second, third, fourth)] == [["a"], ["b"], ["c"], ["d"]]
    assert all(turn.beside for turn in (first, second, third, fourth))


def test_a_request_of_many_images_is_beside_nobody() -> None:
    line, _ = a_line(images=1, workers=2)
    line.join("a")
    line.join("b")
    line.join("many", images=5)
    line.join("c")
    first, second = next_turn(line), next_turn(line)
    line.done(first)
    turns: list[Turn[str]] = []
    other = threading.Thread(target=lambda: turns.append(next_turn(line)))
    other.start()
    other.join(0.1)
    assert other.is_alive()  # and c does not overtake it
    line.done(second)
    other.join(10)
    assert (names(turns[0].batch), turns[0].beside) == (["many"], False)
    line.done(turns[0])
    assert served(line) == ["c"]


def test_behind_one_that_is_late_a_request_of_many_images_is_beside_nobody_either() -> None:
    line, clock = a_line(images=1, workers=2)
    for name in "ab":
        line.join(name)
    turns = [next_turn(line), next_turn(line)]
    clock.pass_ms(100)
    for turn in turns:
        line.done(turn)
    for name in "ab":
        line.join(name)
    first, second = next_turn(line), next_turn(line)
    line.join("late", timeout_ns=251 * MS)
    line.join("many", images=5)
    line.join("offline", level=1)
    clock.pass_ms(150)  # late has 101 ms, and would take 125
    line.done(first)
    turn = next_turn(line)
    assert (names(turn.batch), names(turn.late)) == ([], ["late"])
    line.done(turn)
    line.done(second)
    assert [served(line), served(line)] == [["many"], ["offline"]]


def test_one_priority_does_not_take_the_others_processors_where_nobody_is_at_work() -> None:
    line, _ = a_line(images=1, workers=2)
    line.join("offline", level=1)
    line.join("online")
    turn = next_turn(line)
    assert (names(turn.batch), turn.beside) == (["online"], False)


def test_a_wait_is_foretold_from_what_all_workers_do() -> None:
    line, clock = a_line(images=1, workers=2)
    learn_beside(line, clock, 80)
    assert line.waits_ns()[1] == [0, 0]
    for name in "abc":
        line.join(name)
    turns = [next_turn(line), next_turn(line)]
    clock.pass_ms(30)
    # 50 ms until a worker is free; c, of which two are answered in 80 ms; and this one's own 80.
    assert line.waits_ns()[1] == [170 * MS, 170 * MS]
    line.done(turns[0])
    line.done(next_turn(line))
    with pytest.raises(QueueFullError):
        line.join("d", timeout_ns=1 * MS)


def test_one_that_took_long_beside_others_does_not_shut_the_others_out() -> None:
    line, clock = a_line(images=1, workers=2)
    learn(line, clock, 50)
    learn_beside(line, clock, 5000)  # two huge pictures, say
    refused = 0
    for _ in range(100):
        line.join("first", timeout_ns=1000 * MS)
        alone = next_turn(line)
        clock.pass_ms(8)
        try:
            line.join("second", timeout_ns=1000 * MS)
        except QueueFullError:
            refused += 1
        clock.pass_ms(42)
        line.done(alone)
        if len(line):
            second = next_turn(line)
            clock.pass_ms(50)
            line.done(second)
    assert refused < 20


def test_behind_one_that_is_alone_a_request_will_be_alone_too() -> None:
    line, clock = a_line(images=1, workers=2)
    learn(line, clock, 50)
    learn_beside(line, clock, 90)
    line.join("a")
    next_turn(line)
    line.join("b", timeout_ns=126 * MS)  # 50 and 50, and a quarter for safety
    with pytest.raises(QueueFullError):
        line.join("c", timeout_ns=126 * MS)


def test_a_refused_request_is_let_go_at_once() -> None:
    """Its error keeps no frame, and no frame the request: a cycle would stay until the collector comes by."""
    line, clock = a_line()

    class Held:
        pass

    kept = []

    def execute() -> None:
        item = Held()
        kept.append(weakref.ref(item))
        error = guarded(lambda: line.join(item, deadline_ns=clock.ns))  # type: ignore[arg-type]
        assert isinstance(error, DeadlineError)

    gc.disable()
    try:
        execute()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_workers_that_wait_end_when_the_line_is_closed() -> None:
    line, _ = a_line(images=1, workers=3)
    ended: list[Turn[str] | None] = []
    workers = [threading.Thread(target=lambda: ended.append(line.turn())) for _ in range(3)]
    for worker in workers:
        worker.start()
    line.join("a")
    while not ended:
        time.sleep(0.001)
    assert ended[0] is not None
    line.join("b")  # behind one that is alone
    line.close()
    line.done(ended[0])
    for worker in workers:
        worker.join(0.2)
    rest = [turn for turn in ended[1:] if turn is not None]
    assert [names(turn.batch) for turn in rest] == [["b"]]
    line.done(rest[0])
    for worker in workers:
        worker.join(10)
    assert not any(worker.is_alive() for worker in workers)


# ---- whatever comes -----------------------------------------------------------------------------------------------

STEP = st.one_of(
    st.tuples(st.just("join"), st.integers(0, 1), st.integers(1, 4), st.integers(1, 400)),
    st.tuples(st.just("serve"), st.integers(1, 120), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 120), st.just(0), st.just(0)),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1)), max_size=30))
def test_several_workers_answer_everybody_once(workers: int, images: int, asked: list[tuple[int, int]]) -> None:
    limits = (QueueLimits(requests=100, timeout_ms=60_000),) * 2
    line: Line[int] = Line(limits, images=images, delay_ns=MS, workers=workers)
    lock, at_work, answered = threading.Lock(), [], []  # type: ignore[var-annotated]

    def work() -> None:
        while (turn := line.turn()) is not None:
            with lock:
                assert len(at_work) < workers
                assert turn.images <= images or len(turn.batch) == 1
                assert not at_work or (turn.beside and all(other.beside for other in at_work))
                at_work.append(turn)
            time.sleep(0)
            with lock:
                at_work.remove(turn)
                answered.extend(place.item for place in turn.batch)
            line.done(turn)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for number, (count, level) in enumerate(asked):
        line.join(number, images=count, level=level)
    line.close()
    for thread in threads:
        thread.join(20)
    assert sorted(answered) == list(range(len(asked)))


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=60), st.integers(1, 4), st.booleans())
def test_everybody_is_answered_or_refused_once_in_order_and_in_time(
    steps: list[tuple[str, int, int, int]], images: int, even: bool
) -> None:
    line, clock = a_line(images=images, even=even)
    inside: tuple[deque[int], ...] = (deque(), deque())
    size: dict[int, int] = {}
    for number, (what, first, second, third) in enumerate(steps):
        if what == "join":
            try:
                line.join(str(number), level=first, images=second, timeout_ns=third * MS)
            except QueueFullError:
                continue
            inside[first].append(number)
            size[number] = second
        elif what == "wait":
            clock.pass_ms(first)
        elif len(line):
            turn = next_turn(line)
            for place in turn.late:
                inside[place.level].remove(int(place.item))
            batch = [int(place.item) for place in turn.batch]
            assert len(batch) == 1 or sum(size[one] for one in batch) <= images
            assert all(place.deadline_ns > clock.ns for place in turn.batch)
            if batch:
                level = 0 if inside[0] else 1
                assert batch == [inside[level].popleft() for _ in batch]
            clock.pass_ms(first)
            line.done(turn)
        assert len(line) == len(inside[0]) + len(inside[1])
        assert all(len(waiting) <= limits.requests for waiting, limits in zip(inside, LIMITS, strict=True))
