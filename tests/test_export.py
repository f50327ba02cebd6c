"""ONNX: the same bytes for the same weights, with shapes, axes and precision written into the graph."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from small_prompts import DECODER, prompt_feeds, small_prompt_segmenter
from torch import nn

from visionfast.checkpoint import open_checkpoint
from visionfast.errors import ArtifactError, BuildError, OptionError
from visionfast.export import example_inputs, export_onnx, half_precision
from visionfast.families import LoadedModel, identify
from visionfast.types import GraphSpec, TensorSpec


def load(path: Path, size_hw: tuple[int, int]) -> LoadedModel:
    checkpoint = open_checkpoint(path)
    return identify(checkpoint).load(checkpoint, name="m", size_hw=size_hw)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def segment_pt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ultralytics.nn.tasks import SegmentationModel

    torch.manual_seed(0)
    model = SegmentationModel("yolov8n-seg.yaml", nc=2, verbose=False)
    path = tmp_path_factory.mktemp("weights") / "a.pt"
    torch.save({"model": model.half()}, path)
    return path


@pytest.fixture(scope="module")
def segment(segment_pt: Path) -> LoadedModel:
    return load(segment_pt, (64, 96))


def export(loaded: LoadedModel, path: Path, precision: Any, keep: tuple[str, ...] | None = None) -> GraphSpec:
    graph = loaded.spec.graphs[0]
    islands = loaded.fp32_islands[graph.name] if keep is None else keep
    return export_onnx(loaded.modules[graph.name], graph, path, precision=precision, keep_fp32=islands)


def value_types(path: Path) -> dict[str, int]:
    model = onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True, strict_mode=True, data_prop=True)
    values = (*model.graph.value_info, *model.graph.input, *model.graph.output)
    return {
        **{v.name: v.type.tensor_type.elem_type for v in values},
        **{w.name: w.data_type for w in model.graph.initializer},
    }


def openvino_outputs(path: Path, images: np.ndarray) -> list[np.ndarray]:
    import openvino as ov

    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 2})
    found = compiled.create_infer_request().infer([images])
    return [np.array(found[i]) for i in range(len(compiled.outputs))]


# ---- what is written --------------------------------------------------------------------------------------


def test_fp32(segment: LoadedModel, tmp_path: Path) -> None:
    written = export(segment, tmp_path / "a.onnx", "fp32")
    assert written == segment.spec.graphs[0]
    model = onnx.load(tmp_path / "a.onnx")
    assert model.opset_import[0].version == 17
    assert [i.name for i in model.graph.input] == ["images"]
    assert [o.name for o in model.graph.output] == ["predictions", "prototypes"]
    assert {w.data_type for w in model.graph.initializer} == {TensorProto.FLOAT}
    assert not any(node.op_type == "Cast" for node in model.graph.node)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx"]


def test_fp16_keeps_the_box_decode_in_fp32(segment: LoadedModel, tmp_path: Path) -> None:
    written = export(segment, tmp_path / "a.onnx", "fp16")
    dtypes = {t.name: t.dtype for t in (*written.inputs, *written.outputs)}
    assert dtypes == {"images": "float16", "predictions": "float32", "prototypes": "float16"}
    model, types = onnx.load(tmp_path / "a.onnx"), value_types(tmp_path / "a.onnx")
    inside = [n for n in model.graph.node if "/decode/" in n.name and n.op_type not in ("Constant", "Shape")]
    floating = (TensorProto.FLOAT, TensorProto.FLOAT16)
    computed = [types[o] for n in inside for o in n.output if types[o] in floating]
    assert len(computed) > 8
    assert set(computed) == {TensorProto.FLOAT}
    assert {"Softmax", "Sigmoid", "Mul", "Sub", "Concat"} <= {n.op_type for n in inside}
    outside = [n for n in model.graph.node if n.op_type in ("Conv", "ConvTranspose") and "/decode/" not in n.name]
    assert len(outside) > 60
    assert {types[w] for n in outside for w in n.input} == {TensorProto.FLOAT16}
    # Three tensors go up (distances, scores, coefficients), and none comes down again.
    casts = [helper.get_attribute_value(n.attribute[0]) for n in model.graph.node if n.op_type == "Cast"]
    assert casts == [TensorProto.FLOAT] * 3


def test_fp16_without_islands_is_fp16_but_for_the_softmax(segment: LoadedModel, tmp_path: Path) -> None:
    written = export(segment, tmp_path / "a.onnx", "fp16", keep=())
    assert {t.dtype for t in written.outputs} == {"float16"}
    model, types = onnx.load(tmp_path / "a.onnx"), value_types(tmp_path / "a.onnx")
    scales = {node.input[2] for node in model.graph.node if node.op_type == "Resize"}  # FP32 by ONNX's rule
    (softmax,) = (node for node in model.graph.node if node.op_type == "Softmax")
    computed = {*softmax.input, *softmax.output}
    assert {name for name, dtype in types.items() if dtype == TensorProto.FLOAT} == scales | computed


def test_more_modules_can_be_kept(segment: LoadedModel, tmp_path: Path) -> None:
    """A list of modules is never called itself; a prefix ends at a dot, so block 2 is not block 20."""
    export(segment, tmp_path / "a.onnx", "fp16", keep=("decode", "blocks.2", "blocks.2.cv1", "blocks.22.cv3"))
    kept = {w.name for w in onnx.load(tmp_path / "a.onnx").graph.initializer if w.data_type == TensorProto.FLOAT}
    assert kept
    assert {".".join(n.split(".")[1:4]) for n in kept if n.startswith("network.blocks.22")} == {"blocks.22.cv3"}
    assert {n.split(".")[2] for n in kept if n.startswith("network.")} == {"2", "22"}


def test_unknown_module_to_keep(segment: LoadedModel, tmp_path: Path) -> None:
    for path, near in (
        ("blocks.99", r"blocks\.0, "),
        ("blocks.4.nowhere", r"blocks\.4\.cv1, "),
        ("a.b", "blocks, decode"),
    ):
        with pytest.raises(OptionError, match=f"there is no module '{path}'; expected a path such as {near}"):
            export(segment, tmp_path / "a.onnx", "fp16", keep=(path,))
    assert not list(tmp_path.iterdir())


def test_bf16_writes_the_fp32_graph(segment: LoadedModel, tmp_path: Path) -> None:
    export(segment, tmp_path / "a.onnx", "fp32")
    export(segment, tmp_path / "b.onnx", "bf16")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_the_callers_module_is_not_changed(segment: LoadedModel, tmp_path: Path) -> None:
    module = segment.modules["model"]
    before = {name: tensor.clone() for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    images = torch.rand(1, 3, 64, 96)
    with torch.no_grad():
        expected = module(images)
        export(segment, tmp_path / "a.onnx", "fp16")
        again = module(images)
    after = dict((*module.named_parameters(), *module.named_buffers()))
    assert all(after[n].dtype == t.dtype and torch.equal(after[n], t) for n, t in before.items())
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def test_half_precision_of_nested_outputs_and_shared_results() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.rest = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            island = self.kept(self.rest(x))
            return {"full": island, "list": [self.rest(island), island]}

    original = Twice()
    out = half_precision(original, ["kept"])(torch.rand(1, 2).half())
    assert out["full"].dtype == out["list"][1].dtype == torch.float32
    assert out["list"][0].dtype == torch.float16
    assert original.rest.weight.dtype == torch.float32


def test_between_neighbours_that_are_kept_values_stay_fp32() -> None:
    """A million does not fit into float16: it passes from one layer to the next where both are kept, and only there."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.after = (nn.Conv2d(1, 1, 1, bias=False) for _ in range(3))
            self.shared = nn.ReLU()
            for layer, scale in ((self.up, 1e3), (self.down, 1e-3), (self.after, 1.0)):
                nn.init.constant_(layer.weight, scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.shared(self.down(self.shared(self.up(x))))
            return self.after(torch.cat([y, x + y], 2))

    given = torch.full((1, 1, 1, 1), 1000.0).half()
    with torch.no_grad():
        for keep in ([], ["up"], ["down"], ["after"]):
            assert half_precision(Scaled(), keep)(given).isinf().any()
        out = half_precision(Scaled(), ["up", "down"])(given)
    assert out.flatten().tolist() == pytest.approx([1000, 2000], rel=1e-3)
    assert out.dtype == torch.float16  # the last layer took its input down again


@pytest.mark.parametrize("keep", ["blocks", "blocks.22", "blocks.22.cv3", "blocks.4.m.0.cv2", "blocks.10", ""])
def test_whatever_is_kept_can_be_exported(segment: LoadedModel, tmp_path: Path, keep: str) -> None:
    """Also a part that is never called itself, such as the head: what is in it is."""
    export(segment, tmp_path / "a.onnx", "fp16", keep=("decode", keep))
    kept = {w.name for w in onnx.load(tmp_path / "a.onnx").graph.initializer if w.data_type == TensorProto.FLOAT}
    inside = [n for n, t in segment.modules["model"].named_parameters() if n.startswith(f"{keep}.") or not keep]
    assert bool(inside) == any(name.startswith("network.blocks") for name in kept)


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2).eval()
    with torch.no_grad():
        layer.weight[0, 0] = 1e5
    graph = GraphSpec("g", (TensorSpec("x", (1, 2), "float32"),), (TensorSpec("y", (1, 2), "float32"),))
    with pytest.raises(BuildError, match=r"1e\+05, beyond float16"):
        export_onnx(layer, graph, tmp_path / "a.onnx", precision="fp16")
    assert not list(tmp_path.iterdir())


