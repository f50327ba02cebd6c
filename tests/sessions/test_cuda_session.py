"""The GPU's session on a recording device: what it asks for and when, and that its answers are the host's.

The device's memory is the host's and the kernels run in Triton's interpreter, so everything is really computed.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from recording import RecordingDevice, RecordingEngine

from visionfast.backends.fake import FakeRunner
from visionfast.errors import (
    BackendError,
    ImageError,
    ImageTooLargeError,
    IncompatibleEngineError,
    OptionError,
    SessionBusyError,
)
from visionfast.pipeline import Detector, Segmenter
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.nv12 import Nv12Frame, nv12_to_rgb
from visionfast.results import Detections
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, TensorSpec

SIZE = (64, 96)
ANCHORS = 126
NAMES = ("cat", "dog", "bird")
COEFFICIENTS = 8


def spec(batch: int = 1, task: Any = "detect", dtype: str = "float16") -> ModelSpec:
    h, w = SIZE
    coefficients = COEFFICIENTS if task == "segment" else 0
    outputs = [TensorSpec("predictions", (batch, 4 + len(NAMES) + coefficients, ANCHORS), "float32")]
    if task == "segment":
        outputs.append(TensorSpec("prototypes", (batch, coefficients, h // 4, w // 4), "float16"))
    graph = GraphSpec("model", (TensorSpec("images", (batch, 3, h, w), dtype, "NCHW"),), tuple(outputs))
    return ModelSpec("fake", "yolov8", "yolov8n", task, (graph,), PreprocessSpec(SIZE), NAMES, (8, 16, 32))


def network(model: ModelSpec, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Boxes, scores and coefficients that depend on the pixels of the slot alone, so that a mix-up is seen."""
    (images,) = feeds.values()
    batch = len(images)
    outputs = {}
    for output in model.graphs[0].outputs:
        made = torch.empty(output.shape, dtype=torch.float32)
        for slot in range(batch):
            generator = torch.Generator().manual_seed(int(images[slot].float().sum().item() * 64) % (1 << 31))
            made[slot] = torch.rand(output.shape[1:], generator=generator)
        if output.name == "predictions":
            made[:, 0] *= SIZE[1]
            made[:, 1] *= SIZE[0]
            made[:, 2:4] = made[:, 2:4] * 40 + 2
            made[:, 4 + len(NAMES) :] -= 0.5
        else:
            made -= 0.5
        outputs[output.name] = made.to(getattr(torch, output.dtype))
    return outputs


def on_device(model: ModelSpec, device: RecordingDevice | None = None, **options: Any) -> tuple[Any, RecordingEngine]:
    device = device or RecordingDevice()
    engine = RecordingEngine(model.graphs[0], device, lambda feeds: network(model, feeds))
    kind = Segmenter if model.task == "segment" else Detector
    return kind(model, engine, **options), engine


