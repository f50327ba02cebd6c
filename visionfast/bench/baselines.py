"""What visionfast's figures stand beside: the ways in which a checkpoint is run without it.

Detection and segmentation: naive PyTorch, ultralytics' predictor on PyTorch and on its own OpenVINO export, and
onnxruntime. Embedding: naive PyTorch, onnxruntime. Clicks: the publisher's own predictor. All begin with the encoded
bytes and end with results in host memory, and every one may use all processors. Who is not installed is named, and the
others go on.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from visionfast import artifacts, machine
from visionfast.bench.agreements import add_agreement, eager_model
from visionfast.bench.onnxruntime_peer import onnxruntime_pipeline
from visionfast.bench.parts import EagerNetwork, PillowBefore, Pipeline, TorchvisionAfter
from visionfast.bench.records import Input, System
from visionfast.bench.sam_peer import OfficialPredictor
from visionfast.bench.systems import SystemUnderTest
from visionfast.bench.ultralytics_peer import ultralytics_module, ultralytics_openvino, ultralytics_pytorch
from visionfast.terminal import one_line
from visionfast.types import EngineManifest

__all__ = ["Absent", "open_baselines"]


@dataclass(frozen=True, slots=True)
class Absent:
    """Who was left out of a comparison, and why, in a line."""

    name: str
    reason: str


@contextlib.contextmanager
def open_baselines(
    weights: Path, engine: Path, *, inputs: Sequence[Input] = ()
) -> Iterator[tuple[list[SystemUnderTest], list[Absent]]]:
    """Everybody who can run this checkpoint here, and who cannot; closed at the end.

    Args:
        weights: the checkpoint.
        engine: the folder of an engine of it, whose size the others take too.
        inputs: images that their agreement with the reference is taken on; none: it is not taken.

    Raises:
        ArtifactError: the engine cannot be used.
    """
    manifest = artifacts.read_manifest(engine)
    with tempfile.TemporaryDirectory(prefix="visionfast-") as folder, contextlib.ExitStack() as opened:
        systems: list[SystemUnderTest] = []
        absent: list[Absent] = []
        for name, make in _makers(weights, manifest, Path(folder)):
            try:
                made = list(make())
                add_agreement(made, weights, manifest, inputs)
            except Exception as error:  # whatever keeps somebody else's package from working is said
                absent.append(Absent(name, one_line(f"{error}" or type(error).__name__)))
                continue
            for system in made:
                opened.callback(system.close)
            systems += made
        yield systems, absent


_Maker = Callable[[], Iterable[SystemUnderTest]]


def _makers(weights: Path, manifest: EngineManifest, scratch: Path) -> Iterator[tuple[str, _Maker]]:
    spec = manifest.spec
    size_hw = spec.preprocess.size_hw
    if spec.task == "prompt-segment":
        system = System("official", "the publisher's own predictor, PyTorch", "naive", _torch_details())
        yield system.name, lambda: [OfficialPredictor(system, weights, spec.architecture)]
        return
    yield "naive PyTorch", lambda: [_naive(weights, manifest)]
    if spec.family == "yolov8":
        yield "ultralytics predict on PyTorch", lambda: ultralytics_pytorch(weights, size_hw)
        export = scratch / "openvino"
        export.mkdir()
        yield "ultralytics predict on its OpenVINO export", lambda: ultralytics_openvino(weights, size_hw, export)
    yield "onnxruntime", lambda: [onnxruntime_pipeline(weights, manifest, scratch)]


def _naive(weights: Path, manifest: EngineManifest) -> Pipeline:
    spec = manifest.spec
    if spec.family == "yolov8":
        module = ultralytics_module(weights)
    else:
        (module,) = eager_model(weights, manifest).modules.values()
    system = System("naive", "naive PyTorch", "naive", _torch_details())
    return Pipeline(system, PillowBefore(spec), EagerNetwork(module, spec), TorchvisionAfter(spec))


def _torch_details() -> dict[str, str]:
    return {"torch": machine.package_version("torch"), "precision": "fp32"}