# ---- axes that vary ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_axes_are_named_sides(tmp_path: Path, precision: Any) -> None:
    model = small_prompt_segmenter()
    keep, inputs = model.fp32_islands["decoder"], model.fp32_inputs["decoder"]
    path = tmp_path / "a.onnx"
    module = model.modules["decoder"]
    written = export_onnx(module, DECODER, path, precision=precision, keep_fp32=keep, fp32_inputs=inputs)
    graph = onnx.load(path).graph
    for spec, value in zip((*DECODER.inputs, *DECODER.outputs), (*graph.input, *graph.output), strict=True):
        sides = [side.dim_param or side.dim_value for side in value.type.tensor_type.shape.dim]
        axes = spec.axes or ("",) * len(spec.shape)
        assert (value.name, sides) == (spec.name, [axis or most for axis, most in zip(axes, spec.shape, strict=True)])
    dtypes = {spec.name: spec.dtype for spec in written.inputs}
    half = "float16" if precision == "fp16" else "float32"
    assert dtypes == {"image_embeddings": half, "high_res": half} | dict.fromkeys(inputs, "float32")
    assert [spec.shape for spec in written.inputs] == [spec.shape for spec in DECODER.inputs]
    assert written.usual == DECODER.usual
    before = path.read_bytes()
    export_onnx(module, DECODER, path, precision=precision, keep_fp32=keep, fp32_inputs=inputs)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("prompts", "points"), [(1, 1), (1, 2), (2, 1), (2, 3), (5, 6)])
