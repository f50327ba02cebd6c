"""The steps of the waterfall as systems under test: naive PyTorch with one part after the other exchanged.

Detection, segmentation and embedding, on a CPU. The order: fixed shape, compiled engine, precision, decode and
preprocess, post-processing, session reuse, several images at once. A change that can be made to naive PyTorch by
itself is there by itself too.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visionfast import artifacts, machine
from visionfast.backends import get_backend
from visionfast.bench.agreements import add_agreement, eager_model
from visionfast.bench.engine_systems import details_of, open_visionfast
from visionfast.bench.parts import (
    After,
    Before,
    CompiledNetwork,
    EagerNetwork,
    Network,
    OwnAfter,
    OwnBefore,
    PillowBefore,
    Pipeline,
    TorchvisionAfter,
)
from visionfast.bench.records import Input, Samples, System
from visionfast.bench.systems import Answer, Call, SystemUnderTest
from visionfast.bench.ultralytics_peer import ultralytics_module
from visionfast.errors import UnsupportedModelError
from visionfast.types import EngineManifest

if TYPE_CHECKING:
    import torch

__all__ = ["SeveralAtOnce", "open_steps", "per_image"]


@contextlib.contextmanager
def open_steps(
    weights: Path, engine: Path, reduced: Path | None = None, *, inputs: Sequence[Input] = ()
) -> Iterator[list[SystemUnderTest]]:
    """The steps of one checkpoint, to be measured in turns in `single-stream`; closed at the end.

    Args:
        weights: the checkpoint.
        engine: the folder of its FP32 engine, batch 1.
        reduced: that of an engine of the same size in lower precision, or `None` to leave that step out.
        inputs: images that the steps' agreement with eager FP32 PyTorch is taken on; none: it is not taken.

    Raises:
        UnsupportedModelError: for this task, or on a GPU, there is no waterfall.
        BackendUnavailableError: PyTorch, torchvision or ultralytics is missing.
        ArtifactError, BackendError, CheckpointError: an engine or the checkpoint cannot be used.
    """
    manifest = artifacts.read_manifest(engine)
    if manifest.spec.task == "prompt-segment":
        raise UnsupportedModelError(f"{manifest.spec.name}: there is no waterfall for {manifest.spec.task}")
    if manifest.device != "cpu":
        raise UnsupportedModelError(
            f"{manifest.spec.name}: expected an engine for the cpu, got one for {manifest.device}"
        )
    with contextlib.ExitStack() as opened:
        systems: list[SystemUnderTest] = []
        for system in _steps(weights, engine, reduced, opened):
            opened.callback(system.close)
            systems.append(system)
        add_agreement(systems, weights, manifest, inputs)
        yield systems


def _steps(
    weights: Path, engine: Path, reduced: Path | None, opened: contextlib.ExitStack
) -> Iterator[SystemUnderTest]:
    manifest = artifacts.read_manifest(engine)
    spec = manifest.spec
    (fixed,) = eager_model(weights, manifest).modules.values()
    naive = fixed if spec.family == "dino" else ultralytics_module(weights)
    eager = EagerNetwork(naive, spec)
    pillow, own_before = PillowBefore(spec), OwnBefore(spec)
    torchvision, own_after = TorchvisionAfter(spec), OwnAfter(spec)
    place = 0

    def step(name: str, about: str, before: Before, network: Network, after: After, **more: Any) -> Pipeline:
        return Pipeline(_system(place, name, about, **more), before, network, after)

    yield step("naive PyTorch", "Pillow, torchvision's transforms and NMS, eager FP32", pillow, eager, torchvision)
    if naive is not fixed:
        place += 1
        about = "one input shape: anchors made once, batch normalisation folded into the convolutions"
        yield step("fixed shape", about, pillow, EagerNetwork(fixed, spec), torchvision, by_itself=True)
    place += 1
    network = _compiled(engine, manifest, opened)
    about = f"{manifest.backend} {manifest.runtime_version}, {manifest.precision.upper()}, takes 8-bit pixels"
    yield step("compiled engine", about, pillow, network, torchvision, by_itself=True)  # its shape is fixed anyway
    last = engine
    if reduced is not None:
        place += 1
        last, low = reduced, artifacts.read_manifest(reduced)
        network = _compiled(reduced, low, opened)
        name = f"precision {low.precision.upper()}"
        yield step(name, f"the engine computes in {low.precision.upper()}", pillow, network, torchvision)
        if (dtype := _torch_dtype(low)) is not None:
            yield step(name, "", pillow, EagerNetwork(naive, spec, dtype), torchvision, alone=True)
    place += 1
    about = "libjpeg-turbo and OpenCV, letterboxed into 8 bits" if spec.task != "embed" else "libjpeg-turbo, own resize"
    yield step("decode and preprocess", about, own_before, network, torchvision)
    yield step("decode and preprocess", "", own_before, eager, torchvision, alone=True)
    if spec.task != "embed":  # whose vectors are ready
        place += 1
        yield step("post-processing", "visionfast's, in NumPy", own_before, network, own_after)
        yield step("post-processing", "", pillow, eager, own_after, alone=True)
    place += 1
    session = open_visionfast(last)
    about = "one session: buffers kept, outputs read where the engine leaves them"
    session.system = _system(place, "session reuse", about, artifacts.read_manifest(last))
    yield session
    if (streams := machine.usable_cpus()) > 1:
        place += 1
        several = SeveralAtOnce(open_visionfast(last), streams)
        about = f"{streams} sessions with one processor each; the time is that of an image among them"
        several.system = _system(place, f"{streams} images at once", about, at_once=streams, images=several.images)
        yield several


def _system(
    place: int,
    name: str,
    about: str,
    manifest: EngineManifest | None = None,
    *,
    alone: bool = False,
    by_itself: bool = False,
    at_once: int = 1,
    images: int = 1,
) -> System:
    details = details_of(manifest) if manifest else {}
    details |= {"step": str(place), "about": about}
    details |= {word: "yes" for word, said in (("alone", alone), ("by itself", by_itself)) if said}
    if at_once > 1:
        details |= {"at once": str(at_once), "images a call": str(images)}
    return System(f"step-{place}{'-alone' if alone else ''}", name, "step", details)


def _compiled(folder: Path, manifest: EngineManifest, opened: contextlib.ExitStack) -> CompiledNetwork:
    graph = manifest.spec.graphs[0]
    runner = opened.enter_context(get_backend(manifest.backend).load(folder, manifest, graph))
    return CompiledNetwork(runner)


def _torch_dtype(manifest: EngineManifest) -> torch.dtype | None:
    """What `module.to(…)` would be told for that precision; `None` where PyTorch's CPU kernels are not there for it."""
    import torch

    return torch.bfloat16 if manifest.precision == "bf16" else None


