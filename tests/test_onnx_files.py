"""Models too large for one protobuf: their weights stand beside them, and nothing else is different."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from small_prompts import small_prompt_segmenter
from torch import nn

from visionfast import artifacts, export
from visionfast.backends import get_backend
from visionfast.build_plan import Plan
from visionfast.errors import ArtifactError, BuildError, OptionError
from visionfast.export import export_onnx
from visionfast.onnx_files import gather_weights, sha256_onnx, weights_file
from visionfast.types import GraphSpec, Precision, TensorSpec


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is a large one."""
    monkeypatch.setattr(export, "_MOST_INLINE_BYTES", 0)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 32, 4, 4)
        self.norm = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 40)
        self.tiny = nn.Linear(40, 2)  # too small to be moved

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.conv(images).flatten(2).transpose(1, 2)
        found: torch.Tensor = self.tiny(self.linear(self.norm(tokens)).relu()).reshape(-1, 2, 4, 2)
        return found


GRAPH = GraphSpec(
    "model", (TensorSpec("images", (1, 3, 8, 16), "float32", "NCHW"),), (TensorSpec("found", (1, 2, 4, 2), "float32"),)
)
EMPTY = GraphSpec("model", (TensorSpec("x", (1, 8), "float32"),), (TensorSpec("y", (1, 8), "float32"),))


def _exported(path: Path, precision: Precision = "fp32", keep: tuple[str, ...] = ("norm",)) -> Path:
    export_onnx(Network().eval(), GRAPH, path, precision=precision, keep_fp32=keep if precision == "fp16" else ())
    return path


def _weights(path: Path) -> dict[str, np.ndarray]:
    return {w.name: numpy_helper.to_array(w) for w in onnx.load(path).graph.initializer}


def _answer(path: Path) -> np.ndarray:
    import openvino as ov

    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    dtype = np.float16 if "16" in compiled.inputs[0].element_type.get_type_name() else np.float32
    images = np.random.default_rng(0).normal(size=(1, 3, 8, 16)).astype(dtype)
    return np.array(compiled.create_infer_request().infer([images])[0])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_same_model_in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    whole = _exported(tmp_path / "whole.onnx", precision)
    monkeypatch.setattr(export, "_MOST_INLINE_BYTES", 0)
    path = _exported(tmp_path / "two" / "model.onnx", precision)
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert weights_file(path) == path.parent / "model.onnx.data"
    expected, got = _weights(whole), _weights(path)
    assert list(got) == list(expected)
    assert all(np.array_equal(got[n], expected[n]) and got[n].dtype == expected[n].dtype for n in expected)
    light = onnx.load(path, load_external_data=False)
    moved = [w for w in light.graph.initializer if w.data_location == TensorProto.EXTERNAL]
    assert {e.value for w in moved for e in w.external_data if e.key == "location"} == {"model.onnx.data"}
    assert len(moved) >= 2
    assert path.stat().st_size < 6000
    for weight in light.graph.initializer:
        assert (weight.data_location == TensorProto.EXTERNAL) == (got[weight.name].nbytes >= 1024)
    offsets = [int(e.value) for w in moved for e in w.external_data if e.key == "offset"]
    assert offsets == sorted(offsets)
    assert all(offset % 4096 == 0 for offset in offsets)
    onnx.checker.check_model(path, full_check=True)
    assert np.array_equal(_answer(path), _answer(whole))


