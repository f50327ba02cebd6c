"""Engines as systems under test: visionfast on them, opened once and asked again and again, and they by themselves."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast import artifacts, machine
from visionfast.backends import DeviceEngine
from visionfast.bench.records import System
from visionfast.bench.systems import Answer, Call, SystemUnderTest, taking_turns
from visionfast.embedder import Embedder
from visionfast.loading import check_outputs, load_graphs, load_streams
from visionfast.pipeline import Detector, Segmenter
from visionfast.prompt_segmenter import PromptSegmenter
from visionfast.types import EngineManifest, GraphSpec, Runner

__all__ = ["BareSystem", "DetectorSystem", "EmbedderSystem", "PromptSystem", "details_of", "open_visionfast"]


def details_of(manifest: EngineManifest) -> dict[str, str]:
    """What an engine's figures depend on, as text: `System.details`."""
    spec = manifest.spec
    h, w = spec.preprocess.size_hw
    files = [manifest.sha256[manifest.files[graph.name]] for graph in spec.graphs]
    return {
        "model": spec.name,
        "family": spec.family,
        "task": spec.task,
        "backend": manifest.backend,
        "runtime_version": manifest.runtime_version,
        "precision": manifest.precision,
        "device": manifest.device,
        "size_hw": f"{h}x{w}",
        "batch": str(spec.batch),
        "weights_sha256": manifest.weights_sha256,
        "engine_sha256": ", ".join(files),
        "certificate": manifest.certificate.status,
        "built_by": manifest.visionfast_version,
    }


def _slots(manifest: EngineManifest) -> str:
    """A request is one image here, also for an engine that takes several a call and computes as long for one."""
    return "" if manifest.spec.batch == 1 else f", one image in {manifest.spec.batch} slots"


def open_visionfast(folder: Path, *, threads: int | None = None, device: str | None = None) -> SystemUnderTest:
    """An engine's folder as the system that its task makes of it.

    Args:
        folder: the engine's.
        threads: processors to compute on; default: all that this process may use.
        device: `cpu`, `cuda` or `cuda:1`; default: what the engine was built for, the first of its kind.

    Raises:
        ArtifactError, ManifestError: there is no such engine, or its files are not those it was built with.
        BackendError: this machine cannot run it.
        OptionError: an option is out of its range.
    """
    manifest = artifacts.read_manifest(folder, verify=True)  # the record names the files' hashes
    if manifest.spec.task == "prompt-segment":
        return PromptSystem(folder, manifest, threads=threads, device=device)
    if manifest.spec.task == "embed":
        return EmbedderSystem(folder, manifest, threads=threads, device=device)
    return DetectorSystem(folder, manifest, threads=threads, device=device)


class DetectorSystem:
    """`Detector` or `Segmenter`. A thread of its own each, several of them compute at the same time.

    Arguments and errors as for `open_visionfast`.
    """

    caches = False

    def __init__(
        self, folder: Path, manifest: EngineManifest, *, threads: int | None = None, device: str | None = None
    ) -> None:
        check_outputs(folder, manifest)
        self.system = System("visionfast", f"visionfast{_slots(manifest)}", "visionfast", details_of(manifest))
        self._folder, self._manifest = folder, manifest
        self._threads, self._device = threads, device
        self._kind = Segmenter if manifest.spec.task == "segment" else Detector
        self._single = self._kind.open(folder, threads=threads, device=device)
        self._several: dict[int, list[Detector]] = {}

    def call(self, encoded: bytes) -> Answer:
        return _detect(self._single, encoded)

    def parallel(self, n: int) -> Sequence[Call]:
        """On a CPU at most as many sessions as threads compute: of more callers, some wait for a turn."""
        on_host = self._manifest.device == "cpu"
        sessions = min(n, self._threads or machine.usable_cpus()) if on_host else n
        if sessions not in self._several:
            self._several[sessions] = self._open(sessions)
        opened = self._several[sessions]
        calls: list[Call] = [partial(_detect, detector) for detector in opened]
        return calls if n == sessions else taking_turns(calls, n)

    def _open(self, n: int) -> list[Detector]:
        how: dict[str, Any] = {"threads": self._threads, "device": self._device}
        if self._manifest.device == "cpu":
            engines = load_streams(self._folder, self._manifest, streams=n, **how)
            return [self._kind(self._manifest.spec, engine) for engine in engines]
        return [self._kind.open(self._folder, **how) for _ in range(n)]

    def close(self) -> None:
        for detector in (self._single, *(d for several in self._several.values() for d in several)):
            detector.close()
        self._several.clear()


def _detect(detector: Detector, encoded: bytes) -> Answer:
    (found,) = detector(encoded)
    return Answer(found, found.stage_ns)


class EmbedderSystem:
    """`Embedder`, with the patches' vectors.

    Arguments and errors as for `open_visionfast`.
    """

    caches = False

    def __init__(
        self, folder: Path, manifest: EngineManifest, *, threads: int | None = None, device: str | None = None
    ) -> None:
        self.system = System("visionfast", f"visionfast{_slots(manifest)}", "visionfast", details_of(manifest))
        self._threads = threads or machine.usable_cpus()
        self._on_host = manifest.device == "cpu"
        self._open = partial(Embedder.from_folder, folder, manifest, threads=threads, device=device)
        self._single = self._open()
        self._several: dict[int, Embedder] = {}

    def call(self, encoded: bytes) -> Answer:
        return _embed(self._single, encoded)

    def parallel(self, n: int) -> Sequence[Call]:
        """One embedder with a stream for each, as far as there are threads."""
        streams = min(n, self._threads) if self._on_host else 1
        if streams > 1 and streams not in self._several:
            self._several[streams] = self._open(streams=streams)
        embedder = self._several.get(streams, self._single)
        return [partial(_embed, embedder)] * n

    def close(self) -> None:
        for embedder in (self._single, *self._several.values()):
            embedder.close()
        self._several.clear()


