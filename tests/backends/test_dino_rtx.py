"""DINO with TensorRT-RTX, built ahead of time, and what its build log says of the engines.

In FP16 the residual stream, every norm and every softmax are FP32, the patches' own convolution and the turning of
queries and keys too; every matrix product is FP16, and an attention is one layer.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from rtx_graph import RtxGraph

from visionfast import artifacts
from visionfast.backends import get_backend, tensorrt
from visionfast.backends.tensorrt_layers import parse_io_tensors, parse_layers
from visionfast.build import build
from visionfast.build_plan import Plan
from visionfast.types import EngineManifest, Precision

pytestmark = pytest.mark.skipif(
    not get_backend("tensorrt-rtx").availability().can_build,
    reason="TensorRT-RTX is not installed: pip install 'visionfast[tensorrt-rtx]'",
)

_Target = tuple[str, tuple[int, int], Precision, str]

FP16: tuple[Any, ...] = (
    ("dinov2_vits14", (224, 224), "fp16", "sm89"),
    ("dinov3_vits16", (224, 336), "fp16", "sm120"),
    pytest.param(("dinov3_vits16", (224, 224), "fp16", "sm89"), marks=pytest.mark.slow),
    pytest.param(("dinov2_vits14", (518, 518), "fp16", "sm89"), marks=pytest.mark.slow),
)
FP32: tuple[Any, ...] = (
    pytest.param(("dinov3_vits16", (224, 224), "fp32", "sm89"), marks=pytest.mark.slow),
    pytest.param(("dinov2_vits14", (224, 224), "fp32", "sm120"), marks=pytest.mark.slow),
)
_BLOCKS = 12
_PATCH = {"dinov2_vits14": 14, "dinov3_vits16": 16}


@dataclasses.dataclass(frozen=True)
class _Engine(RtxGraph):
    folder: Path
    manifest: EngineManifest


@pytest.fixture(scope="module")
def engines(
    dino_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[_Target], _Engine]]:
    """Built as `visionfast build` does, looking on: the ONNX are kept, and the log that the layers are read from."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    @functools.cache
    def make(target: _Target) -> _Engine:
        kind, size_hw, precision, gpu = target
        home = tmp_path_factory.mktemp("rtx")
        (home / "onnx").mkdir()
        logs: list[str] = []

        def export(plan: Plan, folder: Path, *more: Any) -> Any:
            return exported(plan, home / "onnx", *more)

        def parse(log: str) -> Any:
            logs.append(log)
            return parse_layers(log)

        exported = Plan.export
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VISIONFAST_HOME", str(home))
            patch.setattr(Plan, "export", export)
            patch.setattr(tensorrt, "parse_layers", parse)
            folder, manifest = build(
                dino_checkpoint(kind), backend="tensorrt-rtx", gpu=gpu, precision=precision, size_hw=size_hw
            )
        (log,) = logs
        (graph,) = manifest.spec.graphs
        return _Engine(graph, onnx.load(home / "onnx" / "model.onnx"), log, folder, manifest)

    yield make
    torch.set_num_threads(threads)


@pytest.fixture
def engine(request: pytest.FixtureRequest, engines: Callable[[_Target], _Engine]) -> _Engine:
    return engines(request.param)


fp16 = pytest.mark.parametrize("engine", FP16, indirect=True)