def test_the_same_bytes_each_time(tmp_path: Path, large: None) -> None:
    first, second = (_exported(tmp_path / name / "model.onnx", "fp16") for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert weights_file(first).read_bytes() == weights_file(second).read_bytes()
    assert sha256_onnx(first) == sha256_onnx(second)


def test_the_hash_covers_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _exported(tmp_path / "whole.onnx")
    assert sha256_onnx(whole) == artifacts.sha256_file(whole)
    monkeypatch.setattr(export, "_MOST_INLINE_BYTES", 0)
    path = _exported(tmp_path / "two" / "model.onnx")
    seen = {sha256_onnx(path), artifacts.sha256_file(path)}
    for file in (path, weights_file(path)):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        seen.add(sha256_onnx(path))
        file.write_bytes(content)
    assert len(seen) == 4
    assert sha256_onnx(path) in seen


def test_a_model_that_has_become_small_leaves_no_weights_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    with monkeypatch.context() as patch:
        patch.setattr(export, "_MOST_INLINE_BYTES", 0)
        _exported(path)
        _exported(path)  # over itself
    assert weights_file(path).is_file()
    _exported(path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def _own(graph: Any) -> list[Any]:
    """The tensors of a Constant, and of what is inside the two branches of an If behind it."""
    constant, branching = graph.node
    branches = [attribute.g for attribute in branching.attribute]
    return [constant.attribute[0].t, *(t for b in branches for t in (b.node[0].attribute[0].t, *b.initializer))]


def test_what_the_exporter_wrote_as_a_file_a_tensor(tmp_path: Path) -> None:
    """As PyTorch's does beyond 2 GiB: small ones too, and what is a node's own, at whatever depth."""
    values = {
        "a": np.arange(600, dtype=np.float32),
        "shape": np.array([2, -1], np.int64),
        "b/c": np.arange(3000, dtype=np.float16),
        "empty": np.zeros(0, np.float32),
    }
    constants = [numpy_helper.from_array(np.arange(n, dtype=np.int64), f"c{n}") for n in (3, 500, 4)]
    deep = helper.make_node("Constant", [], ["d"], value=constants[1])
    inner = helper.make_graph([deep], "inner", [], [], [constants[2]])
    nodes = [
        helper.make_node("Constant", [], ["c"], value=constants[0]),
        helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner),
    ]
    graph = helper.make_graph(nodes, "g", [], [], [numpy_helper.from_array(v, n) for n, v in values.items()])
    expected = [numpy_helper.to_array(tensor) for tensor in _own(graph)]
    assert len(expected) == 5
    (tmp_path / "traced").mkdir()
    for number, tensor in enumerate([*graph.initializer, *_own(graph)]):
        content = tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        entries = {"location": f"weight{number}"}
        if tensor.name == "a":  # some exporters say where in the file, and how much of it
            content = b"before" + content + b"behind"
            entries |= {"offset": "6", "length": "2400"}
        (tmp_path / "traced" / f"weight{number}").write_bytes(content)
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
    model = helper.make_model(graph)
    gather_weights(model, tmp_path / "traced", tmp_path / "m.onnx.data")
    shutil.rmtree(tmp_path / "traced")
    onnx.save(model, tmp_path / "m.onnx")
    got = _weights(tmp_path / "m.onnx")
    assert list(got) == list(values)
    assert all(np.array_equal(got[n], v) and got[n].dtype == v.dtype for n, v in values.items())
    assert weights_file(tmp_path / "m.onnx").stat().st_size == 4096 + 6000
    assert {w.name for w in model.graph.initializer if w.data_location == TensorProto.EXTERNAL} == {"a", "b/c"}
    own = _own(model.graph)
    assert not any(tensor.data_location == TensorProto.EXTERNAL for tensor in own)
    assert all(np.array_equal(numpy_helper.to_array(t), e) for t, e in zip(own, expected, strict=True))


# ---- what goes wrong --------------------------------------------------------------------------------------


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x)
        return found


def test_nothing_is_left_of_what_failed(tmp_path: Path, large: None) -> None:
    with pytest.raises(BuildError, match=r"expected the output y \(1, 8\), got y \(1, 9\)"):
        export_onnx(Wrong().eval(), EMPTY, tmp_path / "m.onnx", precision="fp32")
    with pytest.raises(OptionError, match="there is no module 'b'"):
        export_onnx(Wrong().eval(), EMPTY, tmp_path / "m.onnx", precision="fp16", keep_fp32=["b"])
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_stays_when_it_fails(tmp_path: Path, large: None) -> None:
    path = _exported(tmp_path / "m.onnx")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(BuildError):
        export_onnx(Wrong().eval(), EMPTY, path, precision="fp32")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_disk_that_is_too_small_is_told_before(tmp_path: Path, large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        ArtifactError, match=r"GB of free disk for a model of this size, got 0\.0 GB; make room"
    ) as caught:
        _exported(tmp_path / "m.onnx")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be(tmp_path: Path, large: None) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        _exported(tmp_path / "file" / "m.onnx")


# ---- compiled ---------------------------------------------------------------------------------------------


def _plan(backend: str, precision: Precision, device: str) -> Plan:
    chosen = get_backend(backend)
    version, model = chosen.availability().version, small_prompt_segmenter()
    return Plan(chosen, version, (device,), model, "0" * 64, precision, (), (), 0, lambda stage: None)


@pytest.mark.parametrize(
    ("backend", "precision", "device"),
    [
        ("openvino", "fp32", "cpu"),
        pytest.param(
            *("tensorrt-rtx", "fp16", "sm89"),
            marks=pytest.mark.skipif(
                not get_backend("tensorrt-rtx").availability().can_build,
                reason="TensorRT-RTX is not installed: pip install 'visionfast[tensorrt-rtx]'",
            ),
        ),
    ],
)
def test_an_engine_of_two_files_is_the_engine_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, precision: Precision, device: str
) -> None:
    plan = _plan(backend, precision, device)
    built: list[Any] = []
    for name, most in (("one", 1 << 30), ("two", 0)):
        monkeypatch.setattr(export, "_MOST_INLINE_BYTES", most)
        (tmp_path / name / "engine").mkdir(parents=True)
        exported = plan.export(tmp_path / name / "onnx")
        assert all(weights_file(item.path).exists() == (name == "two") for item in exported)
        manifest = plan.compile(device, exported, tmp_path / name / "engine")
        assert manifest.onnx_sha256 == {item.graph.name: sha256_onnx(item.path) for item in exported}
        shutil.rmtree(tmp_path / name / "onnx")  # an engine needs nothing of what it was made from
        assert artifacts.read_manifest(tmp_path / name / "engine", verify=True) == manifest
        built.append(manifest)
    one, two = built
    assert one.onnx_sha256["encoder"] != two.onnx_sha256["encoder"]
    for name in one.sha256:
        if name.endswith(".bin"):  # TensorRT's own bytes differ from build to build
            assert one.sha256[name] == two.sha256[name]
    assert dataclasses.replace(one, created="", onnx_sha256={}, sha256={}) == dataclasses.replace(
        two, created="", onnx_sha256={}, sha256={}
    )