# ---- several at once --------------------------------------------------------------------------------------


class SeveralAtOnce:
    """A system asked by several threads at once: a call answers the image `images` times, and takes the time of all.

    Its stages are those of all images over the number of threads: what they take of the call's time. `per_image` makes
    an image's share of both.

    Args:
        inner: closed with it.
        threads: that ask.
    """

    _TURNS = 2  # images of a thread in a call: the longer the call, the less its end, where threads wait, is of it

    def __init__(self, inner: SystemUnderTest, threads: int) -> None:
        self.system = inner.system
        self.caches = inner.caches
        self.images = threads * self._TURNS
        self._inner, self._threads = inner, threads
        self._calls = inner.parallel(threads)
        self._pool = ThreadPoolExecutor(threads)

    def call(self, encoded: bytes) -> Answer:
        answers = [
            answer for some in self._pool.map(self._ask, self._calls, [encoded] * self._threads) for answer in some
        ]
        spent: Counter[str] = Counter()
        for answer in answers:
            spent.update(answer.stage_ns)
        return Answer(answers[0].found, {stage: ns // self._threads for stage, ns in spent.items()})

    def _ask(self, call: Call, encoded: bytes) -> list[Answer]:
        return [call(encoded) for _ in range(self._TURNS)]

    def parallel(self, n: int) -> Sequence[Call]:
        return self._inner.parallel(n)

    def close(self) -> None:
        self._pool.shutdown()
        self._inner.close()


def per_image(samples: Samples, images: int) -> Samples:
    """A call's samples as those of one of its `images`: every time is its share."""
    stages: Mapping[str, Any] = {
        stage: np.where(column < 0, column, column // images) for stage, column in samples.stage_ns.items()
    }
    done_ns = samples.begun_ns + (samples.done_ns - samples.begun_ns) // images
    return replace(samples, due_ns=samples.begun_ns, done_ns=done_ns, stage_ns=stages)
