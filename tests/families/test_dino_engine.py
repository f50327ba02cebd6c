"""DINO's graphs as they are written, and the engine that comes of one against eager PyTorch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from seeded_dino import seeded

from visionfast.export import export_onnx
from visionfast.families.dino_modules import VisionTransformer, fp32_islands
from visionfast.families.dino_published import PUBLISHED
from visionfast.types import GraphSpec, Precision, TensorSpec

onnx = pytest.importorskip("onnx", reason="graphs are read with onnx: pip install 'visionfast[build]'")

DEPTH = 2
KINDS = ("dinov2_vits14", "dinov2_vits14_reg", "dinov3_vits16", "dinov3_vits16plus")
FLOAT, HALF = 1, 10  # onnx.TensorProto's


@dataclasses.dataclass(frozen=True)
class Written:
    """An ONNX graph, with the type of every tensor in it."""

    nodes: tuple[Any, ...]
    types: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    weights: frozenset[str]

    def of(self, kind: str) -> list[Any]:
        return [node for node in self.nodes if node.op_type == kind]

    def types_of(self, node: Any) -> set[int]:
        """Of all floating tensors that go in and come out."""
        return {self.types[name] for name in (*node.input, *node.output) if self.types[name] in (FLOAT, HALF)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Precision], Written]:
    """Two blocks of a published size, not at the size that its positions were trained at."""
    folder = tmp_path_factory.mktemp("graphs")
    made: dict[tuple[str, str], Written] = {}

    def make(kind: str, precision: Precision) -> Written:
        if (kind, precision) not in made:
            made[kind, precision] = _written(kind, precision, folder / f"{kind}-{precision}.onnx")
        return made[kind, precision]

    return make


def _written(kind: str, precision: Precision, path: Path) -> Written:
    architecture = next(each for each in PUBLISHED if each.name == kind)
    patch, width = architecture.patch, architecture.width
    network = VisionTransformer(dataclasses.replace(architecture, depth=DEPTH), (3 * patch, 5 * patch)).eval()
    network.load_state_dict(seeded({name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}))
    network.fold()
    graph = GraphSpec(
        "model",
        (TensorSpec("images", (1, 3, 3 * patch, 5 * patch), "float32", "NCHW"),),
        (TensorSpec("cls", (1, width), "float32"), TensorSpec("patches", (1, 3, 5, width), "float32")),
    )
    export_onnx(network, graph, path, precision=precision, keep_fp32=fp32_islands(network))
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, data_prop=True)
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    shapes = {value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim) for value in values}
    constants = [node for node in model.graph.node if node.op_type == "Constant"]
    tensors = {node.output[0]: node.attribute[0].t for node in constants} | {t.name: t for t in model.graph.initializer}
    return Written(
        nodes=tuple(node for node in model.graph.node if node.op_type != "Constant"),
        types=types | {name: tensor.data_type for name, tensor in tensors.items()},
        shapes=shapes | {name: tuple(tensor.dims) for name, tensor in tensors.items()},
        weights=frozenset(tensors),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_nothing_is_left_that_depends_on_the_size_alone(
    written: Callable[[str, Precision], Written], kind: str, precision: Precision
) -> None:
    ops = Counter(node.op_type for node in written(kind, precision).nodes)
    # Of the network, and of what turns and cuts. No Resize, Sin, Cos, Range, Shape, Expand, ConstantOfShape or Where.
    turning = {"Neg"} if kind.startswith("dinov3") else set()
    gelu = {"Sigmoid"} if kind.endswith("plus") else {"Erf", "Div"}
    moving = {"Reshape", "Transpose", "Concat", "Split", "Slice", "Gather", "Cast"}
    assert set(ops) <= {"Conv", "Add", "Mul", "MatMul", "LayerNormalization", "Softmax"} | turning | gelu | moving
    assert ops["LayerNormalization"] == 2 * DEPTH + 1
    assert ops["Softmax"] == DEPTH
    assert ops["MatMul"] == 6 * DEPTH  # four layers, and two products of attention
    assert ops["Conv"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_keeps_the_residual_stream_the_norms_and_the_softmax(
    written: Callable[[str, Precision], Written], kind: str
) -> None:
    graph = written(kind, "fp16")
    stream = (1, (1 if kind == "dinov2_vits14" else 5) + 15, 384)
    for op in ("LayerNormalization", "Softmax", "Conv"):
        assert all(graph.types_of(node) == {FLOAT} for node in graph.of(op)), op
    added = [node for node in graph.of("Add") if not set(node.input) & graph.weights]
    added = [node for node in added if graph.shapes[node.output[0]] == stream]
    assert len(added) == 2 * DEPTH
    assert all(graph.types_of(node) == {FLOAT} for node in added)
    scaled = [node for node in graph.of("Mul") if any(graph.shapes[name] == (384,) for name in node.input)]
    assert len(scaled) == 2 * DEPTH
    assert all(graph.types_of(node) == {FLOAT} for node in scaled)
    assert all(graph.types_of(node) == {HALF} for node in graph.of("MatMul"))
    assert [graph.types[name] for name in ("images", "cls", "patches")] == [HALF, FLOAT, FLOAT]


# ---- the engine -------------------------------------------------------------------------------------------


def cosines(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(…, D) and (…, D) → (…)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.asarray((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1))


@pytest.mark.parametrize(
    ("kind", "size_hw"),
    [
        pytest.param("dinov2_vits14", (224, 224), marks=pytest.mark.slow),  # as the certificates' tests do
        ("dinov2_vits14", (518, 518)),
        ("dinov3_vits16", (224, 224)),
        pytest.param("dinov3_vits16", (224, 336), marks=pytest.mark.slow),
    ],
)
def test_an_openvino_engine_points_where_pytorch_does(
    dino_checkpoint: Callable[[str], Path],
    photographs: list[Path],
    tmp_path: Path,
    kind: str,
    size_hw: tuple[int, int],
) -> None:
    pytest.importorskip("openvino", reason="engines are built with openvino: pip install 'visionfast[openvino]'")
    from visionfast.build_plan import Plan

    plan = Plan.make(dino_checkpoint(kind), (None,), size_hw=size_hw, backend="openvino")
    manifest = plan.compile("cpu", plan.export(tmp_path), tmp_path)
    preprocess = manifest.spec.preprocess
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (preprocess.mean, preprocess.std))
    with plan.backend.load(tmp_path, manifest, manifest.spec.graphs[0]) as runner, torch.no_grad():
        for photograph in photographs:
            pixels = np.asarray(Image.open(photograph).convert("RGB").resize(size_hw[::-1]))  # (h, w, 3) u8
            found = runner.infer({"images": pixels[None]})
            planes = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255
            cls, patches = plan.model.modules["model"]((planes - mean) / std)
            assert found["patches"].shape == tuple(patches.shape)
            assert cosines(found["cls"], cls.numpy()).min() >= 0.9999
            assert cosines(found["patches"], patches.numpy()).min() >= 0.9999
            # The vectors are not all one, of which any two would agree.
            flat = patches.numpy().reshape(-1, 384)
            assert cosines(flat[:1], flat).min() < 0.9
