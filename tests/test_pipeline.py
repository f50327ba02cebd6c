"""The pipeline around a runner that answers what it is told to."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from visionfast.backends.fake import FakeRunner
from visionfast.errors import (
    ImageError,
    ImageFormatError,
    ImageNotFoundError,
    ManifestError,
    OptionError,
    SessionBusyError,
)
from visionfast.pipeline import Detector, Segmenter, open_engine
from visionfast.preprocess import reference
from visionfast.preprocess.nv12 import Nv12Frame
from visionfast.results import Detections
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, TensorSpec

_SIZE = (64, 96)
_ANCHORS = 126
_NAMES = ("cat", "dog", "7")


def _spec(batch: int = 1, *, task: Any = "detect", dtype: str = "uint8") -> ModelSpec:
    h, w = _SIZE
    image = (
        TensorSpec("images", (batch, h, w, 3), "uint8", "NHWC")
        if dtype == "uint8"
        else TensorSpec("images", (batch, 3, h, w), dtype, "NCHW")
    )
    coefficients = 8 if task == "segment" else 0
    outputs = [TensorSpec("predictions", (batch, 4 + len(_NAMES) + coefficients, _ANCHORS), "float32")]
    if task == "segment":
        outputs.append(TensorSpec("prototypes", (batch, coefficients, h // 4, w // 4), "float32"))
    graph = GraphSpec("model", (image,), tuple(outputs))
    return ModelSpec("fake", "yolov8", "yolov8n", task, (graph,), PreprocessSpec(_SIZE), _NAMES, (8, 16, 32))


Answer = Callable[[Mapping[str, npt.NDArray[Any]]], Mapping[str, npt.NDArray[Any]]]


def _brightness(feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """One object in each slot, whose score tells the level of the slot's centre pixel."""
    images = feeds["images"]
    h, w = _SIZE
    if images.dtype == np.uint8:
        level = images[:, h // 2, w // 2, 0].astype(np.float32) / 255
    else:
        level = images[:, 0, h // 2, w // 2].astype(np.float32)
    predictions = np.zeros((len(images), 4 + len(_NAMES), _ANCHORS), np.float32)
    predictions[:, :4, 0] = [w / 2, h / 2, 20, 10]
    predictions[:, 5, 0] = level
    return {"predictions": predictions}


def _grey(level: int, size_hw: tuple[int, int] = _SIZE) -> npt.NDArray[np.uint8]:
    return np.full((*size_hw, 3), level, np.uint8)


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _detector(batch: int = 1, *, dtype: str = "uint8", answer: Answer = _brightness, **options: Any) -> Detector:
    spec = _spec(batch, dtype=dtype)
    return Detector(spec, FakeRunner(spec.graphs[0], answer), **options)


def _levels(answers: list[Detections]) -> list[int]:
    return [round(float(answer.confidence[0]) * 255) for answer in answers]


# ---- batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_order_is_kept_and_short_batches_are_filled(batch: int, count: int) -> None:
    levels = [100 + 10 * i for i in range(count)]
    with _detector(batch) as detector:
        assert _levels(detector([_grey(level) for level in levels])) == levels
        assert detector._session._runner.calls == -(-count // batch)


def test_one_image_is_a_list_of_one(tmp_path: Path) -> None:
    pixels = _grey(200)
    path = tmp_path / "a.png"
    path.write_bytes(_png(pixels))
    with _detector() as detector:
        for source in (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), pixels):
            assert _levels(detector(source)) == [200]
        assert _levels(detector((path, pixels))) == [200, 200]
        assert detector([]) == []


def test_one_bad_image_does_no_harm() -> None:
    with _detector(4) as detector:
        answers = detector([_grey(100), b"no image", _grey(120), "no/such/file.jpg", _grey(140)], on_error="return")
        kinds = [type(answer) for answer in answers]
        assert kinds == [Detections, ImageFormatError, Detections, ImageNotFoundError, Detections]
        assert _levels([a for a in answers if isinstance(a, Detections)]) == [100, 120, 140]
        first, second = (a for a in answers if isinstance(a, ImageError))
        assert first.source == "image 1"
        assert second.source == "no/such/file.jpg"
        with pytest.raises(ImageFormatError, match=r"^image 6: "):
            detector([_grey(100)] * 6 + [b"no image"])
        # and the detector is as good as before
        assert _levels(detector([_grey(150)])) == [150]


def test_only_bad_images_ask_nothing_of_the_engine() -> None:
    with _detector(2) as detector:
        answers = detector([b"", np.zeros((0, 3, 3), np.uint8), np.zeros((3, 3, 3))], on_error="return")
        assert all(isinstance(answer, ImageFormatError) for answer in answers)
        assert detector._session._runner.calls == 0


def test_results_share_no_memory_with_the_runner() -> None:
    with _detector(2) as detector:
        first = detector([_grey(100), _grey(110)])
        before = [(a.xyxy.copy(), a.confidence.copy(), a.class_id.copy()) for a in first]
        detector([_grey(250), _grey(240)])
        for answer, (xyxy, confidence, class_id) in zip(first, before, strict=True):
            np.testing.assert_array_equal(answer.xyxy, xyxy)
            np.testing.assert_array_equal(answer.confidence, confidence)
            np.testing.assert_array_equal(answer.class_id, class_id)


def test_segmenter_results_share_no_memory_with_the_runner() -> None:
    spec = _spec(task="segment")
    sign = 1.0

    def answer(feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        predictions = np.zeros(spec.graphs[0].outputs[0].shape, np.float32)
        predictions[0, :4, 0] = [48, 32, 40, 20]
        predictions[0, 4, 0] = 0.9
        predictions[0, 7:, 0] = 1
        prototypes = np.full(spec.graphs[0].outputs[1].shape, -1, np.float32)
        prototypes[..., :12] = sign
        prototypes[..., 12:] = -sign
        return {"predictions": predictions, "prototypes": prototypes}

    with Segmenter(spec, FakeRunner(spec.graphs[0], answer)) as segmenter:
        (left,) = segmenter(_grey(0))
        assert left.mask is not None
        before = left.mask.dense()
        assert before[0, 32, 30]
        assert not before[0, 32, 66]
        sign = -1.0
        (right,) = segmenter(_grey(0))
        assert right.mask is not None
        np.testing.assert_array_equal(left.mask.dense(), before)
        assert right.mask.dense()[0, 32, 66]


# ---- what the engine is fed -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16"])
def test_the_engine_is_fed_the_definition(dtype: str) -> None:
    seen: list[npt.NDArray[Any]] = []

    def remember(feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        seen.append(feeds["images"].copy())
        return _brightness(feeds)

    rng = np.random.default_rng(0)
    with _detector(dtype=dtype, answer=remember) as detector:
        # a wide and a tall one by turns: what one leaves in the padding must not stay for the next
        for size_hw in [(20, 300), (300, 20), (64, 96), (1, 1), (33, 47)]:
            image = rng.integers(0, 256, (*size_hw, 3), np.uint8)
            (answer,) = detector(image)
            assert answer.image_hw == size_hw
            expected, _ = reference.letterbox(image, detector.spec.preprocess)
            if dtype == "uint8":
                np.testing.assert_allclose(seen[-1][0].astype(int), expected.astype(int), atol=1)
            else:
                tensor = reference.normalise(expected, detector.spec.preprocess, np.dtype(dtype))
                np.testing.assert_allclose(seen[-1][0].astype(np.float32), tensor, atol=1.2 / 255)


def test_boxes_are_in_original_pixels() -> None:
    with _detector() as detector:
        (answer,) = detector(_grey(200, (128, 192)))
    np.testing.assert_allclose(answer.xyxy, [[76, 54, 116, 74]])
    assert answer.class_id.tolist() == [1]


def test_every_stage_is_timed() -> None:
    with _detector(4) as detector:
        for answer in detector([_grey(100)] * 3):
            assert list(answer.stage_ns) == ["decode", "preprocess", "engine", "postprocess"]
            assert all(type(ns) is int and ns > 0 for ns in answer.stage_ns.values())


# ---- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"conf": 1.5}, "conf: expected a number from 0 to 1, got 1.5"),
        ({"conf": float("nan")}, "conf: expected"),
        ({"iou": -0.1}, "iou: expected"),
        ({"max_det": 0}, "max_det: expected at least 1"),
        ({"classes": []}, "classes: expected at least one"),
        ({"classes": ["bird"]}, "no class 'bird'; there are cat, dog, 7"),
        ({"classes": [3]}, "classes: expected ids from 0 to 2, got 3"),
        ({"classes": ["3"]}, "classes: expected ids from 0 to 2, got 3"),
        ({"classes": ["²"]}, "no class '²'"),
        ({"classes": [-1]}, "classes: expected ids"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        _detector(**options)


def test_classes_by_name_and_id() -> None:
    for classes, found in [(["dog"], 1), ([1], 1), (["1"], 1), (["cat"], 0), ([0, 2], 0), (["7"], 0)]:
        with _detector(classes=classes) as detector:
            assert len(detector(_grey(200))[0]) == found


def test_wrong_calls() -> None:
    detector = _detector()
    with pytest.raises(OptionError, match="on_error: expected 'raise' or 'return', got 'ignore'"):
        detector(_grey(1), on_error="ignore")  # type: ignore[call-overload]
    detector.close()
    detector.close()
    assert detector._session._runner.closed
    with pytest.raises(OptionError, match="fake: this Detector is closed; open the engine again"):
        detector(_grey(1))


def test_two_threads_that_ask_at_once_are_told_so() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        inside.set()
        assert go_on.wait(30)
        return _brightness(feeds)

    answers: list[Detections] = []
    with _detector(answer=slow) as detector:
        first = threading.Thread(target=lambda: answers.extend(detector(_grey(200))))
        first.start()
        assert inside.wait(30)
        with pytest.raises(SessionBusyError, match="open a session for each thread"):
            detector(_grey(100))
        go_on.set()
        first.join()
        assert _levels(answers) == [200]  # the second one's picture is not in it
        assert _levels(detector(_grey(100))) == [100]
        with pytest.raises(ImageError):
            detector(b"not an image")
        assert _levels(detector(_grey(150))) == [150]  # an error gives the session back


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (Nv12Frame([[0]], np.zeros((1, 1, 2), np.uint8)), "y: expected a numpy.ndarray on the host, got list"),
        (Nv12Frame(np.zeros((2, 2), np.uint8), None), "uv: expected a numpy.ndarray on the host, got NoneType"),
        (Nv12Frame(np.zeros((2, 2), np.uint8), np.zeros((1, 1, 2), np.uint8), matrix=[]), "matrix: expected one of"),  # type: ignore[arg-type]
    ],
)
def test_frames_that_are_none(frame: Nv12Frame, says: str) -> None:
    with _detector() as detector:
        (answer,) = detector(frame, on_error="return")
    assert isinstance(answer, ImageFormatError)
    assert answer.reason.startswith(says)


def test_the_task_decides_the_class() -> None:
    segment, detect = _spec(task="segment"), _spec()
    with pytest.raises(OptionError, match="fake: a model for segment; open it with Segmenter"):
        Detector(segment, FakeRunner(segment.graphs[0]))
    with pytest.raises(OptionError, match="fake: a model for detect; open it with Detector"):
        Segmenter(detect, FakeRunner(detect.graphs[0]))


# ---- engines on disk --------------------------------------------------------------------------------------


def test_opening_engines(copied_engine: Path) -> None:
    with open_engine("small", threads=1, conf=0.1, max_det=3) as detector:
        assert type(detector) is Detector
        assert len(detector(_grey(90))[0]) == 3
        assert detector.manifest is not None
        assert detector.class_names == ("kind 0", "kind 1", "kind 2")
    with pytest.raises(OptionError, match=r"option 'cnf': expected one of .*conf.*iou"):
        Detector.open(copied_engine, cnf=0.1)
    with pytest.raises(OptionError, match="option 'runner'"):
        Detector.open(copied_engine, runner=None)
    for threads in (0, 10**20, True, "2", 2.5):
        with pytest.raises(OptionError, match=f"threads: expected a whole number from 1 to .*, got {threads!r}"):
            Detector.open(copied_engine, threads=threads)
    with pytest.raises(OptionError, match="conf: expected"):
        Detector.open(copied_engine, conf=2)
    with pytest.raises(OptionError, match="a model for detect; open it with Detector"):
        Segmenter.open(copied_engine)


@pytest.mark.parametrize(
    ("task", "output", "says"),
    [
        ("segment", "predictions", "expected the outputs predictions, prototypes for segment, got predictions"),
        ("detect", "boxes", "expected the outputs predictions for detect, got boxes"),
    ],
)
def test_a_manifest_whose_outputs_are_not_its_task_s(copied_engine: Path, task: str, output: str, says: str) -> None:
    path = copied_engine / "engine.json"
    document = json.loads(path.read_text())
    document["spec"]["task"] = task
    document["spec"]["graphs"][0]["outputs"][0]["name"] = output
    path.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=says):
        open_engine(copied_engine)


def _run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_bare_machine_answers(copied_engine: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(_png(_grey(90)))
    out = _run_python(
        """
        import sys

        MISSING = {"torch", "torchvision", "ultralytics", "onnx", "safetensors", "nvidia", "tensorrt", "tensorrt_rtx"}

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in MISSING:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())
        from visionfast.pipeline import open_engine

        with open_engine(sys.argv[1], conf=0.1, max_det=5) as detector:
            answers = detector([sys.argv[2]])
        print(len(answers[0]), sorted(MISSING & set(sys.modules)))
        """,
        str(copied_engine),
        str(picture),
    )
    assert out.split(maxsplit=1) == ["5", "[]\n"]


def test_importing_is_light() -> None:
    heavy = "torch torchvision cv2 openvino onnx ultralytics numpy PIL supervision tensorrt_rtx nvidia rich typer"
    out = _run_python("import sys, visionfast; print([m for m in sys.argv[1].split() if m in sys.modules])", heavy)
    assert out == "[]\n"
