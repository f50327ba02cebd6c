"""Graphs whose axes vary, in every runtime: any allowed size is answered as eager PyTorch does, others are refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording import RecordingDevice
from small_prompts import DECODER, prompt_feeds, small_prompt_segmenter

from visionfast.backends import CompileRequest, check_bound, check_feeds, get_backend
from visionfast.backends.device_runner import DeviceRunner
from visionfast.backends.fake import FakeRunner
from visionfast.backends.openvino import OpenVinoRunner
from visionfast.backends.torch import TorchEngine, TorchRunner
from visionfast.errors import BackendError, ShapeError
from visionfast.export import export_onnx, half_precision
from visionfast.types import EngineManifest, GraphSpec

SIZES = [(1, 1), (1, 2), (2, 1), (3, 2), (5, 6), (1, 6), (5, 1)]


def _expected(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    module = small_prompt_segmenter().modules["decoder"]
    with torch.no_grad():
        outputs = module(*(torch.from_numpy(feeds[spec.name]) for spec in DECODER.inputs))
    return {spec.name: output.numpy() for spec, output in zip(DECODER.outputs, outputs, strict=True)}


def _agree(got: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> None:
    for name, want in _expected(feeds).items():
        np.testing.assert_allclose(got[name], want, atol=1e-5, err_msg=name)


def _compile(backend: str, folder: Path, **changed: Any) -> GraphSpec:
    model = small_prompt_segmenter()
    module = model.modules["decoder"]
    path = folder / "decoder.onnx"
    written = export_onnx(module, DECODER, path, precision="fp32")
    fields = {
        "graph": written,
        "onnx_path": path,
        "module": module,
        "preprocess": model.spec.preprocess,
        "precision": "fp32",
        "keep_fp32": (),
        "device": "cpu",
        "folder": folder,
    }
    return get_backend(backend).compile(CompileRequest(**fields | changed)).graph


# ---- OpenVINO ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine's folder; its cache is shared by the tests, as by an engine's users."""
    pytest.importorskip("openvino", reason="openvino is not installed: pip install 'visionfast[openvino]'")
    folder = tmp_path_factory.mktemp("openvino")
    assert _compile("openvino", folder) == DECODER
    return folder


@pytest.fixture
def runner(compiled: Path) -> Iterator[OpenVinoRunner]:
    with OpenVinoRunner(compiled / "decoder.xml", DECODER, "fp32", threads=1) as opened:
        yield opened


def _shapes(runner: OpenVinoRunner) -> list[dict[str, int]]:
    """That have a request of their own."""
    return [dict(sizes) for sizes in runner._requests]


def test_the_usual_shape_is_there_when_it_is_opened(runner: OpenVinoRunner) -> None:
    assert _shapes(runner) == [{"prompts": 1, "points": 2}]
    feeds = prompt_feeds(1, 2)
    _agree(runner.infer(feeds), feeds)
    assert len(_shapes(runner)) == 1


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=10), seed=st.integers(0, 9))
def test_sizes_in_any_order(runner: OpenVinoRunner, sizes: list[tuple[int, int]], seed: int) -> None:
    """One kept model is given one shape after the other, and goes back to earlier ones."""
    for prompts, points in sizes:
        feeds = prompt_feeds(prompts, points, seed=seed)
        _agree(runner.infer(feeds, copy=False), feeds)
    assert len(_shapes(runner)) <= 8


def test_what_is_asked_for_often_has_a_shape_of_its_own(runner: OpenVinoRunner) -> None:
    feeds = prompt_feeds(1, 3)
    answers = []
    for own in (False, False, True, True):
        answers.append(runner.infer(feeds))
        assert ({"prompts": 1, "points": 3} in _shapes(runner)) == own
    for answer in answers:
        _agree(answer, feeds)


def test_many_shapes_in_turns_do_not_put_each_other_out(runner: OpenVinoRunner) -> None:
    """A click more at a time, on one picture after the other: what is compiled stays."""
    kept = []
    for _ in range(8):
        for points in (1, 3, 4, 5, 6):
            for prompts in (1, 2):
                runner.infer(prompt_feeds(prompts, points))
        kept.append(_shapes(runner))
    assert [len(shapes) for shapes in kept[:3]] == [1, 1, 8]
    assert kept[3:] == [kept[2]] * 5
    for _ in range(30):  # what is asked for far more than one of those takes its place, the usual one stays
        runner.infer(prompt_feeds(5, 6))
    assert len(_shapes(runner)) == 8
    assert {"prompts": 5, "points": 6} in _shapes(runner)
    assert {"prompts": 1, "points": 2} in _shapes(runner)


def test_what_was_lent_outlives_its_shape(runner: OpenVinoRunner) -> None:
    """A view of an output that is still held, when its shape has made room for others, is not of freed memory."""
    feeds = prompt_feeds(3, 3)
    lent = runner.infer(feeds, copy=False)
    for points in range(1, 7):
        for prompts in (1, 2):
            runner.infer(prompt_feeds(prompts, points))
    gc.collect()
    _agree(lent, feeds)


