"""The measurements behind the curves of `bench.scaling`: each point once a round, in a random order."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from visionfast import machine
from visionfast.bench.engine_systems import open_visionfast
from visionfast.bench.inputs import distinct
from visionfast.bench.scaling import Curve, Law
from visionfast.bench.scenarios import offline, single_stream
from visionfast.bench.systems import SystemUnderTest
from visionfast.pipeline import open_engine
from visionfast.preprocess.decode import decode_image

__all__ = ["at_once_curve", "batch_curve", "image_size_curve", "object_curve", "thread_curve"]

_LONG_SIDES = (160, 320, 640, 1280, 1920, 2880, 3840)  # pixels: a thumbnail to 4K
_GRIDS = (1, 2, 3, 4, 6, 8)  # photographs along a side of a crowd
_CROWD_HW = (1080, 1440)
_FEWEST_ROUNDS = 5

_Pixels: TypeAlias = "npt.NDArray[np.uint8]"
_Points: TypeAlias = "Sequence[tuple[float, Callable[[], float]]]"


def image_size_curve(system: SystemUnderTest, photograph: bytes, *, seconds: float, seed: int = 0) -> Curve:
    """One photograph from a thumbnail to 4K, as JPEG.

    Args:
        system: open.
        photograph: encoded.
        seconds: for all points together; at least five rounds are made.
        seed: of the order.
    """
    pixels = decode_image(photograph)
    points = []
    for side in _LONG_SIDES:
        scaled = _scaled(pixels, side / max(pixels.shape[:2]))
        points.append((scaled.shape[0] * scaled.shape[1] / 1e6, partial(_latency_ms, system, _jpeg(scaled))))
    return _curve("image size", "megapixels", "ms an image", "linear", points, seconds, seed)


def object_curve(system: SystemUnderTest, photograph: bytes, *, seconds: float, seed: int = 0) -> Curve | None:
    """One picture size, with nothing in it and with more and more small photographs, by the objects that are found.

    `None` where a model finds too little in them: it does not look for such objects, or was never trained. Arguments
    as for `image_size_curve`.
    """
    pixels = decode_image(photograph)
    pictures = [np.full((*_CROWD_HW, 3), 114, np.uint8)]
    pictures += [_stretched(np.tile(pixels, (n, n, 1)), _CROWD_HW) for n in _GRIDS]
    points: dict[int, Callable[[], float]] = {}
    for picture in pictures:
        encoded = _jpeg(picture)
        points.setdefault(len(system.call(encoded).found), partial(_latency_ms, system, encoded))
    if len(points) < 4:
        return None
    ascending = [(float(count), points[count]) for count in sorted(points)]
    return _curve("objects", "objects", "ms an image", "linear", ascending, seconds, seed)


def thread_curve(engine: Path, photograph: bytes, *, seconds: float, seed: int = 0) -> Curve | None:
    """From one thread to all processors; `None` where there is one. Other arguments as for `image_size_curve`.

    Args:
        engine: its folder.
    """
    if (most := machine.usable_cpus()) < 2:
        return None
    counts = sorted({*range(1, min(most, 4) + 1), *(n for n in (6, 8, 12, 16, 24, 32, 48, 64) if n < most), most})
    systems = [open_visionfast(engine, threads=n) for n in counts]
    try:
        points = [(float(n), partial(_latency_ms, s, photograph)) for n, s in zip(counts, systems, strict=True)]
        return _curve("threads", "threads", "ms an image", "shared", points, seconds, seed)
    finally:
        for system in systems:
            system.close()


def at_once_curve(system: SystemUnderTest, photograph: bytes, *, seconds: float, seed: int = 0) -> Curve:
    """More and more images at once, up to twice the processors. Arguments as for `image_size_curve`."""
    most = 2 * machine.usable_cpus()
    counts = sorted({*range(1, min(most, 4) + 1), *(n for n in (6, 8, 12, 16, 32, 64) if n < most), most})

    def rate(n: int) -> float:
        rows = offline(system.parallel(n), [0] * (4 * n), _encoded(system, photograph))
        return len(rows) / (max(row.done_ns for row in rows) - min(row.begun_ns for row in rows)) * 1e9

    points = [(float(n), partial(rate, n)) for n in counts]
    return _curve("images at once", "images at once", "images/s", "saturating", points, seconds, seed)


def batch_curve(engines: Mapping[int, Path], photograph: bytes, *, seconds: float, seed: int = 0) -> Curve:
    """A call of engines with different batches, each full. Other arguments as for `image_size_curve`.

    Args:
        engines: batch → the engine's folder.
    """
    opened: list[tuple[int, Any]] = [(batch, open_engine(engines[batch])) for batch in sorted(engines)]

    def call_ms(batch: int, engine: Any) -> float:
        images = [photograph] * batch
        engine(images)
        started = perf_counter_ns()
        engine(images)
        return (perf_counter_ns() - started) / 1e6

    try:
        points = [(float(batch), partial(call_ms, batch, engine)) for batch, engine in opened]
        return _curve("batch", "images", "ms a call", "linear", points, seconds, seed)
    finally:
        for _, engine in opened:
            engine.close()


def _curve(name: str, x_unit: str, y_unit: str, law: Law, points: _Points, seconds: float, seed: int) -> Curve:
    """Every point once untimed, then once a round."""
    values: list[list[float]] = [[] for _ in points]
    for _, measured in points:
        measured()
    order, shuffled, began = list(range(len(points))), random.Random(seed), time.monotonic()
    for done in itertools.count():
        if done >= _FEWEST_ROUNDS and time.monotonic() - began > seconds:
            break
        shuffled.shuffle(order)
        for place in order:
            values[place].append(points[place][1]())
    return Curve(name, x_unit, y_unit, law, tuple(x for x, _ in points), tuple(map(tuple, values)))


def _latency_ms(system: SystemUnderTest, encoded: bytes) -> float:
    (row,) = single_stream(system.call, [0], _encoded(system, encoded))
    return (row.done_ns - row.begun_ns) / 1e6


def _encoded(system: SystemUnderTest, encoded: bytes) -> Callable[[int], bytes]:
    if system.caches:
        return lambda _: distinct(encoded, perf_counter_ns())
    return lambda _: encoded


# ---- pictures ---------------------------------------------------------------------------------------------


def _scaled(pixels: _Pixels, scale: float) -> _Pixels:
    height, width = (max(1, round(side * scale)) for side in pixels.shape[:2])
    return _stretched(pixels, (height, width))


def _stretched(pixels: _Pixels, size_hw: tuple[int, int]) -> _Pixels:
    how = cv2.INTER_AREA if size_hw[0] < pixels.shape[0] else cv2.INTER_CUBIC
    return np.asarray(cv2.resize(pixels, size_hw[::-1], interpolation=how), np.uint8)


def _jpeg(pixels: _Pixels) -> bytes:
    return cv2.imencode(".jpg", pixels[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()