def on_host(model: ModelSpec, **options: Any) -> Detector:
    def answer(feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        made = network(model, {"images": torch.from_numpy(feeds["images"].copy())})
        return {name: tensor.numpy() for name, tensor in made.items()}

    kind = Segmenter if model.task == "segment" else Detector
    return kind(model, FakeRunner(model.graphs[0], answer), **options)


def pictures(*sizes: tuple[int, int]) -> list[npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def assert_same(got: Detections, expected: Detections) -> None:
    assert np.array_equal(got.xyxy, expected.xyxy)
    assert np.array_equal(got.confidence, expected.confidence)
    assert np.array_equal(got.class_id, expected.class_id)
    assert got.image_hw == expected.image_hw
    assert (got.mask is None) == (expected.mask is None)


VARIED = ((64, 96), (30, 200), (200, 30), (1, 1), (97, 55))


# ---- the answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_answers_are_those_of_the_host(batch: int, graph: bool) -> None:
    model = spec(batch)
    options = {"conf": 0.6, "iou": 0.4, "max_det": 20}
    images = pictures(*VARIED)
    with on_device(model, graph=graph, **options)[0] as device, on_host(model, **options) as host:
        for got, expected in zip(device(images), host(images), strict=True):
            assert len(expected) > 3
            assert_same(got, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_engine_reads_what_the_host_would_feed(dtype: str) -> None:
    model = spec(2, dtype=dtype)
    seen: list[npt.NDArray[Any]] = []
    device = RecordingDevice()
    engine = RecordingEngine(
        model.graphs[0], device, lambda feeds: seen.append(feeds["images"].numpy().copy()) or network(model, feeds)
    )
    fed: list[npt.NDArray[Any]] = []
    runner = FakeRunner(model.graphs[0], lambda feeds: fed.append(feeds["images"].copy()) or {})
    images = pictures((50, 70), (10, 300))
    with Detector(model, engine, graph=False) as detector, Detector(model, runner) as host:
        detector(images)
        host(images)
    assert np.array_equal(seen[-1], fed[-1])


def test_frames_that_are_on_the_device_are_read_where_they_lie() -> None:
    model = spec(2)
    device = RecordingDevice()
    images = pictures((64, 96), (80, 50))
    wide = torch.zeros(80, 70, 3, dtype=torch.uint8)  # rows further apart than their pixels need
    wide[:, :50] = torch.from_numpy(images[1])
    with on_device(model, device, conf=0.6, graph=False)[0] as detector:
        expected = detector(images)
        del device.log[:]
        got = detector([torch.from_numpy(images[0]), wide[:, :50]])
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
        assert device.log == ["follow", "copy to device", "engine", "copy to host", "synchronize"]
        assert_same(detector(torch.from_numpy(images[0]))[0], expected[0])


def test_frames_of_video_on_either_side() -> None:
    model = spec(1)
    rng = np.random.default_rng(2)
    y, uv = rng.integers(0, 256, (50, 80), np.uint8), rng.integers(0, 256, (25, 40, 2), np.uint8)
    options: Any = {"matrix": "bt709", "full_range": True}
    pixels = nv12_to_rgb(y, uv, **options)
    with on_device(model, conf=0.6, graph=False)[0] as device, on_host(model, conf=0.6) as host:
        (expected,) = host(pixels)
        assert len(expected) > 3
        assert_same(host(Nv12Frame(y, uv, **options))[0], expected)
        assert_same(device(Nv12Frame(y, uv, **options))[0], expected)
        assert_same(device(Nv12Frame(torch.from_numpy(y), torch.from_numpy(uv), **options))[0], expected)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 4, dtype=torch.uint8),
        torch.zeros(4, 4, 3),
        torch.zeros(0, 4, 3, dtype=torch.uint8),
        Nv12Frame(np.zeros((4, 5), np.uint8), np.zeros((2, 2, 2), np.uint8)),
        Nv12Frame(torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)),
        Nv12Frame(torch.zeros(4, 4, dtype=torch.uint8), np.zeros((2, 2, 2), np.uint8)),
        Nv12Frame(np.zeros((4, 4), np.uint8), torch.zeros(2, 2, 2, dtype=torch.uint8)),
        Nv12Frame(torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(2, 2, 2, dtype=torch.uint8), matrix="bt2020"),  # type: ignore[arg-type]
    ],
)
def test_frames_that_are_none_harm_only_themselves(wrong: Any) -> None:
    model = spec(2)
    (good,) = pictures((64, 96))
    with on_device(model, conf=0.6, graph=False)[0] as detector:
        (expected,) = detector(good)
        bad, answer = detector([wrong, good], on_error="return")
        assert isinstance(bad, ImageError)
        assert bad.source == "image 0"
        assert_same(answer, expected)


def test_too_large_a_frame() -> None:
    with on_device(spec(), graph=False, limits=DecodeLimits(max_pixels=99))[0] as detector:
        for frame in (
            torch.zeros(10, 10, 3, dtype=torch.uint8),
            Nv12Frame(torch.zeros(10, 10, dtype=torch.uint8), torch.zeros(5, 5, 2, dtype=torch.uint8)),
            Nv12Frame(np.zeros((10, 10), np.uint8), np.zeros((5, 5, 2), np.uint8)),
        ):
            with pytest.raises(ImageTooLargeError):
                detector(frame)


def test_masks_are_those_of_the_host() -> None:
    model = spec(2, "segment")
    options = {"conf": 0.6, "iou": 0.4, "max_det": 9}
    images = pictures((64, 96), (90, 200), (200, 30))
    with on_device(model, **options)[0] as device, on_host(model, **options) as host:
        for got, expected in zip(device(images), host(images), strict=True):
            assert_same(got, expected)
            assert len(expected) >= 2
            different = got.mask.dense() != expected.mask.dense()
            assert different.mean() < 1e-3  # pixels whose logit is within rounding of 0


def test_a_bad_image_harms_only_itself() -> None:
    model = spec(2)
    good = pictures((64, 96), (80, 50))
    with on_device(model, conf=0.6)[0] as detector:
        alone = detector(good)
        mixed = detector([b"no image", good[0], good[1], b""], on_error="return")
        assert isinstance(mixed[0], ImageError)
        assert mixed[0].source == "image 0"
        assert isinstance(mixed[3], ImageError)
        assert mixed[3].source == "image 3"
        assert_same(mixed[1], alone[0])
        assert_same(mixed[2], alone[1])
        with pytest.raises(ImageError):
            detector([good[0], b"no image"])
        assert_same(detector(good[1])[0], alone[1])


