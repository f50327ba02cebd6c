"""The four ways in which requests arrive, after MLPerf's LoadGen (Reddi et al., "MLPerf Inference Benchmark", 2020).

    single-stream   one after the other, the next as soon as the last is answered     P90 of the latency
    multi-stream    N at once, the next N as soon as all are answered                 P99 until all N are answered
    server          at random times (Poisson), whether or not anyone is free          the highest rate in a bound
    offline         all there from the beginning                                      images a second

A request's latency begins when it is due: who waits because somebody before was slow has waited. Each function here
runs one block of requests of one system, after one request (of each thread) that is not timed: what the system before
left in caches and thread pools is not its own.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter_ns
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from visionfast.bench.records import Samples
from visionfast.bench.systems import Call
from visionfast.errors import VisionfastError

__all__ = ["EncodedOf", "Row", "arrivals_ns", "multi_stream", "offline", "samples_of", "server", "single_stream"]

_SPIN_NS = 300_000
"""A sleeping thread wakes up some 60 µs late; the last stretch before a request is due it only yields."""


class Row(NamedTuple):
    """One request, as the columns of `Samples`."""

    input: int
    due_ns: int
    begun_ns: int
    done_ns: int
    stage_ns: Mapping[str, int]
    failed: bool


EncodedOf: TypeAlias = Callable[[int], bytes]
"""An input's bytes by its number; asked before the request begins."""


def single_stream(call: Call, order: Sequence[int], encoded_of: EncodedOf) -> list[Row]:
    """One request after the other.

    Args:
        call: of the system.
        order: the inputs' numbers.
        encoded_of: their bytes.
    """
    _ask(call, order[0], encoded_of(order[0]), perf_counter_ns())
    rows = []
    for number in order:
        encoded = encoded_of(number)
        rows.append(_ask(call, number, encoded, None))
    return rows


