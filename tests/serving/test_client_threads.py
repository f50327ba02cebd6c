"""Threads that wait for answers: used again, never more than allowed, and gone when nobody needs them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest

from visionfast.serving import client_threads
from visionfast.serving.client_threads import Callers


def submitted(callers: Callers, call: Any) -> Future[Any]:
    asked = callers.submit(call)
    assert asked is not None
    return asked


def test_a_thread_is_used_again() -> None:
    callers = Callers()
    idents = set()
    for _ in range(5):
        idents.add(submitted(callers, threading.get_ident).result(10))
        time.sleep(0.05)
    assert len(idents) == 1


def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    callers = Callers(most=1)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        submitted(callers, fail).result(10)
    time.sleep(0.05)
    assert submitted(callers, lambda: 7).result(10) == 7


def test_where_all_threads_are_busy_nothing_is_called() -> None:
    callers, ends = Callers(most=2), threading.Event()
    asked = [submitted(callers, ends.wait) for _ in range(2)]
    called = threading.Event()
    assert callers.submit(called.set) is None
    with pytest.raises(FutureTimeoutError):
        asked[0].result(timeout=0.01)  # given up, and still under way
    assert callers.submit(called.set) is None
    ends.set()
    assert [one.result(10) for one in asked] == [True, True]
    time.sleep(0.1)
    assert not called.is_set()
    submitted(callers, called.set).result(10)
    assert called.is_set()


def test_what_was_asked_and_answered_is_let_go() -> None:
    class Large:
        pass

    callers, large = Callers(), Large()
    gone = weakref.ref(large)

    def fail(one: Large) -> None:
        raise ValueError("no")

    asked = submitted(callers, lambda one=large: fail(one))
    assert isinstance(asked.exception(10), ValueError)
    gc.disable()
    try:
        del asked, large
        ends = time.monotonic() + 10
        while gone() is not None and time.monotonic() < ends:
            time.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()


def test_idle_threads_end_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_threads, "_IDLE_S", 0.05)
    before, callers = threading.active_count(), Callers()
    for _ in range(3):
        assert [one.result(10) for one in [submitted(callers, lambda: 1) for _ in range(8)]] == [1] * 8
        ends = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < ends:
            time.sleep(0.02)
        assert threading.active_count() == before
        assert (callers._threads, callers._free) == (0, 0)


def test_many_threads_ask_while_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost where a thread ends at the moment that a task comes."""
    monkeypatch.setattr(client_threads, "_IDLE_S", 0.001)
    callers, found = Callers(most=8), []

    def ask() -> None:
        for i in range(100):
            if (asked := callers.submit(lambda i=i: i)) is not None:
                found.append(asked.result(10) == i)
            time.sleep(0.001 * (i % 3))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 600
    assert all(found)