@pytest.mark.parametrize("engine", [*FP16, *FP32], indirect=True)
def test_one_engine_for_its_task(engine: _Engine) -> None:
    manifest = artifacts.read_manifest(engine.folder, verify=True)
    assert manifest == engine.manifest
    assert manifest.files == {"model": "model.engine"}
    assert manifest.certificate.status == "not yet run on a device"
    spec = manifest.spec
    assert spec.task == "embed"
    h, w = (side // _PATCH[spec.name] for side in spec.preprocess.size_hw)
    half = manifest.precision == "fp16"
    (images,), outputs = engine.spec.inputs, engine.spec.outputs
    assert (images.shape, images.dtype) == ((1, 3, *spec.preprocess.size_hw), "float16" if half else "float32")
    # What comes out, comes out of a norm.
    assert [(o.name, o.shape, o.dtype) for o in outputs] == [
        ("cls", (1, 384), "float32"), ("patches", (1, h, w, 384), "float32")
    ]  # fmt: skip
    for specs, tensors in zip((engine.spec.inputs, outputs), parse_io_tensors(engine.log), strict=True):
        assert {(t.name, t.shape, t.dtype) for t in tensors} == {(s.name, s.shape, s.dtype) for s in specs}


@pytest.mark.parametrize("engine", FP32, indirect=True)
def test_fp32_is_fp32(engine: _Engine) -> None:
    assert engine.manifest.keep_fp32 == ()
    assert set(engine.manifest.layers) == {"float32"}
    assert {d for layer in engine.layers for d in (*layer.inputs, *layer.weights, *layer.outputs)} == {"float32"}


@fp16
def test_every_norm_and_the_stream_between_them_are_fp32(engine: _Engine) -> None:
    assert engine.manifest.layers["float16"] > 3 * engine.manifest.layers["float32"] > 0
    norms = engine.nodes("LayerNormalization")
    assert len(norms) == 2 * _BLOCKS + 1
    for node in norms:
        assert {engine.dtypes[name] for name in (*node.input, *node.output)} == {onnx.TensorProto.FLOAT}
        layers = engine.layers_of[node.name]
        assert len(layers) == 1 or node is norms[-1]  # whose two answers are cut out of it
        for layer in layers:
            assert "float32" in layer.inputs
            assert "float32" in layer.weights
            assert "float32" in layer.outputs  # the stream goes on beside the norm
    sums = [node for node in engine.nodes("Add") if re.fullmatch(r"/network/blocks\.\d+/Add(_1)?", node.name)]
    assert len(sums) == 2 * _BLOCKS
    for node in sums:
        assert {engine.dtypes[name] for name in (*node.input, *node.output)} == {onnx.TensorProto.FLOAT}


@fp16
def test_an_attention_is_one_layer_with_its_softmax_in_fp32(engine: _Engine) -> None:
    made_by = {output: node for node in engine.onnx.graph.node for output in node.output}
    softmaxes = engine.nodes("Softmax")
    assert len(softmaxes) == _BLOCKS
    for node in softmaxes:
        assert engine.dtypes[node.input[0]] == onnx.TensorProto.FLOAT
        (layer,) = engine.layers_of[node.name]
        cast = made_by[node.input[0]]
        assert cast.op_type == "Cast"
        assert cast.name in layer.nodes
        assert len([name for name in layer.nodes if name.rpartition("/")[2].startswith("MatMul")]) == 2
        assert layer.inputs == ("float16",) * 3


@fp16
def test_every_matrix_product_is_fp16(engine: _Engine) -> None:
    products = engine.nodes("MatMul", "Gemm")
    assert len(products) == 6 * _BLOCKS  # qkv, two of an attention, its projection, and two of the perceptron
    for node in products:
        for layer in engine.layers_of[node.name]:
            assert {*layer.inputs, *layer.weights, *layer.outputs} == {"float16"}, layer
    (convolution,) = engine.nodes("Conv")
    (layer,) = engine.layers_of[convolution.name]
    assert {*layer.inputs, *layer.weights, *layer.outputs} == {"float32"}


@fp16
def test_queries_and_keys_are_turned_in_fp32(engine: _Engine) -> None:
    turned = [node for node in engine.nodes("Mul") if "/rope_embed" in node.name]
    assert len(turned) == (4 * _BLOCKS if engine.manifest.spec.name.startswith("dinov3") else 0)
    for node in turned:
        assert {engine.dtypes[name] for name in (*node.input, *node.output)} == {onnx.TensorProto.FLOAT}


@pytest.mark.parametrize("engine", [*FP16, *FP32], indirect=True)
def test_sizes_and_warnings(engine: _Engine) -> None:
    """An engine has each weight once, as it is in the ONNX; the compiler has nothing to say about overflows."""
    weights = sum(onnx.numpy_helper.to_array(w).nbytes for w in engine.onnx.graph.initializer)
    size = (engine.folder / "model.engine").stat().st_size
    assert 0.8 * weights < size < 1.2 * weights + (16 << 20)  # with what was folded, and kernels
    said = [line for line in engine.log.splitlines() if "ONNX Layer" not in line]
    assert [line for line in said if "overflow" in line.lower()] == []
