"""The plain PyTorch way to embed a heap of images: a DataLoader that decodes and resizes, an eager module on batches.

It has no answer for a single image before its batch is full, so it is measured in `offline` alone, by turns with
visionfast over the same images.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visionfast import machine
from visionfast.bench.agreements import eager_model
from visionfast.bench.records import Input, Samples, System
from visionfast.bench.report_tables import BESIDE
from visionfast.bench.scenarios import Row, offline, samples_of
from visionfast.bench.systems import SystemUnderTest
from visionfast.types import EngineManifest, ModelSpec

if TYPE_CHECKING:
    import torch
    from PIL import Image

__all__ = ["DataLoaderLoop", "measure_loop"]

_BATCH = 16
_OWN_KEY = "visionfast-beside-loop"
_FEWEST_ROUNDS = 6


class DataLoaderLoop:
    """One setting of it: Pillow, torchvision's Resize, CenterCrop, ToTensor and Normalize, FP32, `inference_mode`.

    Args:
        weights: the checkpoint.
        manifest: of an engine of it, whose size it takes; the publisher's own transform, `centre-crop`.
        workers: of the DataLoader; 0 is this process.
        batch: images.

    Raises:
        CheckpointError: the checkpoint is refused.
    """

    def __init__(self, weights: Path, manifest: EngineManifest, *, workers: int = 0, batch: int = _BATCH) -> None:
        (self._module,) = eager_model(weights, manifest).modules.values()
        self._spec: ModelSpec = manifest.spec
        self._set(workers, batch)

    def with_setting(self, *, workers: int, batch: int) -> DataLoaderLoop:
        """Another setting of the same module."""
        other = copy.copy(self)
        other._set(workers, batch)
        return other

    def _set(self, workers: int, batch: int) -> None:
        self.batch, self._workers = batch, workers
        details = {"torch": machine.package_version("torch"), "precision": "fp32", BESIDE: _OWN_KEY}
        name = f"PyTorch, DataLoader(batch_size={batch}, num_workers={workers})"
        self.system = System("dataloader", name, "naive", details)

    def run(self, images: Sequence[bytes | Path]) -> tuple[npt.NDArray[np.float32], list[int]]:
        """(N, D) vectors, and when each of them was in host memory (`perf_counter_ns`).

        Args:
            images: encoded, or files, which the workers read.
        """
        import torch

        torch.set_num_threads(machine.usable_cpus())
        loader = torch.utils.data.DataLoader(
            _dataset(images, self._spec), batch_size=self.batch, num_workers=self._workers
        )
        vectors, done_ns = [], []
        with torch.inference_mode():
            for batch in loader:
                cls = self._module(batch)[0].numpy()  # (B, D)
                vectors.append(cls)
                done_ns += [perf_counter_ns()] * len(cls)
        return np.concatenate(vectors), done_ns


def _publisher_transform(spec: ModelSpec) -> Callable[[Image.Image], torch.Tensor]:
    """torchvision's transforms as DINO's publisher evaluates with: an RGB picture → (3, H, W) f32.

    Args:
        spec: of an engine made with `centre-crop`.
    """
    from torchvision import transforms

    pre = spec.preprocess
    assert pre.cover_hw is not None, "the publisher's transform covers and crops"
    composed: Callable[[Image.Image], torch.Tensor] = transforms.Compose(
        [
            transforms.Resize(min(pre.cover_hw), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(pre.size_hw),
            transforms.ToTensor(),
            transforms.Normalize(pre.mean, pre.std),
        ]
    )
    return composed


def _dataset(images: Sequence[bytes | Path], spec: ModelSpec) -> torch.utils.data.Dataset[Any]:
    import torch
    from PIL import Image

    transform = _publisher_transform(spec)

    class Encoded(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, index: int) -> Any:
            image = images[index]
            with Image.open(image if isinstance(image, Path) else io.BytesIO(image)) as picture:
                return transform(picture.convert("RGB"))

    return Encoded()


def measure_loop(
    loop: DataLoaderLoop, own: SystemUnderTest, inputs: Sequence[Input], *, seconds: float, seed: int = 0
) -> list[tuple[System, Samples]]:
    """Both over the same images, by turns in rounds of a random order, each first untimed: the loop on a batch,
    visionfast on an image a thread.

    Args:
        loop: of the DataLoader.
        own: open.
        inputs: each is asked about as often as the others, or once more: all the loop's batches are full.
        seconds: in all; at least six rounds are made.
        seed: of the order.

    Returns:
        both, visionfast as it was beside the loop, with their samples in `offline`.
    """
    streams = machine.usable_cpus()
    calls = own.parallel(streams)
    whole = math.lcm(loop.batch, streams)  # as many for each thread, too
    count = -(-max(2 * loop.batch, len(inputs)) // whole) * whole
    order = [i % len(inputs) for i in range(count)]
    blocks: dict[str, list[tuple[int, list[Row]]]] = {_OWN_KEY: [], loop.system.key: []}

    def loop_rows() -> list[Row]:
        loop.run([inputs[i].encoded for i in order[: loop.batch]])
        begun = perf_counter_ns()
        _, done_ns = loop.run([inputs[i].encoded for i in order])
        return [Row(i, begun, begun, done, {}, False) for i, done in zip(order, done_ns, strict=True)]

    def own_rows() -> list[Row]:
        return offline(calls, order, lambda i: inputs[i].encoded)

    turns = [(loop.system.key, loop_rows), (_OWN_KEY, own_rows)]
    shuffled, began = random.Random(seed), time.monotonic()
    for number in itertools.count():
        if number >= _FEWEST_ROUNDS and time.monotonic() - began > seconds:
            break
        for key, rows in shuffled.sample(turns, len(turns)):
            blocks[key].append((number, rows()))
    beside = replace(own.system, key=_OWN_KEY, name=f"{own.system.name}, beside the loop")
    return [(system, samples_of(blocks[system.key], {"parallel": streams})) for system in (beside, loop.system)]
