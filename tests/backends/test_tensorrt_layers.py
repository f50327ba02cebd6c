"""What TensorRT-RTX made of the typed ONNX, read from its own build log: convolutions in FP16, the decode in FP32."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from visionfast.backends import get_backend
from visionfast.backends.tensorrt_layers import EngineLayer, parse_io_tensors, parse_layers, precision_counts
from visionfast.checkpoint import open_checkpoint
from visionfast.export import export_onnx
from visionfast.families import LoadedModel, identify
from visionfast.types import GraphSpec, Precision, TensorSpec

# A process has one TensorRT logger, the first that was made; so each build that is listened to has its own process.
_BUILD = """
import sys
import tensorrt_rtx as trt

class Log(trt.ILogger):
    def log(self, severity, message):
        print(message)

log = Log()
builder = trt.Builder(log)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, log)
assert parser.parse_from_file(sys.argv[1])
config = builder.create_builder_config()
config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
config.num_compute_capabilities = 1
assert config.set_compute_capability(trt.ComputeCapability.SM89, 0)
assert builder.build_serialized_network(network, config) is not None
"""

rtx = pytest.mark.skipif(
    not get_backend("tensorrt-rtx").availability().can_build,
    reason="TensorRT-RTX is not installed: pip install 'visionfast[tensorrt-rtx]'",
)


@dataclasses.dataclass(frozen=True)
class _Built:
    graph: GraphSpec
    onnx: onnx.ModelProto
    log: str

    @functools.cached_property
    def layers(self) -> tuple[EngineLayer, ...]:
        return parse_layers(self.log)

    @property
    def convolutions(self) -> set[str]:
        return {node.name for node in self.onnx.graph.node if node.op_type in ("Conv", "ConvTranspose")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., _Built]:
    folder = tmp_path_factory.mktemp("onnx")

    @functools.cache
    def make(checkpoint: Path, precision: Precision = "fp16", keep: tuple[str, ...] = (), size: int = 320) -> _Built:
        opened = open_checkpoint(checkpoint)
        loaded: LoadedModel = identify(opened).load(opened, name="m", size_hw=(size, size))
        (graph,) = loaded.spec.graphs
        path = folder / "model.onnx"
        islands = (*loaded.fp32_islands[graph.name], *keep)
        written = export_onnx(loaded.modules[graph.name], graph, path, precision=precision, keep_fp32=islands)
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, str(path)], capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr + done.stdout[-2000:]
        return _Built(written, onnx.load(path), done.stdout)

    return make


@pytest.fixture(params=["untrained yolov8n", "untrained yolov8s", "untrained yolov8n-seg", "yolov8n", "yolov8n-seg"])
def weights(
    request: pytest.FixtureRequest, seeded_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    which: str = request.param
    if which == "untrained yolov8s":
        import torch
        from ultralytics.nn.tasks import DetectionModel

        torch.manual_seed(0)
        path = tmp_path_factory.mktemp("weights") / "yolov8s.pt"
        torch.save({"model": DetectionModel("yolov8s.yaml", nc=80, verbose=False).half()}, path)
        return path
    if which.startswith("untrained"):
        return seeded_checkpoint("segment" if which.endswith("-seg") else "detect", 3)
    trained: Path = request.getfixturevalue("shared_data") / "weights" / f"{which}-coco.pt"
    if not trained.is_file():
        pytest.skip(f"{trained.name} is not among the tests' data")
    return trained


@rtx
def test_convolutions_are_fp16_and_the_decode_is_fp32(weights: Path, built: Callable[..., _Built]) -> None:
    engine = built(weights)
    segments = len(engine.graph.outputs) == 2

    # its tensors are those that the manifest will name
    inputs, outputs = parse_io_tensors(engine.log)
    assert set(inputs) == {dataclasses.replace(spec, layout="") for spec in engine.graph.inputs}
    assert set(outputs) == set(engine.graph.outputs)
    assert {spec.name: spec.dtype for spec in (*inputs, *outputs)} == {
        "images": "float16",
        "predictions": "float32",
        **({"prototypes": "float16"} if segments else {}),
    }

    # every convolution of the ONNX is in a layer, and but for the decode's in one that is FP16 throughout
    inside = {node: layer for layer in engine.layers for node in layer.nodes}
    outside_decode = {name for name in engine.convolutions if "/decode/" not in name}
    assert len(outside_decode) > 50
    assert engine.convolutions <= set(inside)
    computed = {name: inside[name] for name in outside_decode}
    assert {name: layer.dtypes for name, layer in computed.items() if layer.dtypes != {"float16"}} == {}

    decode = [layer for layer in engine.layers if any("/decode/" in node for node in layer.nodes)]
    kinds = {node.rpartition("/")[2].split("_")[0] for layer in decode for node in layer.nodes if "/decode/" in node}
    assert {"Softmax", "Conv", "Sub", "Add", "Mul", "Sigmoid"} <= kinds
    for layer in decode:
        assert set(layer.outputs) == {"float32"}, layer
        assert set(layer.weights) <= {"float32"}, layer
    # What goes into it is FP16: the casts are in its first layers, not in layers of their own.
    assert {dtype for layer in decode for dtype in layer.inputs} == {"float16", "float32"}

    counts = precision_counts(engine.layers)
    assert next(iter(counts)) == "float16"
    assert counts["float32"] == len(decode)


@rtx
def test_what_is_kept_in_fp32_is_computed_in_it(
    built: Callable[..., _Built], seeded_checkpoint: Callable[..., Path]
) -> None:
    engine = built(seeded_checkpoint("detect", 3), keep=("blocks.4.m.0",))
    inside = {node: layer for layer in engine.layers for node in layer.nodes}
    first, second = (inside[f"/network/blocks.4/m.0/cv{i}/conv/Conv"] for i in (1, 2))
    assert first.dtypes == {"float32"}  # what goes on to the second layer stays FP32
    assert {*second.inputs, *second.weights} == {"float32"}
    before, after = (inside[f"/network/blocks.4/cv{i}/conv/Conv"] for i in (1, 2))
    assert before.weights[0] == after.weights[0] == "float16"


@rtx
def test_an_fp32_engine_has_no_fp16_in_it(built: Callable[..., _Built], seeded_checkpoint: Callable[..., Path]) -> None:
    engine = built(seeded_checkpoint("detect", 3), precision="fp32")
    assert {dtype for layer in engine.layers for dtype in layer.dtypes} == {"float32"}
    assert list(precision_counts(engine.layers)) == ["float32"]


_LINES = """\
Some layer had Name: x, LayerType
Layers:
Name: __myl_A_0, LayerType: kgen, Inputs: [ { Name: images, Dimensions: [1,3,4,4], Datatype: Half, Format: (Linear) }],\
 Constants: [ { Name: w, Dimensions: [2,1], Datatype: Half }, { Name: s, Dimensions: [1,1], Datatype: Float }],\
 Outputs: [ { Name: a, Dimensions: [1], Datatype: Float, Format: F }, { Name: b, Datatype: Half }],\
 TacticName: t, StreamId: 0, Metadata: [ONNX Layer: /a/Conv][ONNX Layer: /a/Mul]
