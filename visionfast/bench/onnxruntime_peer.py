"""onnxruntime on a CPU, between visionfast's own pre- and post-processing: what differs is the engine alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast import machine
from visionfast.bench.agreements import eager_model
from visionfast.bench.parts import OwnAfter, OwnBefore, Pipeline
from visionfast.bench.records import System
from visionfast.errors import BackendUnavailableError
from visionfast.export import export_onnx
from visionfast.preprocess.levels import LevelTables
from visionfast.types import EngineManifest, ModelSpec

__all__ = ["OnnxruntimeNetwork", "onnxruntime_pipeline"]


class OnnxruntimeNetwork:
    """A session of onnxruntime.

    Args:
        path: an ONNX file of the model's one graph, FP32.
        spec: of the model.
    """

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = machine.usable_cpus()
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._levels = LevelTables(spec.preprocess)

    def feed(self, pixels: npt.NDArray[np.uint8]) -> Any:
        tensor = np.empty((1, 3, *pixels.shape[:2]), np.float32)
        self._levels.normalise(pixels[None], tensor)
        return tensor

    def run(self, feed: Any) -> Mapping[str, Any]:
        return dict(zip(self._outputs, self._session.run(None, {self._input: feed}), strict=True))


def onnxruntime_pipeline(weights: Path, manifest: EngineManifest, scratch: Path) -> Pipeline:
    """The graph that the engine was made from, exported again, in onnxruntime.

    Args:
        weights: the checkpoint.
        manifest: of its engine.
        scratch: a folder that the ONNX file is written into.

    Raises:
        BackendUnavailableError: onnxruntime is not installed.
    """
    if machine.missing_packages("onnxruntime"):
        raise BackendUnavailableError("not installed; `pip install onnxruntime` to have it beside the others")
    spec, path = manifest.spec, scratch / "onnxruntime.onnx"
    loaded = eager_model(weights, manifest)
    (graph,) = loaded.spec.graphs
    export_onnx(loaded.modules[graph.name], graph, path, precision="fp32")
    details = {"onnxruntime": machine.package_version("onnxruntime"), "precision": "fp32"}
    system = System("onnxruntime", "onnxruntime, FP32, in visionfast's pre- and post-processing", "peer", details)
    return Pipeline(system, OwnBefore(spec), OnnxruntimeNetwork(path, spec), OwnAfter(spec))