def test_the_cache_has_the_usual_shape_and_the_one_for_all(compiled: Path) -> None:
    """A blob is as large as the weights, and shapes are many: they must not fill a disk, nor be mixed up."""
    for _ in range(2):
        with OpenVinoRunner(compiled / "decoder.xml", DECODER, "fp32", threads=1) as opened:
            for prompts, points in SIZES:
                feeds = prompt_feeds(prompts, points)
                _agree(opened.infer(feeds), feeds)
    (folder,) = (compiled / "cache").iterdir()
    assert len(list(folder.glob("*.blob"))) == 2


def test_another_usual_shape_is_another_blob(tmp_path: Path) -> None:
    """OpenVINO's key has the shapes in it: two runners with one cache folder answer their own."""
    _compile("openvino", tmp_path)
    for points in (2, 3, 2):
        usual = {"prompts": 1, "points": points}
        graph = GraphSpec("decoder", DECODER.inputs, DECODER.outputs, usual)
        with OpenVinoRunner(tmp_path / "decoder.xml", graph, "fp32", threads=1) as opened:
            feeds = prompt_feeds(1, points)
            _agree(opened.infer(feeds), feeds)
    (folder,) = (tmp_path / "cache").iterdir()
    assert len(list(folder.glob("*.blob"))) == 2


def test_a_damaged_blob_does_no_harm(tmp_path: Path) -> None:
    _compile("openvino", tmp_path)
    OpenVinoRunner(tmp_path / "decoder.xml", DECODER, "fp32", threads=1).close()
    (blob,) = (tmp_path / "cache").rglob("*.blob")
    blob.chmod(0o600)
    blob.write_bytes(blob.read_bytes()[:1000])
    with OpenVinoRunner(tmp_path / "decoder.xml", DECODER, "fp32", threads=1) as opened:
        feeds = prompt_feeds(1, 2)
        _agree(opened.infer(feeds), feeds)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_engine_is_an_error_of_one_line(tmp_path: Path, damage: str) -> None:
    _compile("openvino", tmp_path)
    path = tmp_path / "decoder.xml"
    path.write_bytes(path.read_bytes()[:500]) if damage == "cut" else path.unlink()
    with pytest.raises(BackendError, match=r"openvino cannot load it .*; build it again") as caught:
        OpenVinoRunner(path, DECODER, "fp32", threads=1)
    assert "\n" not in str(caught.value)


def test_closed_twice(runner: OpenVinoRunner) -> None:
    runner.close()
    runner.close()
    assert _shapes(runner) == []


def test_normalisation_stays_out_where_the_padding_is_0_after_it(tmp_path: Path) -> None:
    model = small_prompt_segmenter()
    graph = model.spec.graphs[0]
    module = model.modules["encoder"]
    path = tmp_path / "encoder.onnx"
    export_onnx(module, graph, path, precision="fp32")
    changed = {"graph": graph, "onnx_path": path, "module": module}
    assert _compile("openvino", tmp_path, **changed) == graph
    images = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    with OpenVinoRunner(tmp_path / "encoder.xml", graph, "fp32", threads=1) as opened, torch.no_grad():
        found = opened.infer({"images": images})
        for spec, want in zip(graph.outputs, module(torch.from_numpy(images)), strict=True):
            np.testing.assert_allclose(found[spec.name], want.numpy(), atol=1e-5)


# ---- PyTorch ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch")
    assert _compile("torch", folder) == DECODER
    return folder


def _loaded(folder: Path) -> Any:
    manifest: Any = SimpleNamespace(files={"decoder": "decoder.pt2"})
    return get_backend("torch")._program(folder, manifest, DECODER).module()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("prompts", "points"), SIZES)
def test_a_torch_program_answers_every_size(exported: Path, prompts: int, points: int) -> None:
    feeds = prompt_feeds(prompts, points)
    with TorchRunner(_loaded(exported), DECODER, threads=1) as opened:
        _agree(opened.infer(feeds), feeds)
        with pytest.raises(ShapeError, match=r"points: expected \(prompts 1\.\.5, points 1\.\.6, 2\) float32"):
            opened.infer(prompt_feeds(6, points))


def test_the_fp16_program_has_axes_too(tmp_path: Path) -> None:
    """Compiled for CUDA from the FP16 module, whose `forward` takes any number of inputs."""
    model = small_prompt_segmenter()
    keep = model.fp32_islands["decoder"]
    graph = export_onnx(
        model.modules["decoder"],
        DECODER,
        tmp_path / "a.onnx",
        precision="fp16",
        keep_fp32=keep,
        fp32_inputs=model.fp32_inputs["decoder"],
    )
    _compile("torch", tmp_path, graph=graph, precision="fp16", device="cuda", keep_fp32=keep)
    half = half_precision(model.modules["decoder"], keep)
    program = _loaded(tmp_path)
    for prompts, points in SIZES:
        feeds = [torch.from_numpy(array) for array in prompt_feeds(prompts, points, graph=graph).values()]
        with torch.no_grad():
            for got, want, spec in zip(program(*feeds), half(*feeds), graph.outputs, strict=True):
                assert torch.equal(got, want)
                assert str(got.dtype).removeprefix("torch.") == spec.dtype