def _embed(embedder: Embedder, encoded: bytes) -> Answer:
    found = embedder(encoded)
    return Answer(found, found.stage_ns[0])


class PromptSystem:
    """`PromptSegmenter`: the mask of one click. Its cache is on, as it is in use.

    Arguments and errors as for `open_visionfast`; `repeats` gives it images that it has seen before (the cheap click),
    not new ones (the image is encoded).
    """

    def __init__(
        self,
        folder: Path,
        manifest: EngineManifest,
        *,
        threads: int | None = None,
        device: str | None = None,
        segmenter: PromptSegmenter | None = None,
    ) -> None:
        self.caches = segmenter is None
        key = "visionfast" if self.caches else "visionfast-repeated"
        name = "visionfast, new images" if self.caches else "visionfast, images seen before"
        self.system = System(key, name, "visionfast", details_of(manifest))
        self._owned = segmenter is None
        self._again = partial(PromptSystem, folder, manifest)
        self._segmenter = segmenter or PromptSegmenter.from_folder(folder, manifest, threads=threads, device=device)

    def repeated(self) -> PromptSystem:
        """The same segmenter, asked again about the images that it has: a figure of its own, not a flattered first."""
        return self._again(segmenter=self._segmenter)

    def call(self, encoded: bytes) -> Answer:
        x = y = _shorter_side(encoded) / 2
        found = self._segmenter.segment(encoded, points=[(x, y, 1)])
        return Answer(found, found.stage_ns)

    def parallel(self, n: int) -> Sequence[Call]:
        """It is safe for several threads, which take turns at the encoder and at the decoder."""
        return [self.call] * n

    def close(self) -> None:
        if self._owned:
            self._segmenter.close()


def _shorter_side(encoded: bytes) -> int:
    """Of an image, pixels, by its header: half of it is inside the image, turned by its EXIF orientation or not."""
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        return min(image.size)


class BareSystem:
    """An engine's graphs on ready tensors, one after the other: what visionfast puts around them is what is missing.

    Arguments and errors as for `open_visionfast`.
    """

    caches = False

    def __init__(self, folder: Path, *, threads: int | None = None, device: str | None = None) -> None:
        manifest = artifacts.read_manifest(folder, verify=True)
        check_outputs(folder, manifest)
        self.system = System("bare", f"bare engine{_slots(manifest)}", "bare", details_of(manifest))
        self._manifest = manifest
        self._load = partial(load_graphs, folder, manifest, threads=threads, device=device)
        self._streams = partial(load_streams, folder, manifest, threads=threads, device=device)
        self._threads = threads or machine.usable_cpus()
        self._opened: list[Runner | DeviceEngine] = []
        self._single = self._of(self._load())
        self._several: dict[int, list[Call]] = {}

    def call(self, encoded: bytes) -> Answer:
        return self._single(encoded)

    def parallel(self, n: int) -> Sequence[Call]:
        """As `DetectorSystem.parallel`; an engine of several graphs, and one on a GPU, takes turns."""
        graphs = self._manifest.spec.graphs
        sessions = min(n, self._threads) if len(graphs) == 1 and self._manifest.device == "cpu" else 1
        if sessions not in self._several:
            engines = self._streams(streams=sessions) if sessions > 1 else []
            self._several[sessions] = [self._of([engine]) for engine in engines] or [self._single]
        calls = self._several[sessions]
        return calls if n == len(calls) else taking_turns(calls, n)

    def close(self) -> None:
        for engine in self._opened:
            engine.close()
        self._opened.clear()
        self._several.clear()

    def _of(self, engines: Sequence[Runner | DeviceEngine]) -> Call:
        self._opened.extend(engines)
        graphs = self._manifest.spec.graphs
        names = [graph.name for graph in graphs] if len(graphs) > 1 else ["engine"]  # as sessions call the stages
        runs = {name: _run_of(*one) for name, one in zip(names, zip(graphs, engines, strict=True), strict=True)}
        return partial(_run_all, runs)


def _run_all(runs: Mapping[str, Callable[[], Any]], encoded: bytes) -> Answer:
    stage_ns: dict[str, int] = {}
    found = None
    for name, run in runs.items():
        started = perf_counter_ns()
        found = run()
        stage_ns[name] = perf_counter_ns() - started
    return Answer(found, stage_ns)


def _run_of(graph: GraphSpec, engine: Runner | DeviceEngine) -> Callable[[], Any]:
    """One run of a graph, on random tensors of its usual sizes, until its outputs are there."""
    random = np.random.default_rng(0)
    feeds: dict[str, npt.NDArray[Any]] = {}
    for tensor in graph.inputs:
        shape = tensor.sized(graph.usual)
        integers = np.issubdtype(tensor.dtype, np.integer)
        feeds[tensor.name] = (random.integers(0, 256, shape) if integers else random.random(shape)).astype(tensor.dtype)
    if not isinstance(engine, DeviceEngine):
        return partial(engine.infer, feeds, copy=False)

    import torch

    device = engine.device
    tensors = {name: torch.from_numpy(array).to(device.where) for name, array in feeds.items()}
    tensors |= {t.name: device.empty(t.sized(graph.usual), t.dtype) for t in graph.outputs}
    device.synchronize()
    engine.bind(tensors)

    def run() -> Any:
        engine.enqueue()
        device.synchronize()
        return tensors

    return run
