"""Segment Anything in FP16 with TensorRT-RTX, built ahead of time, and what its build log says of the engines.

LayerNorm and softmax are FP32, the decoder's prompts too; every convolution and matrix product is FP16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
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
from visionfast.types import EngineManifest

pytestmark = pytest.mark.skipif(
    not get_backend("tensorrt-rtx").availability().can_build,
    reason="TensorRT-RTX is not installed: pip install 'visionfast[tensorrt-rtx]'",
)

KINDS = (
    "mobile_sam",
    pytest.param("sam2.1_hiera_tiny", marks=pytest.mark.slow),
    pytest.param("sam_vit_b", marks=pytest.mark.slow),  # a minute, once
)
_PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum")


@dataclasses.dataclass(frozen=True)
class _Engine:
    folder: Path
    manifest: EngineManifest
    graphs: dict[str, RtxGraph]


@pytest.fixture(scope="module")
def engines(
    sam_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], _Engine]]:
    """Built as `visionfast build` does, looking on: the ONNX are kept, and the log that the layers are read from."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)

    @functools.cache
    def make(kind: str) -> _Engine:
        home = tmp_path_factory.mktemp(kind)
        onnx_folder = home / "onnx"
        logs: list[str] = []

        def export(plan: Plan, folder: Path, *more: Any) -> Any:
            onnx_folder.mkdir()
            return exported(plan, onnx_folder, *more)

        def parse(log: str) -> Any:
            logs.append(log)
            return parse_layers(log)

        exported = Plan.export
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VISIONFAST_HOME", str(home))
            patch.setattr(Plan, "export", export)
            patch.setattr(tensorrt, "parse_layers", parse)
            folder, manifest = build(sam_checkpoint(kind), backend="tensorrt-rtx", gpu="sm89")
        graphs = {
            spec.name: RtxGraph(spec, onnx.load(onnx_folder / f"{spec.name}.onnx"), log)
            for spec, log in zip(manifest.spec.graphs, logs, strict=True)
        }
        return _Engine(folder, manifest, graphs)

    yield make
    torch.set_num_threads(threads)


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, engines: Callable[[str], _Engine]) -> _Engine:
    return engines(request.param)


def test_two_engines_that_fit_together(engine: _Engine) -> None:
    manifest = artifacts.read_manifest(engine.folder, verify=True)
    assert manifest == engine.manifest
    assert manifest.files == {"encoder": "encoder.engine", "decoder": "decoder.engine"}
    encoder, decoder = manifest.spec.graphs
    assert encoder.inputs[0].dtype == "float16"
    # What the encoder gives, the decoder takes: the same names, shapes and dtypes, so nothing is cast between them.
    assert decoder.inputs[: len(encoder.outputs)] == encoder.outputs
    prompts = decoder.inputs[len(encoder.outputs) :]
    assert {spec.name: spec.dtype for spec in prompts} == dict.fromkeys(
        ("points", "labels", "mask_input", "has_mask"), "float32"
    )
    assert {"encoder", "decoder"} == {path.partition(".")[0] for path in manifest.keep_fp32}
    assert "decoder.embed" in manifest.keep_fp32
    assert manifest.layers["float16"] > 3 * manifest.layers["float32"] > 0


def test_their_tensors_are_those_of_the_manifest(engine: _Engine) -> None:
    for graph in engine.graphs.values():
        found = parse_io_tensors(graph.log)
        for specs, tensors in zip((graph.spec.inputs, graph.spec.outputs), found, strict=True):
            expected = {(s.name, s.sized(dict.fromkeys(s.axes, -1)), s.dtype) for s in specs}
            assert {(t.name, t.shape, t.dtype) for t in tensors} == expected


def test_every_layer_norm_is_fp32(engine: _Engine) -> None:
    """In the ONNX, where it is one op or SAM's own sums over channels; and in the layers, by their weights."""
    for graph in engine.graphs.values():
        norms = graph.nodes("LayerNormalization")
        assert len(norms) > 8
        for node in (*norms, *graph.nodes("ReduceMean", "Pow", "Sqrt")):
            taken = {graph.dtypes[name] for name in node.input if name in graph.dtypes}
            assert taken <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}, node.name
        for node in norms:
            layers = graph.layers_of[node.name]
            assert any("float32" in layer.weights for layer in layers), node.name
            handed_on = {dtype for layer in layers[:-1] for dtype in layer.outputs}
            assert len(layers) == 1 or "float32" in handed_on, node.name


def test_every_softmax_is_fp32(engine: _Engine) -> None:
    """Its casts are in its own layers: one for a whole attention, or two, the first of which hands on FP32."""
    fused = 0
    for graph in engine.graphs.values():
        made_by = {output: node for node in graph.onnx.graph.node for output in node.output}
        softmaxes = graph.nodes("Softmax")
        assert len(softmaxes) >= 7
        for node in softmaxes:
            assert graph.dtypes[node.input[0]] == onnx.TensorProto.FLOAT, node.name
            first, *rest = graph.layers_of[node.name]
            cast = made_by[node.input[0]]
            assert cast.op_type == "Cast"
            assert cast.name in first.nodes
            assert not rest or set(first.outputs) == {"float32"}, first
            fused += len([n for n in first.nodes if n.rpartition("/")[2].startswith("MatMul")]) == 2
    assert fused >= 7, "the casts do not keep the compiler from fusing an attention"


def test_every_convolution_and_matrix_product_is_fp16(engine: _Engine) -> None:
    """But for the prompts' own, in the decoder: coordinates, and the mask that is brought in."""
    for name, graph in engine.graphs.items():
        nodes = [node for node in graph.nodes(*_PRODUCTS) if "/embed/" not in node.name]
        assert len(nodes) > 60
        for node in nodes:
            for layer in graph.layers_of[node.name]:
                assert {*layer.inputs, *layer.weights} == {"float16"}, layer
        outputs = Counter(d for node in nodes for layer in graph.layers_of[node.name] for d in layer.outputs)
        assert set(outputs) <= {"float16", "float32"}
        assert outputs["float32"] <= 1, "a product that goes straight into a LayerNorm may hand on its sums"
        inside = [node for node in graph.nodes(*_PRODUCTS) if "/embed/" in node.name]
        assert len(inside) == (4 if name == "decoder" else 0)
        for node in inside:
            for layer in graph.layers_of.get(node.name, []):
                assert "float16" not in {*layer.inputs, *layer.weights} or layer.kind == "kgen", layer


def test_sizes_and_warnings(engine: _Engine) -> None:
    """An engine has each weight once, as it is in the ONNX; the compiler has nothing to say about overflows."""
    for name, graph in engine.graphs.items():
        weights = sum(onnx.numpy_helper.to_array(w).nbytes for w in graph.onnx.graph.initializer)
        size = (engine.folder / engine.manifest.files[name]).stat().st_size
        assert 0.8 * weights < size < 1.2 * weights + (16 << 20)  # with what was folded, and kernels
        said = [line for line in graph.log.splitlines() if "ONNX Layer" not in line]
        assert [line for line in said if "overflow" in line.lower()] == []