def test_an_engine_on_a_device_is_bound_to_any_sizes(exported: Path) -> None:
    device: Any = RecordingDevice()
    engine = TorchEngine(_loaded(exported), DECODER, device)
    with DeviceRunner(engine) as opened:
        allocated = device.allocated
        for prompts, points in (*SIZES, *reversed(SIZES)):
            feeds = prompt_feeds(prompts, points)
            lent = opened.infer(feeds, copy=False)
            _agree(lent, feeds)
            own = opened.infer(feeds)
            opened.infer(prompt_feeds(prompts, points, seed=1))
            _agree(own, feeds)
        assert device.allocated == allocated, "buffers are allocated once, for the most"
        with pytest.raises(ShapeError, match="labels: expected 2 prompts, as in the tensors before it, got 3"):
            opened.infer(prompt_feeds(2, 2) | {"labels": np.zeros((3, 2), np.float32)})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"masks": torch.zeros(3, 4, 16, 16)}, "masks: expected 2 prompts, as in the tensors before it, got 3"),
        ({"labels": torch.zeros(2, 4)}, "labels: expected 3 points, as in the tensors before it, got 4"),
        ({"scores": torch.zeros(0, 4)}, r"scores: expected \(prompts 1\.\.5, 4\) float32, got \(0, 4\) float32"),
        ({"points": torch.zeros(2, 7, 2)}, r"points: expected \(prompts 1\.\.5, points 1\.\.6, 2\) float32, got"),
        ({"has_mask": torch.zeros(2).half()}, r"has_mask: expected \(prompts 1\.\.5,\) float32, got \(2,\) float16"),
        ({"labels": torch.zeros(3, 2).T}, "labels: .* got .* float32, not contiguous"),
    ],
)
def test_tensors_that_do_not_fit(changed: dict[str, torch.Tensor], says: str) -> None:
    specs = (*DECODER.inputs, *DECODER.outputs)
    tensors = {spec.name: torch.zeros(spec.sized({"prompts": 2, "points": 3})) for spec in specs}
    assert check_bound(specs, tensors) == {"prompts": 2, "points": 3}
    device: Any = RecordingDevice()
    engine = TorchEngine(torch.nn.Identity(), DECODER, device)
    with pytest.raises(ShapeError, match=says) as caught:
        engine.bind(tensors | changed)
    assert "\n" not in str(caught.value)


# ---- what they have in common -----------------------------------------------------------------------------


def test_feeds_say_the_sizes() -> None:
    assert check_feeds(DECODER.inputs, prompt_feeds(2, 3)) == {"prompts": 2, "points": 3}
    for prompts, points in ((0, 1), (1, 0), (6, 1), (1, 7)):
        with pytest.raises(ShapeError, match=r"points: expected \(prompts 1\.\.5, points 1\.\.6, 2\) float32, got"):
            check_feeds(DECODER.inputs, prompt_feeds(prompts, points))
    with pytest.raises(ShapeError, match="labels: expected 3 points, as in the tensors before it, got 4"):
        check_feeds(DECODER.inputs, prompt_feeds(2, 3) | {"labels": np.zeros((2, 4), np.float32)})


def test_the_fake_answers_the_size_that_is_asked_for() -> None:
    answer: Callable[..., Any] = lambda feeds: {"scores": feeds["labels"].sum(1, keepdims=True)}  # noqa: E731
    with FakeRunner(DECODER, answer) as opened:
        feeds = prompt_feeds(3, 2)
        lent, own = opened.infer(feeds, copy=False), opened.infer(feeds)
        assert own["masks"].shape == (3, 4, 16, 16)
        assert own["scores"].shape == (3, 4)
        assert np.array_equal(own["scores"], np.repeat(feeds["labels"].sum(1, keepdims=True), 4, 1))
        opened.infer(prompt_feeds(4, 2, seed=1))
        assert not np.array_equal(lent["scores"], own["scores"])


def test_a_manifest_keeps_the_axes(tmp_path: Path) -> None:
    from visionfast import artifacts
    from visionfast.types import Certificate

    model = small_prompt_segmenter()
    names = {graph.name: f"{graph.name}.xml" for graph in model.spec.graphs}
    for file in names.values():
        (tmp_path / file).write_text(file)
    manifest = EngineManifest(
        spec=model.spec, backend="openvino", precision="fp32", device="cpu", runtime_version="1", files=names,
        sha256={file: artifacts.sha256_file(tmp_path / file) for file in names.values()}, onnx_sha256={},
        weights_sha256="0" * 64, keep_fp32=("encoder.norm",), certificate=Certificate("not yet run on a device"),
        created="2026-11-30T00:00:00+00:00", visionfast_version="0",
    )  # fmt: skip
    artifacts.write_manifest(tmp_path, manifest)
    assert artifacts.read_manifest(tmp_path).spec.graphs == model.spec.graphs