def test_results_are_no_live_buffers() -> None:
    model = spec(1, "segment")
    first, second = pictures((64, 96), (80, 50))
    with on_device(model, conf=0.6, max_det=4)[0] as detector:
        answer = detector(first)[0]
        kept = answer.xyxy.copy(), answer.confidence.copy(), answer.class_id.copy(), answer.mask.counts
        raw = detector.raw()
        raw_kept = {name: array.copy() for name, array in raw.items()}
        detector(second)
        assert np.array_equal(answer.xyxy, kept[0])
        assert np.array_equal(answer.confidence, kept[1])
        assert np.array_equal(answer.class_id, kept[2])
        assert answer.mask.counts == kept[3]
        assert all(np.array_equal(raw[name], raw_kept[name]) for name in raw)
        assert not np.array_equal(detector.raw()["predictions"], raw["predictions"])


# ---- the order of things ----------------------------------------------------------------------------------


def test_one_synchronisation_and_no_allocation_a_batch() -> None:
    model = spec(2)
    device = RecordingDevice()
    with on_device(model, device)[0] as detector:
        images = pictures((64, 96), (80, 50))
        detector(images)  # the frames' buffers grow to their size
        del device.log[:]
        detector(images)
        assert device.log == [
            "copy to device",  # each frame, into its own slot
            "copy to device",
            "replay",
            "copy to device",  # where the images lie
            "engine",
            "copy to host",  # what was found
            "synchronize",
        ]


def test_opening_binds_once_warms_up_and_captures() -> None:
    device = RecordingDevice()
    with on_device(spec(), device)[0]:
        log = [entry for entry in device.log if entry not in ("empty", "pinned", "copy to device", "copy to host")]
        assert log == ["bind", "engine", "synchronize", "capture", "engine"]


def test_without_a_graph_nothing_is_captured() -> None:
    device = RecordingDevice()
    with on_device(spec(), device, graph=False)[0] as detector:
        detector(pictures((64, 96)))
        assert "capture" not in device.log
        assert "replay" not in device.log


def test_an_engine_that_cannot_be_captured_runs_without_a_graph() -> None:
    model = spec()
    device = RecordingDevice()
    engine = RecordingEngine(model.graphs[0], device, lambda feeds: network(model, feeds), capturable=False)
    with Detector(model, engine) as detector:
        detector(pictures((64, 96)))
        assert "capture" not in device.log
    engine = RecordingEngine(model.graphs[0], device, lambda feeds: network(model, feeds), capturable=False)
    with pytest.raises(BackendError, match="cannot be captured"):
        Detector(model, engine, graph=True)
    assert engine.closed == 1


def test_large_masks_take_further_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from visionfast.postprocess import on_device as postprocess_on_device

    model = spec(1, "segment")
    device = RecordingDevice()
    options = {"conf": 0.8, "iou": 0.9, "max_det": 6}
    image = pictures((180, 270))
    with on_host(model, **options) as host:
        expected = host(image)[0]
    monkeypatch.setattr(postprocess_on_device, "MASK_WORDS_PER_IMAGE", 400)
    with on_device(model, device, **options)[0] as detector:
        del device.log[:]
        got = detector(image)[0]
        assert_same(got, expected)
        assert (got.mask.dense() != expected.mask.dense()).mean() < 1e-3
        assert device.log.count("synchronize") > 2
        del device.log[:]
        assert_same(detector(image)[0], expected)  # the graph's own round is the first again


def test_a_picture_too_long_for_the_mask_kernels_is_answered_by_the_definition() -> None:
    model = spec(2, "segment")
    options = {"conf": 0.8, "max_det": 3}
    with on_device(model, graph=False, **options)[0] as detector, on_host(model, **options) as host:
        detector._session._postprocess._masks._kernels.longest_side = 150
        for got, expected in zip(
            detector(pictures((64, 96), (20, 200))), host(pictures((64, 96), (20, 200))), strict=True
        ):
            assert_same(got, expected)
        assert got.mask.counts == expected.mask.counts


# ---- when it fails ----------------------------------------------------------------------------------------