def test_every_size_of_an_axis_is_answered(tmp_path: Path, prompts: int, points: int) -> None:
    """In one dynamic model, which has nothing of the sizes in it that it was traced with."""
    import openvino as ov

    module = small_prompt_segmenter().modules["decoder"]
    export_onnx(module, DECODER, tmp_path / "a.onnx", precision="fp32")
    feeds = prompt_feeds(prompts, points)
    with torch.no_grad():
        expected = module(*(torch.from_numpy(array) for array in feeds.values()))
    compiled = ov.Core().compile_model(tmp_path / "a.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled.create_infer_request().infer(feeds)
    for got, want in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(got, want.numpy(), atol=1e-5)


class Frozen(nn.Module):
    """Writes the size that it is traced with into its graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(int(x.shape[0]), 2, 2) * 2


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0, keepdim=True)


@pytest.mark.parametrize(("module", "got"), [(Frozen(), r"\(2, 2, 2\)"), (Summed(), r"\(1, 4\)")])
def test_an_axis_that_does_not_vary(tmp_path: Path, module: nn.Module, got: str) -> None:
    rank = 3 if isinstance(module, Frozen) else 2
    axes = ("many", *("",) * (rank - 1))
    outputs = (TensorSpec("y", (8, 2, 2) if rank == 3 else (8, 4), "float32", axes=axes),)
    graph = GraphSpec("g", (TensorSpec("x", (8, 4), "float32", axes=("many", "")),), outputs, {"many": 1})
    with pytest.raises(BuildError, match=rf"g: expected the output y \(many 1\.\.8, .*\), got y {got}"):
        export_onnx(module.eval(), graph, tmp_path / "a.onnx", precision="fp32")
    assert not list(tmp_path.iterdir())


def test_examples_have_no_two_axes_of_one_size() -> None:
    shapes = [tuple(tensor.shape) for tensor in example_inputs(DECODER)]
    assert shapes == [(1, 16, 8, 8), (1, 4, 16, 16), (2, 3, 2), (2, 3), (2,)]


# ---- the same answers -------------------------------------------------------------------------------------


def test_openvino_runs_both(segment: LoadedModel, tmp_path: Path) -> None:
    images = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = [t.numpy() for t in segment.modules["model"](images)]
    for precision, tolerance in (("fp32", 1e-3), ("fp16", 0.5)):
        export(segment, tmp_path / "a.onnx", precision)
        dtype = np.float16 if precision == "fp16" else np.float32
        found = openvino_outputs(tmp_path / "a.onnx", images.numpy().astype(dtype))
        for f, e in zip(found, expected, strict=True):
            assert f.shape == e.shape
            assert float(np.abs(f.astype(np.float32) - e).max()) < tolerance


def test_real_weights_in_openvino(shared_data: Path, photographs: list[Path], tmp_path: Path) -> None:
    import cv2

    picture = cv2.resize(cv2.imread(str(photographs[0])), (320, 320))[..., ::-1]
    images = np.ascontiguousarray(picture.transpose(2, 0, 1)[None], dtype=np.float32) / 255
    loaded = load(shared_data / "weights" / "yolov8n-coco.pt", (320, 320))
    export(loaded, tmp_path / "a.onnx", "fp32")
    with torch.no_grad():
        expected = loaded.modules["model"](torch.from_numpy(images)).numpy()
    (found,) = openvino_outputs(tmp_path / "a.onnx", images)
    assert float(np.abs(found - expected).max()) < 1e-3


# ---- the same bytes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_same_bytes_in_every_process(segment_pt: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from visionfast.checkpoint import open_checkpoint; from visionfast.families import identify\n"
        "from visionfast.export import export_onnx\n"
        "c = open_checkpoint(sys.argv[1]); m = identify(c).load(c, name=sys.argv[2], size_hw=(64, 64))\n"
        "for p in ('fp32', 'fp16'):\n"
        "    export_onnx(m.modules['model'], m.spec.graphs[0], Path(sys.argv[2]) / (p + '.onnx'), precision=p,"
        " keep_fp32=m.fp32_islands['model'])"
    )
    folders = [tmp_path / "one", tmp_path / "another"]
    for seed, folder in enumerate(folders):
        done = subprocess.run(
            [sys.executable, "-W", "error::UserWarning", "-c", code, str(segment_pt), str(folder)],
            env={"PYTHONHASHSEED": str(seed + 1), "PATH": "", "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for name in ("fp32.onnx", "fp16.onnx"):
        content = (folders[0] / name).read_bytes()
        assert content == (folders[1] / name).read_bytes()
        assert str(Path.cwd()).encode() not in content
        assert b"site-packages" not in content


# ---- nothing half-written ---------------------------------------------------------------------------------


class Unexportable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.pinv(x)


class Interrupted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


@pytest.fixture
def small_graph() -> GraphSpec:
    return GraphSpec("g", (TensorSpec("x", (2, 2), "float32"),), (TensorSpec("y", (2, 2), "float32"),))


@pytest.mark.parametrize(("module", "error"), [(Unexportable(), BuildError), (Interrupted(), KeyboardInterrupt)])
def test_on_an_error_the_old_file_stays(
    small_graph: GraphSpec, tmp_path: Path, module: nn.Module, error: type[BaseException]
) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(b"before")
    with pytest.raises(error) as raised:
        export_onnx(module.eval(), small_graph, path, precision="fp32")
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_outputs_that_are_not_as_declared(small_graph: GraphSpec, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"expected the output y \(2, 2\), got y \(2, 3\)"):
        export_onnx(nn.Linear(2, 3).eval(), small_graph, tmp_path / "a.onnx", precision="fp32")


def test_where_nothing_can_be_written(small_graph: GraphSpec, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArtifactError):
        export_onnx(nn.Linear(2, 2).eval(), small_graph, tmp_path / "file" / "a.onnx", precision="fp32")