def multi_stream(calls: Sequence[Call], order: Sequence[int], encoded_of: EncodedOf) -> list[Row]:
    """As many requests at once as there are `calls`, each on a thread of its own, in lock step: the last one to be
    answered sends the next ones off, and the moment is when all of them are due. Inputs come again from the beginning
    where the last group is not full."""
    n = len(calls)
    groups = -(-len(order) // n)
    cycled = list(itertools.islice(itertools.cycle(order), groups * n))
    gates = [threading.Semaphore(0) for _ in range(n)]
    pending, lock = n, threading.Lock()
    due_ns = 0

    def arrive() -> None:
        """The last one opens the gates of all."""
        nonlocal pending, due_ns
        with lock:
            pending -= 1
            if pending:
                return
            pending = n
            due_ns = perf_counter_ns()
        for gate in gates:
            gate.release()

    def work(thread: int, stopped: threading.Event) -> list[Row]:
        rows = []
        try:
            for group in range(groups):
                number = cycled[group * n + thread]
                encoded = encoded_of(number)
                arrive()
                gates[thread].acquire()
                if stopped.is_set():
                    break
                rows.append(_ask(calls[thread], number, encoded, due_ns))
        except BaseException:
            stopped.set()
            raise
        finally:
            for gate in gates:  # nobody waits for who is gone
                gate.release()
        return rows

    return _on_threads(calls, cycled, encoded_of, work)


def server(
    calls: Sequence[Call], order: Sequence[int], due_ns: npt.NDArray[np.int64], encoded_of: EncodedOf
) -> list[Row]:
    """Requests that are due when they are due; who is free takes the next one, first come first served.

    Args:
        calls: of the system, one a thread.
        order: the inputs' numbers, one a request.
        due_ns: (len(order),) int64, ascending, from the block's beginning; of `arrivals_ns`.
        encoded_of: the inputs' bytes.
    """
    numbers = itertools.count()  # next() is one step of the interpreter: no two threads get the same
    began_ns = 0
    began = threading.Event()

    def work(thread: int, stopped: threading.Event) -> list[Row]:
        nonlocal began_ns
        if thread == 0:
            began_ns = perf_counter_ns()
            began.set()
        began.wait()
        rows = []
        while (request := next(numbers)) < len(order) and not stopped.is_set():
            number = order[request]
            encoded = encoded_of(number)
            due = began_ns + int(due_ns[request])
            _wait_until(due)
            rows.append(_ask(calls[thread], number, encoded, due))
        return rows

    return _on_threads(calls, order, encoded_of, work)


def offline(calls: Sequence[Call], order: Sequence[int], encoded_of: EncodedOf) -> list[Row]:
    """Everything is there: each thread takes the next one as soon as it is done. A request is due when it is taken, for
    a wait in a heap says nothing."""
    numbers = itertools.count()

    def work(thread: int, stopped: threading.Event) -> list[Row]:
        rows = []
        while (request := next(numbers)) < len(order) and not stopped.is_set():
            number = order[request]
            rows.append(_ask(calls[thread], number, encoded_of(number), None))
        return rows

    return _on_threads(calls, order, encoded_of, work)


def arrivals_ns(count: int, rate_per_s: float, seed: int) -> npt.NDArray[np.int64]:
    """(count,) int64: when `count` requests are due that come at random, `rate_per_s` of them a second on average.

    A Poisson process: the gaps are independent and exponentially distributed.
    """
    gaps_s = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    due: npt.NDArray[np.int64] = (np.cumsum(gaps_s) * 1e9).astype(np.int64)
    return due


def _ask(call: Call, number: int, encoded: bytes, due_ns: int | None) -> Row:
    begun = perf_counter_ns()
    try:
        answer = call(encoded)
    except VisionfastError:
        return Row(number, begun if due_ns is None else due_ns, begun, perf_counter_ns(), {}, True)
    done = perf_counter_ns()
    return Row(number, begun if due_ns is None else due_ns, begun, done, answer.stage_ns, False)


def _wait_until(due_ns: int) -> None:
    while (left := due_ns - perf_counter_ns()) > 0:
        time.sleep((left - _SPIN_NS) / 1e9 if left > _SPIN_NS else 0)


def _on_threads(
    calls: Sequence[Call],
    order: Sequence[int],
    encoded_of: EncodedOf,
    work: Callable[[int, threading.Event], list[Row]],
) -> list[Row]:
    """`work(thread, stopped)` on a thread for each call, which begin together once each has asked once, untimed. What
    one of them raises is raised, when all have stopped."""
    together = threading.Barrier(len(calls))
    stopped = threading.Event()
    found: list[list[Row]] = [[] for _ in calls]
    raised: list[BaseException] = []

    def run(thread: int) -> None:
        try:
            number = order[thread % len(order)]
            _ask(calls[thread], number, encoded_of(number), perf_counter_ns())
            together.wait()
            found[thread] = work(thread, stopped)
        except threading.BrokenBarrierError:
            pass  # another one failed, and says why
        except BaseException as error:
            raised.append(error)
            stopped.set()
            together.abort()

    threads = [threading.Thread(target=run, args=(i,), name=f"bench-{i}") for i in range(len(calls))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: each finishes what it is at
        stopped.set()
        for thread in threads:
            thread.join()
        raise
    if raised:
        raise raised[0]
    return sorted(itertools.chain.from_iterable(found), key=lambda row: (row.begun_ns, row.done_ns))


def samples_of(blocks: Sequence[tuple[int, Sequence[Row]]], settings: Mapping[str, float]) -> Samples:
    """Blocks of one system in one scenario as columns.

    Args:
        blocks: the number of its round, and its requests.
        settings: of the scenario.
    """
    rows = [row for _, block in blocks for row in block]
    stages = list(dict.fromkeys(stage for row in rows for stage in row.stage_ns))

    def column(values: Iterable[int]) -> npt.NDArray[np.int64]:
        return np.fromiter(values, np.int64, len(rows))

    return Samples(
        round=column(number for number, block in blocks for _ in block),
        input=column(row.input for row in rows),
        due_ns=column(row.due_ns for row in rows),
        begun_ns=column(row.begun_ns for row in rows),
        done_ns=column(row.done_ns for row in rows),
        stage_ns={stage: column(row.stage_ns.get(stage, -1) for row in rows) for stage in stages},
        failed=np.fromiter((row.failed for row in rows), np.bool_, len(rows)),
        settings=dict(settings),
    )
