"""Which way an image takes into its slot: through DALI (its CPU operators here), or decoded on the CPU."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from recording import RecordingDevice, RecordingEngine

from visionfast.errors import ImageError, ImageFormatError, ImageNotFoundError, ImageTruncatedError, OptionError
from visionfast.pipeline import Detector
from visionfast.preprocess.reference import letterbox, normalise
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, TensorSpec

pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install 'visionfast[dali]'")

SIZE = (64, 96)
NAMES = ("thing",)


def _spec(batch: int) -> ModelSpec:
    graph = GraphSpec(
        "model",
        (TensorSpec("images", (batch, 3, *SIZE), "float16", "NCHW"),),
        (TensorSpec("predictions", (batch, 5, 4), "float32"),),
    )
    return ModelSpec("fake", "yolov8", "yolov8n", "detect", (graph,), PreprocessSpec(SIZE), NAMES, (8, 16, 32))


def _level(feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One object in each slot, whose confidence is the level of the slot's centre pixel."""
    images = feeds["images"].float()
    predictions = torch.zeros(len(images), 5, 4)
    predictions[:, :4, 0] = torch.tensor([48.0, 32.0, 20.0, 10.0])
    predictions[:, 4, 0] = images[:, 0, SIZE[0] // 2, SIZE[1] // 2]
    return {"predictions": predictions}


class Opened:
    """A detector whose decoder is DALI, and what its engine was fed."""

    def __init__(self, batch: int, **options: Any) -> None:
        self.device = RecordingDevice()
        self.fed: list[npt.NDArray[Any]] = []
        model = _spec(batch)
        engine = RecordingEngine(model.graphs[0], self.device, self._answer)
        self.detector = Detector(model, engine, conf=0.0, graph=False, **({"decoder": "dali"} | options))

    def _answer(self, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.fed.append(feeds["images"].numpy().copy())
        return _level(feeds)

    def levels(self, images: list[Any]) -> list[int | str]:
        answers = self.detector(images, on_error="return")
        return [
            type(answer).__name__ if isinstance(answer, ImageError) else round(float(answer.confidence[0]) * 255)
            for answer in answers
        ]


@pytest.fixture
def opened() -> Any:
    detectors = []

    def open_one(batch: int = 1, **options: Any) -> Opened:
        detectors.append(Opened(batch, **options))
        return detectors[-1]

    yield open_one
    for made in detectors:
        made.detector.close()


def _grey(level: int, size_hw: tuple[int, int] = (80, 120)) -> npt.NDArray[np.uint8]:
    return np.full((*size_hw, 3), level, np.uint8)


def _encoded(pixels: npt.NDArray[np.uint8], kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def _noisy_jpeg() -> bytes:
    return _encoded(np.random.default_rng(3).integers(0, 256, (80, 120, 3), np.uint8), quality=90)


def _damaged_jpeg() -> bytes:
    """Cut short, and ended as if it were not."""
    return _noisy_jpeg()[:-200] + b"\xff\xd9"


def test_what_the_engine_reads_is_the_definition(opened: Any, photographs: list[Path]) -> None:
    made = opened(2)
    made.detector([photographs[0], photographs[1].read_bytes()])
    for slot, photograph in enumerate(photographs):
        pixels = np.asarray(Image.open(photograph).convert("RGB"))
        expected = normalise(letterbox(pixels, PreprocessSpec(SIZE))[0], PreprocessSpec(SIZE))
        difference = np.abs(made.fed[-1][slot].astype(np.float32) - expected) * 255
        assert difference.max() < 1.6  # one level, and the rounding of float16
    assert made.device.log.count("copy to device") == 3  # both places (while opening, and now), and DALI's tensor


def test_every_image_comes_out_in_its_own_place(opened: Any, tmp_path: Path) -> None:
    made = opened(4)
    jpegs = {level: _encoded(_grey(level)) for level in (30, 60, 90, 120, 150)}
    path = tmp_path / "a.jpg"
    path.write_bytes(jpegs[150])
    rgba = np.dstack([_grey(200), np.full((80, 120), 255, np.uint8)])
    images = [
        jpegs[30], _grey(40), b"no image", jpegs[60],  # DALI, pixels, an error, DALI: not side by side
        _encoded(rgba, "PNG"), path, jpegs[90], tmp_path / "none.jpg",
        jpegs[120],
    ]  # fmt: skip
    expected = [30, 40, "ImageFormatError", 60, 200, 150, 90, "ImageNotFoundError", 120]
    got = made.levels(images)
    assert [type(g) for g in got] == [type(e) for e in expected]
    for one, other in zip(got, expected, strict=True):
        assert one == other or (isinstance(one, int) and abs(one - other) <= 1)


def test_errors_name_their_image(opened: Any, tmp_path: Path) -> None:
    made = opened(2)
    missing = tmp_path / "none.jpg"
    answers = made.detector([_encoded(_grey(5)), b"no image", missing], on_error="return")
    assert isinstance(answers[1], ImageFormatError)
    assert isinstance(answers[2], ImageNotFoundError)
    assert (answers[1].source, answers[2].source) == ("image 1", str(missing))
    with pytest.raises(ImageNotFoundError):
        made.detector([_encoded(_grey(5)), missing])


def test_damage_inside_a_scan_is_found_while_the_engine_works(opened: Any) -> None:
    made = opened(3)
    good = _encoded(_grey(77))
    images = [good, _damaged_jpeg(), good]
    answers = made.detector(images, on_error="return")
    assert isinstance(answers[1], ImageTruncatedError)
    assert answers[1].source == "image 1"
    assert abs(float(answers[0].confidence[0]) * 255 - 77) <= 1
    assert abs(float(answers[2].confidence[0]) * 255 - 77) <= 1
    with pytest.raises(ImageTruncatedError):
        made.detector(images)
    assert made.levels([good, good]) == made.levels([good])[:1] * 2


def test_the_first_images_error_is_raised_whoever_finds_it(opened: Any) -> None:
    made = opened(3)
    with pytest.raises(ImageTruncatedError) as caught:
        made.detector([_encoded(_grey(1)), _damaged_jpeg(), b"no image"])
    assert caught.value.source == "image 1"
    with pytest.raises(ImageFormatError) as other:
        made.detector([b"no image", _damaged_jpeg()])
    assert other.value.source == "image 0"


def test_without_the_check_it_is_answered_as_it_looks(opened: Any) -> None:
    made = opened(1, check_scans=False)
    assert isinstance(made.levels([_damaged_jpeg()])[0], int)


def test_the_cpu_decodes_when_it_is_asked_to(opened: Any) -> None:
    made = opened(1, decoder="cpu")
    made.detector([_noisy_jpeg()])
    pixels = np.asarray(Image.open(io.BytesIO(_noisy_jpeg())))
    expected = normalise(letterbox(pixels, PreprocessSpec(SIZE))[0], PreprocessSpec(SIZE), np.float16)
    assert np.array_equal(made.fed[-1][0], expected)


def test_a_decoder_that_does_not_exist() -> None:
    with pytest.raises(OptionError, match="decoder: expected 'dali' or 'cpu', got 'nvjpeg'"):
        Opened(1, decoder="nvjpeg")