def test_two_threads_are_an_error_and_not_a_race() -> None:
    model = spec()
    entered, leave = threading.Event(), threading.Event()

    def slow(feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if armed:
            entered.set()
            assert leave.wait(20)
        return network(model, feeds)

    armed: list[bool] = []
    engine = RecordingEngine(model.graphs[0], RecordingDevice(), slow)
    image = pictures((64, 96))
    with Detector(model, engine, conf=0.6, graph=False) as detector:
        alone = detector(image)[0]
        armed.append(True)
        answers: list[Detections] = []
        other = threading.Thread(target=lambda: answers.extend(detector(image)))
        other.start()
        assert entered.wait(20)
        with pytest.raises(SessionBusyError, match="open a session for each thread"):
            detector(image)
        leave.set()
        other.join(20)
        assert_same(answers[0], alone)
        armed.clear()
        assert_same(detector(image)[0], alone)


def test_closing_waits_for_whoever_is_asking() -> None:
    model = spec()
    entered, leave = threading.Event(), threading.Event()
    armed: list[bool] = []

    def slow(feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if armed:
            entered.set()
            assert leave.wait(20)
        return network(model, feeds)

    engine = RecordingEngine(model.graphs[0], RecordingDevice(), slow)
    detector = Detector(model, engine, conf=0.6, graph=False)
    armed.append(True)
    answers: list[Detections] = []
    asking = threading.Thread(target=lambda: answers.extend(detector(pictures((64, 96)))))
    closing = threading.Thread(target=detector.close)
    asking.start()
    assert entered.wait(20)
    closing.start()
    closing.join(0.2)
    assert engine.closed == 0
    leave.set()
    asking.join(20)
    closing.join(20)
    assert engine.closed == 1
    assert len(answers) == 1
    with pytest.raises(BackendError, match="it is closed; open the engine again"):
        detector.raw()


def test_a_failing_engine_leaves_a_session_that_works() -> None:
    model = spec()
    detector, engine = on_device(model, conf=0.6, graph=False)
    with detector:
        expected = detector(pictures((64, 96)))[0]
        engine.failing = BackendError("refused")
        del engine.device.log[:]
        with pytest.raises(BackendError, match="refused"):
            detector(pictures((64, 96)))
        assert engine.device.log[-1] == "synchronize"  # nothing still reads the buffers
        engine.failing = None
        assert_same(detector(pictures((64, 96)))[0], expected)


@pytest.mark.parametrize("error", [BackendError("no memory"), KeyboardInterrupt(), RuntimeError("odd")])
def test_what_fails_while_opening_is_released(error: BaseException) -> None:
    model = spec()
    engine = RecordingEngine(model.graphs[0], RecordingDevice(), lambda feeds: network(model, feeds))
    engine.failing = error  # type: ignore[assignment]
    with pytest.raises(type(error)):
        Detector(model, engine)
    assert engine.closed == 1


def test_an_unknown_option_is_found_before_the_device_is_touched() -> None:
    model = spec()
    device = RecordingDevice()
    engine = RecordingEngine(model.graphs[0], device, lambda feeds: network(model, feeds))
    with pytest.raises(OptionError):
        Detector(model, engine, conf=2)
    assert device.log == []


def test_outputs_of_another_task_are_refused() -> None:
    model = spec()
    graph = GraphSpec("model", model.graphs[0].inputs, (TensorSpec("logits", (1, 1000), "float32"),))
    engine = RecordingEngine(graph, RecordingDevice(), lambda feeds: {"logits": torch.zeros(1, 1000)})
    with pytest.raises(IncompatibleEngineError, match="expected the outputs predictions float32, got logits float32"):
        Detector(model, engine)
    assert engine.closed == 1


def test_closing_frees_everything_and_twice_is_harmless() -> None:
    detector, engine = on_device(spec(1, "segment"), max_det=2)
    detector(pictures((64, 96)))
    session = weakref.ref(detector._session)
    detector.close()
    detector.close()
    assert engine.closed == 1
    with pytest.raises(OptionError, match="is closed"):
        detector(pictures((64, 96)))
    del detector, engine
    gc.collect()
    assert session() is None


def test_many_batches_keep_no_memory() -> None:
    model = spec(2, "segment")
    device = RecordingDevice()
    with on_device(model, device, max_det=1)[0] as detector:
        images = pictures((64, 96), (40, 50))
        detector(images)
        gc.collect()
        allocated, objects = device.allocated, sum(type(o) is torch.Tensor for o in gc.get_objects())
        for _ in range(5):
            detector(images)
        gc.collect()
        assert device.allocated == allocated
        assert sum(type(o) is torch.Tensor for o in gc.get_objects()) == objects
        assert device._to_host == []