Name: plain, LayerType: Reformat, Inputs: [], Outputs: [ { Name: c, Datatype: FP8 }], TacticName: , StreamId: 0

I/O Tensors:
 Name: images, IOMode: Input, DataType: Half, Dimensions: [1,3,4,4], Location: Device
 Name: points, IOMode: Input, DataType: Float, Dimensions: [-1,-1,2], Location: Device
 Name: found, IOMode: Output, DataType: Float, Dimensions: [], Location: Device
"""


def test_lines_of_a_log() -> None:
    layers = parse_layers(_LINES)
    assert layers == (
        EngineLayer("__myl_A_0", "kgen", ("float16",), ("float16",), ("float32", "float16"), ("/a/Conv", "/a/Mul")),
        EngineLayer("plain", "Reformat", (), (), ("fp8",), ()),
    )
    assert layers[0].dtypes == {"float16", "float32"}
    assert precision_counts(layers) == {"float32": 1, "float16": 1, "fp8": 1}
    assert parse_io_tensors(_LINES) == (
        (TensorSpec("images", (1, 3, 4, 4), "float16"), TensorSpec("points", (-1, -1, 2), "float32")),
        (TensorSpec("found", (), "float32"),),
    )
    assert parse_layers("") == ()
    assert parse_io_tensors("") == ((), ())
