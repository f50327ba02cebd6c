"""Doubles for what NVIDIA's container has and this machine has not: a plan, DALI's and TensorRT's backends, a GPU.

`tensorrt_engine` makes an engine's folder with all but a plan that is one. `runs_here` turns the pipeline that is
deployed for it into one for the real server on a CPU, and changes no more than it must: DALI's graph is the deployed
one with its operators on the CPU, the engine is the OpenVINO one that the plan stands for, and the device is
`recording.RecordingDevice`, where Triton's kernels run in their interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dali_message import on_the_cpu

from visionfast import artifacts
from visionfast.serving.pbtxt import read_config, text_of
from visionfast.types import EngineManifest, TensorSpec

__all__ = ["runs_here", "tensorrt_engine"]

_TESTS = Path(__file__).parents[1]

_DALI = """\
import pathlib
import numpy as np
import nvidia.dali as dali
from visionfast.serving.stages.requests import array_of, response_of

NAMES = ("images", "decoded_hw", "told")

class TritonPythonModel:
    def initialize(self, args):
        graph = pathlib.Path(args["model_repository"], args["model_version"], "model.dali").read_bytes()
        self.pipeline = dali.Pipeline.deserialize(graph, prefetch_queue_depth=1)
        self.pipeline.build()

    def execute(self, requests):
        # As NVIDIA's backend does: the rows of all requests in one run, however long those of each are.
        rows = [row for request in requests for row in array_of(request, "encoded")]
        self.pipeline.feed_input("encoded", rows)
        outputs = dict(zip(NAMES, (output.as_array() for output in self.pipeline.run())))
        responses, first = [], 0
        for request in requests:
            some = np.s_[first : first + len(array_of(request, "encoded"))]
            responses.append(response_of({name: array[some].copy() for name, array in outputs.items()}))
            first = some.stop
        return responses
"""

_ENGINE = """\
import json, pathlib
import numpy as np
from visionfast import artifacts
from visionfast.loading import load_graphs
from visionfast.serving.stages.requests import array_of, response_of

class TritonPythonModel:
    def initialize(self, args):
        folder = pathlib.Path(json.loads(args["model_config"])["parameters"]["double"]["string_value"])
        manifest = artifacts.read_manifest(folder)
        (self.runner,) = load_graphs(folder, manifest, threads=1)
        self.input = manifest.spec.graphs[0].inputs[0]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        levels = array_of(request, "images")
        if levels.dtype != np.uint8:
            # What OpenVINO's engine normalises itself.
            levels = np.rint(levels.astype(np.float32) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
        assert levels.shape == self.input.shape  # of one image, and no other number of them
        return response_of(self.runner.infer({self.input.name: np.ascontiguousarray(levels)}))

    def finalize(self):
        self.runner.close()
"""

_POSTPROCESS = """\
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, TESTS)
from recording import RecordingDevice
from visionfast.serving.stages import device_postprocess
device_postprocess.open_device = lambda index: RecordingDevice()
TritonPythonModel = device_postprocess.TritonPythonModel
"""

_FUSED = """\
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, TESTS)
import numpy as np
import torch
from pathlib import Path
from recording import RecordingDevice, RecordingEngine
from visionfast import artifacts
from visionfast.loading import load_graphs
from visionfast.serving.stages import fused_gpu
from visionfast.sessions.cuda import CudaSession

OPENVINO = Path(ENGINE)

def open_on_gpu(folder, manifest, index, options, limits):
    whole = artifacts.read_manifest(OPENVINO)
    (runner,) = load_graphs(OPENVINO, whole, threads=1)
    (graph,) = manifest.spec.graphs

    def answer(inputs):
        levels = np.rint(inputs["images"].numpy() * 255).astype(np.uint8).transpose(0, 2, 3, 1)
        each = [runner.infer({runner.inputs[0].name: np.ascontiguousarray(image[None])}) for image in levels]
        return {name: torch.from_numpy(np.concatenate([one[name] for one in each])) for name in each[0]}

    engine = RecordingEngine(graph, RecordingDevice(), answer)
    return CudaSession(manifest.spec, engine, options=options, limits=limits)

fused_gpu.open_on_gpu = open_on_gpu
TritonPythonModel = fused_gpu.TritonPythonModel
"""


def tensorrt_engine(openvino: Path, folder: Path, *, backend: str = "tensorrt", batch: int = 1) -> Path:
    """An engine's folder as `visionfast build` writes it on a GPU, but for the plan itself.

    Args:
        openvino: the engine that it stands for.
        folder: to write.
        backend: of the manifest.
        batch: images that it says it takes.
    """
    folder.mkdir(parents=True)
    manifest = artifacts.read_manifest(openvino)
    (graph,) = manifest.spec.graphs
    h, w = manifest.spec.preprocess.size_hw
    image = TensorSpec("images", (batch, 3, h, w), "float32", "NCHW")
    outputs = tuple(replace(tensor, shape=(batch, *tensor.shape[1:])) for tensor in graph.outputs)
    plan = folder / f"{graph.name}.engine"
    plan.write_bytes(b"no plan")
    made: EngineManifest = replace(
        manifest,
        spec=replace(manifest.spec, graphs=(replace(graph, inputs=(image,), outputs=outputs),)),
        backend=backend,
        device="sm89",
        runtime_version="10.13.3.9",
        files={graph.name: plan.name},
        sha256={plan.name: artifacts.sha256_file(plan)},
        certificate=replace(manifest.certificate, status="not yet run on a device", images=()),
    )
    artifacts.write_manifest(folder, made)
    return folder


def runs_here(repository: Path, openvino: Path) -> Path:
    """Changes a deployed pipeline for NVIDIA's container, in its place.

    Args:
        repository: pipelines/<name>.
        openvino: the engine that the plan stands for, or whose files it has.
    """
    doubles = {
        "dali": _DALI,
        "tensorrt": _ENGINE,
        "openvino": _ENGINE,
        "gpu": _POSTPROCESS.replace("TESTS", repr(str(_TESTS))),
        "whole": _FUSED.replace("TESTS", repr(str(_TESTS))).replace("ENGINE", repr(str(openvino))),
    }
    for folder in filter(Path.is_dir, repository.iterdir()):
        config = read_config((folder / "config.pbtxt").read_text())
        double = config.backend
        for group in config.instance_group:
            if group.kind == group.KIND_GPU and double == "python":
                double = "whole" if folder.name == repository.name else "gpu"
            group.kind = group.KIND_CPU
        if double in doubles:
            (folder / "1" / "model.py").write_text(doubles[double])
            config.platform, config.backend = "", "python"
        if double == "dali":
            graph = folder / "1" / "model.dali"
            graph.write_bytes(on_the_cpu(graph.read_bytes()))
        if double in ("tensorrt", "openvino"):
            config.parameters["double"].string_value = str(openvino)
        config.ClearField("optimization")
        (folder / "config.pbtxt").write_text(text_of(config))
    return repository
