"""Several images at once on a CPU, or one with all processors: who waits decides which.

One image alone is answered by an engine that computes on every thread. Where several wait, each thread has an engine of
its own, so that none waits for another at the end of every layer: more images a second. The weights of the streams are
one copy; those of the engine for single images are a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter_ns
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from visionfast.loading import load_graphs, load_streams
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.types import EngineManifest, ModelSpec, Runner

__all__ = ["Lane", "Lanes"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Lane:
    """A runner and its buffers; for one thread at a time.

    Attributes:
        canvas: (b, h, w, 3) u8, the images of one call of the engine.
        preprocessor: writes an image into a slot of it.
    """

    def __init__(self, spec: ModelSpec, runner: Runner) -> None:
        self._runner = runner
        self._input = runner.inputs[0]
        self.preprocessor = CpuPreprocessor(spec.preprocess)
        h, w = spec.preprocess.size_hw
        self.canvas = np.full((spec.batch, h, w, 3), spec.preprocess.pad_value, np.uint8)
        # An engine with normalisation inside reads the canvas itself.
        self._tensor = None if self._input.layout == "NHWC" else np.zeros(self._input.shape, self._input.dtype)

    def infer(self, canvas: npt.NDArray[np.uint8]) -> tuple[dict[str, npt.NDArray[Any]], int]:
        """(b, h, w, 3) u8 → the engine's outputs by name, its own buffers until the next call, and nanoseconds."""
        started = perf_counter_ns()
        tensor: npt.NDArray[Any] = canvas
        if self._tensor is not None:
            self.preprocessor.normalise(canvas, self._tensor)
            tensor = self._tensor
        return self._runner.infer({self._input.name: tensor}, copy=False), perf_counter_ns() - started

    def close(self) -> None:
        self._runner.close()


class Lanes:
    """All lanes of a process.

    Args:
        folder: the engine's.
        manifest: the engine's.
        threads: processors to compute on.
        max_batch: images that come at once at most.
    """

    def __init__(self, folder: Path, manifest: EngineManifest, *, threads: int, max_batch: int) -> None:
        spec = manifest.spec
        self.batch = spec.batch
        """Images of one call of the engine."""
        self.streams = streams = min(threads, -(-max_batch // spec.batch))
        """That compute at once."""
        (alone,) = load_graphs(folder, manifest, threads=threads)
        beside = load_streams(folder, manifest, threads=threads, streams=streams) if streams > 1 else []
        runners = [runner for runner in (alone, *beside) if isinstance(runner, Runner)]
        self._all = [Lane(spec, runner) for runner in runners]
        self._alone, self._streams = self._all[0], self._all[1:]
        self._free: SimpleQueue[Lane] = SimpleQueue()
        for lane in self._streams:
            self._free.put(lane)
        self._pool = ThreadPoolExecutor(max(1, streams), thread_name_prefix="lane")

    def each(self, work: Callable[[Lane, _Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """`work` on every item, in order, as many at once as is fastest. For one thread at a time."""
        if not self._streams:
            return [work(self._alone, item) for item in items]
        # One that is left over when the streams are through has all threads.
        alone = len(items) % len(self._streams) == 1

        def on_stream(item: _Item) -> _Result:
            lane = self._free.get()
            try:
                return work(lane, item)
            finally:
                self._free.put(lane)

        done = list(self._pool.map(on_stream, items[: len(items) - alone]))
        return [*done, work(self._alone, items[-1])] if alone else done

    def beside(self, stream: int, work: Callable[[Lane, _Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """`work` on every item, one after the other, by one stream, while others' use the others; not while `each` is
        at work."""
        return [work(self._streams[stream], item) for item in items]

    def on_all(self, work: Callable[[Lane], object]) -> None:
        """`work` on every lane, one after the other: the first call of each is slow."""
        for lane in self._all:
            work(lane)

    def close(self) -> None:
        self._pool.shutdown()
        for lane in self._all:
            lane.close()
