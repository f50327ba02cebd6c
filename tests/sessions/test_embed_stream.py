"""Any number of images through an embedder: in order, in bounded memory, and with nothing left running."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast.backends.fake import FakeRunner
from visionfast.embedder import Embedder
from visionfast.errors import BackendError, ImageError, ImageFormatError, OptionError
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, TensorSpec

SIDE = 4
PATIENCE = 20.0  # seconds, after which a test fails instead of hanging


def spec(batch: int = 1) -> ModelSpec:
    graph = GraphSpec(
        "model",
        (TensorSpec("images", (batch, SIDE, SIDE, 3), "uint8", "NHWC"),),
        (TensorSpec("cls", (batch, 3), "float32"), TensorSpec("patches", (batch, 1, 1, 3), "float32")),
    )
    preprocess = PreprocessSpec(
        (SIDE, SIDE), "centre-crop", "bicubic-antialias", 0, cover_hw=(SIDE, SIDE), mean=(0.5,) * 3, std=(0.2,) * 3
    )
    return ModelSpec("fake", "dino", "dinov2_vits14", "embed", (graph,), preprocess, (), ())


def image(number: int) -> npt.NDArray[np.uint8]:
    """A picture of one colour, which says its number whatever is done to it."""
    return np.full((5 + number % 3, 6, 3), (number & 255, number >> 8, 7), np.uint8)


def number_of(cls: npt.NDArray[np.float32]) -> int:
    return int(cls[0]) + 256 * int(cls[1])


Answer = Callable[[Mapping[str, npt.NDArray[Any]]], Mapping[str, npt.NDArray[Any]]]


class Colours:
    """The engine: a slot's vector is its first pixel. Says who computes when."""

    def __init__(self, meanwhile: Callable[[list[int]], None] = lambda numbers: None) -> None:
        self.meanwhile = meanwhile
        self.batches: list[list[int]] = []

    def runner(self, batch: int) -> FakeRunner:
        turn = threading.Lock()

        def answer(feeds: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
            assert turn.acquire(blocking=False), "a runner is one thread's"
            try:
                colours = feeds["images"][:, 0, 0].astype(np.float32)  # (B, 3)
                numbers = [number_of(colour) for colour in colours]
                self.batches.append(numbers)
                self.meanwhile(numbers)
                return {"cls": colours, "patches": colours[:, None, None] + 0.5}
            finally:
                turn.release()

        return FakeRunner(spec(batch).graphs[0], answer)


def embedder(engine: Colours | None = None, *, batch: int = 1, streams: int = 1, threads: int = 2) -> Embedder:
    engine = engine or Colours()
    return Embedder(spec(batch), [engine.runner(batch) for _ in range(streams)], threads=threads)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


# ---- the answers ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 23),
    bad=st.sets(st.integers(0, 22)),
    batch=st.integers(1, 5),
    streams=st.integers(1, 3),
    threads=st.integers(1, 3),
    prefetch=st.none() | st.integers(1, 12),
    patches=st.booleans(),
)
def test_in_order_whatever_is_bad(
    count: int, bad: set[int], batch: int, streams: int, threads: int, prefetch: int | None, patches: bool
) -> None:
    engine, taken = Colours(), 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(count):
            taken += 1
            yield number

    def load(number: int) -> Any:
        if number in bad:
            if number % 2:
                raise ImageFormatError(f"the {number}th", "of no kind")
            return b"no image"
        return image(number)

    given_out = 0
    with embedder(engine, batch=batch, streams=streams, threads=threads) as opened:
        stream = opened.stream(items(), load=load, patches=patches, prefetch=prefetch)
        for item, answer in stream:
            assert taken - given_out <= (prefetch or 3 * streams * batch + threads)
            assert item == given_out
            given_out += 1
            if item in bad:
                assert isinstance(answer, ImageError)
                assert answer.source == (f"the {item}th" if item % 2 else f"image {item}")
                continue
            assert not isinstance(answer, ImageError)
            assert number_of(answer.cls) == item
            assert answer.placed.image_hw == image(item).shape[:2]
            assert {"decode", "preprocess", "engine"} == answer.stage_ns.keys()
            assert (answer.patches is not None) == patches
            if answer.patches is not None:
                assert number_of(answer.patches[0, 0]) == item
    assert given_out == count
    good = len(set(range(count)) - bad)
    if prefetch is None or prefetch >= count or (not set(range(count)) & bad and prefetch >= batch):
        assert len(engine.batches) == -(-good // batch), "batches are full but for the last one"


def test_vectors_are_the_callers() -> None:
    with embedder(batch=2) as opened:
        answers = [answer for _, answer in opened.stream(range(7), load=image, patches=True)]
    for number, answer in enumerate(answers):
        assert not isinstance(answer, ImageError)
        assert number_of(answer.cls) == number
        assert answer.cls.base is None
        assert answer.patches is not None
        assert answer.patches.base is None


def test_a_path_is_named_by_itself(tmp_path: Any) -> None:
    with embedder() as opened:
        ((_, answer),) = opened.stream([tmp_path / "gone.jpg"], load=lambda path: path)
        assert isinstance(answer, ImageError)
        assert answer.source == str(tmp_path / "gone.jpg")
        ((_, answer),) = opened.stream([tmp_path / "bytes.jpg"], load=lambda path: b"nothing")
        assert isinstance(answer, ImageError)
        assert answer.source == str(tmp_path / "bytes.jpg")


def test_an_error_that_is_kept_does_not_keep_its_image() -> None:
    class Pixels(np.ndarray):  # a plain array cannot be told when it goes
        pass

    gone: list[weakref.ref[Any]] = []

    def load(number: int) -> Any:
        pixels = np.zeros((9, 9), np.float64).view(Pixels)
        gone.append(weakref.ref(pixels))
        return pixels

    with embedder() as opened:
        errors = [answer for _, answer in opened.stream(range(3), load=load)]
        found = opened([np.zeros((9, 9), np.float64)] * 3, on_error="return")
    gc.collect()
    assert all(isinstance(error, ImageError) for error in errors)
    assert [ref() for ref in gone] == [None] * 3
    assert all(error.__traceback__ is None for error in found.errors.values())


@pytest.mark.parametrize("prefetch", [0, -1, True, 2.0, "3"])
def test_a_wrong_prefetch_is_told_at_once(prefetch: Any) -> None:
    with embedder() as opened, pytest.raises(OptionError, match="prefetch: expected a number of items, at least 1"):
        opened.stream([], load=image, prefetch=prefetch)


# ---- side by side -----------------------------------------------------------------------------------------


def test_images_are_decoded_while_the_engine_computes() -> None:
    decoded = threading.Event()

    def load(number: int) -> Any:
        if number == 1:
            decoded.set()
        return image(number)

    def meanwhile(numbers: list[int]) -> None:
        assert numbers != [0] or decoded.wait(PATIENCE), "the second image waits for the first one's vectors"

    with embedder(Colours(meanwhile), threads=1) as opened:
        assert len(list(opened.stream(range(3), load=load))) == 3


def test_streams_compute_at_the_same_time() -> None:
    together = threading.Barrier(3)
    with embedder(Colours(lambda numbers: together.wait(PATIENCE) and None), streams=3) as opened:
        assert len(list(opened.stream(range(6), load=image))) == 6


def test_items_are_taken_by_the_thread_that_asks_and_loaded_by_others() -> None:
    takes: set[int] = set()
    loads: set[int] = set()

    def items() -> Iterator[int]:
        for number in range(20):
            takes.add(threading.get_ident())
            yield number

    def load(number: int) -> Any:
        loads.add(threading.get_ident())
        return image(number)

    with embedder() as opened:
        list(opened.stream(items(), load=load))
    assert takes == {threading.get_ident()}
    assert takes.isdisjoint(loads)


def test_a_slow_consumer_holds_the_others_back() -> None:
    engine, loaded = Colours(), []

    def load(number: int) -> Any:
        loaded.append(number)
        return image(number)

    with embedder(engine) as opened, contextlib.closing(opened.stream(iter(int, 1), load=load, prefetch=5)) as stream:
        for given_out in range(1, 4):
            next(stream)
            wait_for(lambda n=given_out: len(engine.batches) == 4 + n)  # type: ignore[misc]
            assert len(loaded) == 4 + given_out
        time.sleep(0.02)  # nobody goes on by himself
        assert len(loaded) == 7


def test_several_streams_at_once() -> None:
    answers: dict[int, list[int]] = {}

    def consume(first: int) -> None:
        stream = opened.stream(range(first, first + 40), load=image)
        answers[first] = [number_of(answer.cls) for _, answer in stream if not isinstance(answer, ImageError)]

    with embedder(batch=2, streams=2) as opened:
        threads = [threading.Thread(target=consume, args=(100 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {100 * i: list(range(100 * i, 100 * i + 40)) for i in range(4)}


# ---- what goes wrong --------------------------------------------------------------------------------------


def consumed(stream: Iterator[tuple[int, Any]]) -> tuple[list[int], BaseException | None]:
    """What came out, and what it ended with."""
    items = []
    try:
        for item, _ in stream:
            items.append(item)
    except BaseException as error:
        assert next(stream, None) is None, "it comes once"
        return items, error
    return items, None


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [ValueError, MemoryError, SystemExit])
def test_another_error_of_load_comes_in_its_place(batch: int, kind: type[BaseException]) -> None:
    failure = kind("no")

    def load(number: int) -> Any:
        if number == 7:
            raise failure
        return image(number)

    with embedder(batch=batch) as opened:
        assert consumed(opened.stream(range(1_000_000), load=load)) == ([0, 1, 2, 3, 4, 5, 6], failure)


@pytest.mark.parametrize("batch", [1, 4])
def test_an_error_of_items_comes_in_its_place(batch: int) -> None:
    failure = RuntimeError("the list is gone")

    def items() -> Iterator[int]:
        yield from range(6)
        raise failure

    with embedder(batch=batch) as opened:
        assert consumed(opened.stream(items(), load=image)) == ([0, 1, 2, 3, 4, 5], failure)
        with pytest.raises(TypeError):
            next(opened.stream(7, load=image))  # type: ignore[arg-type]


@pytest.mark.parametrize("streams", [1, 2])
def test_a_runtime_that_fails(streams: int) -> None:
    def meanwhile(numbers: list[int]) -> None:
        if 4 in numbers:
            raise BackendError("fake: it broke")

    engine = Colours(meanwhile)
    with embedder(engine, batch=2, streams=streams) as opened:
        items, error = consumed(opened.stream(range(1000), load=image))
    assert items == [0, 1, 2, 3]
    assert str(error) == "fake: it broke"
    if streams == 1:
        assert engine.batches == [[0, 1], [2, 3], [4, 5]], "it is not asked again and again"


def test_an_embedder_that_is_closed_meanwhile() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def meanwhile(numbers: list[int]) -> None:
        if numbers == [2]:
            inside.set()
            assert go_on.wait(PATIENCE)

    opened = embedder(Colours(meanwhile))
    came: list[Any] = []
    consumer = threading.Thread(target=lambda: came.append(consumed(opened.stream(range(100), load=image))))
    consumer.start()
    assert inside.wait(PATIENCE)
    closer = threading.Thread(target=opened.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive(), "it waits for whoever is inside"
    go_on.set()
    closer.join(PATIENCE)
    consumer.join(PATIENCE)
    ((items, error),) = came
    assert items == [0, 1, 2]
    assert isinstance(error, BackendError)
    with pytest.raises(BackendError, match="closed; open the engine again"):
        opened.stream([], load=image)


# ---- the end ----------------------------------------------------------------------------------------------


def test_no_items() -> None:
    engine = Colours()
    with embedder(engine) as opened:
        assert list(opened.stream([], load=image)) == []
    assert engine.batches == []


@pytest.mark.parametrize("given_out", [0, 1, 5])
@pytest.mark.parametrize("end", ["close", "throw", "drop", "cycle"])
def test_left_early(given_out: int, end: str) -> None:
    engine = Colours(lambda numbers: time.sleep(0.002))
    with embedder(engine, batch=2, streams=2) as opened:
        stream = opened.stream(iter(int, 1), load=lambda _: image(3))
        for _ in range(given_out):
            next(stream)
        if end == "close":
            stream.close()
        elif end == "throw":
            with pytest.raises(ZeroDivisionError):
                stream.throw(ZeroDivisionError())
        elif end == "cycle":
            cycle: list[Any] = [stream]
            cycle.append(cycle)
            del cycle
        del stream
        gc.collect()
        asked = len(engine.batches)
        time.sleep(0.01)
        assert len(engine.batches) == asked
        assert [number_of(answer.cls) for _, answer in opened.stream([9], load=image)] == [9]  # type: ignore[union-attr]


def test_ctrl_c_while_it_waits() -> None:
    main = threading.get_ident()

    def load(number: int) -> Any:
        if number == 3:
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.05)
        return image(number)

    with embedder() as opened:
        items: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            items.extend(item for item, _ in opened.stream(range(10_000), load=load))
        assert len(items) <= 3


def in_a_process_of_its_own(code: str) -> subprocess.CompletedProcess[str]:
    here = f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]; import test_embed_stream as t\n"
    command = [sys.executable, "-c", here + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_ctrl_c_at_any_moment() -> None:
    """It must not leave a lock taken that the threads need to end."""
    done = in_a_process_of_its_own("""
        main = t.threading.get_ident()
        def interrupted(at, wait):
            def load(number):
                if number == at:
                    t.signal.pthread_kill(main, t.signal.SIGINT)
                    t.time.sleep(wait)
                return t.image(number)
            with t.embedder(batch=1 + at % 2) as opened:
                for _ in opened.stream(range(10_000), load=load):
                    pass
        for number in range(300):
            try:
                interrupted(number % 40, 0.001 * (number % 3))
            except KeyboardInterrupt:
                pass
            else:
                raise SystemExit("it was not interrupted")
            t.wait_for(lambda: t.threading.active_count() == 1)  # one that was just starting ends a little later
        print("ended", flush=True)
    """)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ended", "")


def test_an_interpreter_that_ends_with_a_stream_half_way() -> None:
    """Its threads do not keep the process, and none is in the engine when that goes."""
    done = in_a_process_of_its_own("""
        engine = t.Colours(lambda numbers: t.time.sleep(0.01))
        held = t.embedder(engine, batch=2, streams=2).stream(iter(int, 1), load=lambda _: t.image(5))
        next(held)
        raise SystemExit("as it should")
    """)
    assert (done.returncode, done.stderr.strip()) == (1, "as it should")
