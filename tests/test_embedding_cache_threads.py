"""Once for each image, however many ask for it at once; with failures and Ctrl-C."""

from __future__ import annotations

import functools
import gc
import inspect
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_embeddings import embedding_of, key_of, refuses, watched

from visionfast.embedding import Embedding
from visionfast.embedding_cache import EmbeddingCache
from visionfast.errors import ImageTruncatedError


class _Thread(threading.Thread):
    """Keeps what its call gave or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.gave: Any = None
        self.raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.gave = self._call()
        except BaseException as error:
            self.raised = error


_SOURCE, _FIRST_LINE = inspect.getsourcelines(EmbeddingCache._find)
_WAITS_AT = _FIRST_LINE + next(i for i, line in enumerate(_SOURCE) if "with flight.turn:" in line)


def _until_waiting(threads: list[Any]) -> None:
    """Until each of them has its flight and stands in its queue."""
    for _ in range(2000):
        frames = [sys._current_frames().get(thread.ident) for thread in threads]
        if all(f and f.f_code is EmbeddingCache._find.__code__ and f.f_lineno == _WAITS_AT for f in frames):
            return
        time.sleep(0.005)
    raise AssertionError("they do not wait")


def _join(threads: list[_Thread]) -> None:
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "it hangs"


def _with_waiters(
    cache: EmbeddingCache, outcome: Callable[[], Embedding], waiters: int
) -> tuple[_Thread, list[_Thread]]:
    """One thread makes, and comes to `outcome` once the others wait for it; all have ended."""
    making, go = threading.Event(), threading.Event()

    def make() -> Embedding:
        making.set()
        assert go.wait(20)
        return outcome()

    maker = _Thread(lambda: cache.get(key_of(1), make))
    assert making.wait(20)
    waiting = [_Thread(lambda: cache.get(key_of(1), lambda: embedding_of(2))) for _ in range(waiters)]
    _until_waiting(waiting)
    go.set()
    _join([maker, *waiting])
    return maker, waiting


@pytest.mark.parametrize("max_bytes", [0, 8])
def test_one_makes_and_the_others_get_the_same(max_bytes: int) -> None:
    cache = watched(max_bytes)
    maker, waiting = _with_waiters(cache, lambda: embedding_of(1), 5)
    assert maker.gave.features["image_embeddings"].tolist() == [1] * 8
    assert all(thread.gave is maker.gave for thread in waiting)
    stats = cache.stats()
    assert (stats.misses, stats.hits, stats.coalesced, stats.failures) == (1, 5, 5, 0)
    assert (stats.bytes, stats.too_large) == (max_bytes, 1 if max_bytes == 0 else 0)
    assert not cache._flights


def test_each_waiter_gets_an_exception_of_its_own() -> None:
    cache = watched(8)

    def fails() -> Embedding:
        raise ImageTruncatedError("photo.jpg", "the file ends early")

    maker, waiting = _with_waiters(cache, fails, 4)
    errors = [thread.raised for thread in (maker, *waiting)]
    assert len({id(error) for error in errors}) == 5
    for error in errors:
        assert isinstance(error, ImageTruncatedError)
        assert (str(error), error.source) == ("photo.jpg: the file ends early", "photo.jpg")
    frames = [{frame.name for frame in traceback.extract_tb(error and error.__traceback__)} for error in errors]
    assert ["fails" in names for names in frames] == [True, False, False, False, False]
    stats = cache.stats()
    assert (stats.misses, stats.hits, stats.failures, stats.entries) == (0, 0, 5, 0)
    assert cache.get(key_of(1), lambda: embedding_of(3)).features["image_embeddings"][0] == 3  # tried again


def test_a_failure_does_not_hold_the_image() -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    image = weakref.ref(pixels)

    def fails(pixels: Any) -> Embedding:
        raise ImageTruncatedError("photo.jpg", f"damaged in {len(pixels)} rows")

    gc.disable()  # a cycle of the error, its traceback and the flight would keep it until the next collection
    try:
        with pytest.raises(ImageTruncatedError):
            watched(8).get(key_of(1), functools.partial(fails, pixels))
        del pixels
        assert image() is None
    finally:
        gc.enable()


def test_an_exception_that_cannot_be_copied_is_shared() -> None:
    class OddError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fails() -> Embedding:
        raise OddError(1, 2)

    maker, (waiter,) = _with_waiters(watched(8), fails, 1)
    assert isinstance(maker.raised, OddError)
    assert isinstance(waiter.raised, OddError)
    assert str(waiter.raised) == "1 and 2"


def test_where_ctrl_c_takes_the_maker_a_waiter_makes_it() -> None:
    cache = watched(8)

    def interrupted() -> Embedding:
        raise KeyboardInterrupt

    maker, waiting = _with_waiters(cache, interrupted, 4)
    assert isinstance(maker.raised, KeyboardInterrupt)
    assert all(thread.gave is waiting[0].gave for thread in waiting)
    assert waiting[0].gave.features["image_embeddings"][0] == 2
    stats = cache.stats()
    assert (stats.misses, stats.hits, stats.coalesced, stats.failures) == (1, 3, 3, 1)
    assert not cache._flights


def test_ctrl_c_with_nobody_waiting_leaves_the_key_to_the_next() -> None:
    cache = watched(8)
    with pytest.raises(KeyboardInterrupt):
        cache.get(key_of(1), lambda: signal.raise_signal(signal.SIGINT))  # type: ignore[arg-type, return-value]
    second = _Thread(lambda: cache.get(key_of(1), lambda: embedding_of(1)))
    _join([second])
    assert second.gave.features["image_embeddings"][0] == 1
    assert not cache._flights


def test_ctrl_c_reaches_a_waiter_and_does_not_harm_the_maker() -> None:
    cache = watched(8)
    making, go = threading.Event(), threading.Event()

    def make() -> Embedding:
        making.set()
        assert go.wait(20)
        return embedding_of(1)

    maker = _Thread(lambda: cache.get(key_of(1), make))
    assert making.wait(20)
    main = threading.main_thread()

    def press() -> None:
        _until_waiting([main])
        signal.pthread_kill(main.ident or 0, signal.SIGINT)

    presser = _Thread(press)
    with pytest.raises(KeyboardInterrupt):
        cache.get(key_of(1), refuses)
    go.set()
    _join([maker, presser])
    stats = cache.stats()
    assert (stats.misses, stats.failures, stats.entries) == (1, 1, 1)
    assert cache.get(key_of(1), refuses) is maker.gave


def test_makers_of_different_keys_do_not_wait_for_each_other() -> None:
    cache = watched(16)
    both = threading.Barrier(2, timeout=20)

    def make(number: int) -> Embedding:
        both.wait()  # broken unless both are made at the same time
        return embedding_of(number)

    threads = [_Thread(lambda n=n: cache.get(key_of(n), lambda: make(n))) for n in (1, 2)]
    _join(threads)
    assert [thread.gave.features["image_embeddings"][0] for thread in threads] == [1, 2]


@pytest.mark.parametrize("with_folder", [False, True])
def test_eight_threads_with_delays_and_failures(with_folder: bool, tmp_path: Path) -> None:
    most = 60
    cache = watched(most, folder=tmp_path, max_folder_bytes=5_000) if with_folder else watched(most)
    in_flight: Counter[int] = Counter()
    made: Counter[str] = Counter()
    lock = threading.Lock()

    def make(number: int, dice: random.Random) -> Embedding:
        with lock:
            in_flight[number] += 1
            assert in_flight[number] == 1, "two threads make one key"
        try:
            time.sleep(dice.random() * 0.002)
            if dice.random() < 0.2:
                raise ImageTruncatedError(str(number), "damaged")
            with lock:
                made["made"] += 1
            return embedding_of(number, 5 + number)
        finally:
            with lock:
                in_flight[number] -= 1

    def ask(seed: int) -> Counter[str]:
        dice, ended = random.Random(seed), Counter[str]()
        for _ in range(250):
            number = int(dice.paretovariate(0.7)) % 20
            try:
                embedding = cache.get(key_of(number), lambda number=number: make(number, dice))
            except ImageTruncatedError as error:
                ended["failed" if error.source == str(number) else "another's error"] += 1
            else:
                assert embedding.features["image_embeddings"].tolist() == [number] * (5 + number)
                ended["answered"] += 1
            if dice.random() < 0.01:
                cache.clear()
            assert cache.stats().bytes <= most
        return ended

    threads = [_Thread(lambda seed=seed: ask(seed)) for seed in range(8)]
    _join(threads)
    assert [thread.raised for thread in threads] == [None] * 8
    total = sum((thread.gave for thread in threads), Counter[str]())
    stats = cache.stats()
    assert set(total) == {"failed", "answered"}
    assert stats.misses == made["made"]
    assert stats.failures == total["failed"]
    assert stats.hits == total["answered"] - made["made"]
    assert stats.hits + stats.misses + stats.failures == 8 * 250
    assert not cache._flights
    if with_folder:
        assert stats.disk is not None
        assert stats.disk_hits > 0
        assert stats.disk.bytes <= 5_000
        assert stats.disk.written == stats.misses
        assert (stats.disk.damaged, stats.disk.not_kept) == (0, 0)
