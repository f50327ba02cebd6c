"""`predict` on a SAM engine: the command line in this process, on a real engine of seeded weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from visionfast.cli import app
from visionfast.errors import OptionError, VisionfastError
from visionfast.pipeline import Detector
from visionfast.postprocess import InstanceMasks
from visionfast.predict_prompts import Prompts, Segmented, _masked
from visionfast.prompt_segmenter import PromptSegmenter
from visionfast.results import Detections, Masks

HW = (90, 160)


def predict(*arguments: str | float | Path) -> int:
    """Its exit code."""
    return int(app(["predict", *map(str, arguments)], standalone_mode=False) or 0)


@pytest.fixture(scope="session")
def sam_engine(built_engine: Callable[..., Path], sam_checkpoint: Callable[..., Path]) -> Path:
    return built_engine(sam_checkpoint("mobile_sam"))


@pytest.fixture(scope="session")
def yolo_engine(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]) -> Path:
    return built_engine(seeded_checkpoint("detect", 3))


@pytest.fixture(scope="module")
def segmenter(sam_engine: Path) -> Iterator[PromptSegmenter]:
    with PromptSegmenter.open(sam_engine) as opened:
        yield opened


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps what the encoder makes, over all tests."""
    return tmp_path_factory.mktemp("encoded")


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    pixels = np.random.default_rng(0).integers(0, 256, (9, 16, 3), dtype=np.uint8)
    path.write_bytes(cv2.imencode(".png", cv2.resize(pixels, HW[::-1], interpolation=cv2.INTER_CUBIC))[1].tobytes())
    return path


def _records(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def _same_masks(records: list[dict[str, Any]], masks: Masks) -> None:
    assert [record["mask"] for record in records] == masks.mask.rle()
    np.testing.assert_allclose([record["score"] for record in records], masks.score, atol=5.1e-5)


# ---- clicks and boxes --------------------------------------------------------------------------------------


def test_points_and_a_box_are_one_prompt(
    sam_engine: Path,
    picture: Path,
    encoded: Path,
    segmenter: PromptSegmenter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = ("--point", "80,45", "--point", "10.5,5:0", "--box", "20,10,140,80")
    assert predict(sam_engine, picture, *prompts, "--json", "-", "--save", tmp_path, "--cache", encoded) == 0
    (record,) = _records(capsys.readouterr().out)
    assert list(record) == ["file", "image_hw", "masks", "ms"]
    assert record["image_hw"] == list(HW)
    assert {"decoder", "postprocess"} <= set(record["ms"])
    (one,) = record["masks"]
    assert list(one) == ["prompt", "score", "xyxy", "area", "mask"]

    masks = segmenter.segment(picture, points=[(80, 45, 1), (10.5, 5, 0)], boxes=(20, 10, 140, 80))
    _same_masks(record["masks"], masks)
    assert one["prompt"] == 0
    assert one["area"] == masks.mask.dense().sum()
    assert one["xyxy"] == masks.xyxy[0].tolist()
    assert cv2.imread(str(tmp_path / "picture.jpg")).shape == (*HW, 3)


def test_several_boxes_are_several_prompts_and_multimask_is_three_masks_each(
    sam_engine: Path,
    picture: Path,
    encoded: Path,
    segmenter: PromptSegmenter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    boxes = ("--box", "20,10,140,80", "--box", "0,0,160,90")
    assert (
        predict(
            sam_engine,
            picture,
            *boxes,
            "--multimask",
            "--json",
            tmp_path / "a.jsonl",
            "--cache",
            encoded,
            "--save",
            tmp_path,
        )
        == 0
    )
    assert ": 6 masks, scores " in capsys.readouterr().out
    (record,) = _records((tmp_path / "a.jsonl").read_text())
    assert [one["prompt"] for one in record["masks"]] == [0, 0, 0, 1, 1, 1]
    _same_masks(record["masks"], segmenter.segment(picture, boxes=[(20, 10, 140, 80), (0, 0, 160, 90)], multimask=True))
    assert cv2.imread(str(tmp_path / "picture.jpg")).shape == (3 * HW[0], HW[1], 3)


def test_the_second_call_finds_the_image_encoded(
    sam_engine: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = []
    for point in ("80,45", "20,20"):
        assert predict(sam_engine, picture, "--point", point, "--json", "-", "--cache", tmp_path / "encoded") == 0
        records += _records(capsys.readouterr().out)
    assert ["encoder" in record["ms"] for record in records] == [True, False]


def test_a_point_outside_one_image_is_that_image_s_error(
    sam_engine: Path, picture: Path, encoded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.png"
    small.write_bytes(cv2.imencode(".png", np.zeros((40, 50, 3), np.uint8))[1].tobytes())
    words = tmp_path / "words.jpg"
    words.write_text("these are words")
    paths = (small, words, picture, tmp_path / "missing.jpg")
    assert predict(sam_engine, *paths, "--point", "80,45", "--json", "-", "--cache", encoded) == 1
    said = capsys.readouterr()
    records = _records(said.out)
    assert [record.get("error", {}).get("kind") for record in records] == ["prompt", "format", None, "not-found"]
    complaints = [line for line in said.err.splitlines() if line.startswith("visionfast: ")]
    assert len(complaints) == 4
    assert complaints[0].startswith(f"visionfast: {small}: ")
    assert "80" in complaints[0]
    assert complaints[3] == "visionfast: 3 of 4 images could not be answered"


# ---- everything --------------------------------------------------------------------------------------------


def test_everything(
    sam_engine: Path,
    picture: Path,
    encoded: Path,
    segmenter: PromptSegmenter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"points_per_side": 2, "score_threshold": 0.0, "stability_threshold": 0.0, "min_area": 3}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert (
        predict(sam_engine, picture, "--everything", *flags, "--json", "-", "--save", tmp_path, "--cache", encoded) == 0
    )
    said = capsys.readouterr()
    (record,) = _records(said.out)
    masks = segmenter.everything(picture, **options)
    assert len(masks) > 0
    _same_masks(record["masks"], masks)
    for one, stability, point in zip(record["masks"], masks.stability, masks.points, strict=True):
        assert list(one) == ["prompt", "score", "xyxy", "area", "mask", "stability", "point"]
        assert one["stability"] == pytest.approx(stability, abs=5.1e-5)
        assert one["point"] == point.tolist()
    assert f"{HW[1]}×{HW[0]}: {len(masks)} mask" in said.err
    assert cv2.imread(str(tmp_path / "picture.jpg")).shape == (*HW, 3)


# ---- the boxes of a detector -------------------------------------------------------------------------------


def test_a_detector_s_boxes_get_masks(
    sam_engine: Path,
    yolo_engine: Path,
    photographs: list[Path],
    encoded: Path,
    segmenter: PromptSegmenter,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    photo = photographs[0]
    chosen = ("--conf", 0.05, "--max-det", 3)
    call = (sam_engine, photo, "--boxes-from", yolo_engine, *chosen, "--json", "-", "--cache", encoded)
    assert predict(*call, "--save", tmp_path) == 0
    (record,) = _records(capsys.readouterr().out)
    assert predict(yolo_engine, photo, *chosen, "--json", "-") == 0
    (alone,) = _records(capsys.readouterr().out)

    assert list(record) == ["file", "image_hw", "detections", "ms"]
    assert len(record["detections"]) == 3
    detected = [{k: v for k, v in one.items() if k not in ("mask", "mask_score")} for one in record["detections"]]
    assert detected == alone["detections"]
    with Detector.open(yolo_engine, conf=0.05, max_det=3) as detector:
        (found,) = detector(photo)
    masks = segmenter.segment(photo, boxes=found.xyxy)
    assert [one["mask"] for one in record["detections"]] == masks.mask.rle()
    np.testing.assert_allclose([one["mask_score"] for one in record["detections"]], masks.score, atol=5.1e-5)
    assert set(record["ms"]) >= {"detector", "decoder", "postprocess"}
    assert (tmp_path / "bus.jpg").is_file()


def test_where_a_detector_finds_nothing_sam_is_not_asked(
    sam_engine: Path, yolo_engine: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = (sam_engine, picture, tmp_path / "missing.jpg", "--boxes-from", yolo_engine, "--conf", 0.9)
    assert predict(*call, "--json", "-", "--save", tmp_path) == 1
    record, missing = _records(capsys.readouterr().out)
    assert record["detections"] == []
    assert list(record["ms"]) == ["detector"]
    assert missing["error"]["kind"] == "not-found"
    assert (tmp_path / "picture.jpg").is_file()


def test_a_box_without_area_has_an_empty_mask(segmenter: PromptSegmenter, picture: Path) -> None:
    found = Detections(
        xyxy=np.array([[5, 5, 5, 60], [20, 10, 140, 80]], np.float32),
        confidence=np.array([0.5, 0.4], np.float32),
        class_id=np.array([0, 1]),
        image_hw=HW,
    )
    first, second = _masked(found, segmenter, picture, ["cat", "dog"]).record()["detections"]
    assert first["mask"] == InstanceMasks.from_dense(np.zeros((1, *HW), bool)).rle()[0]
    assert first["mask_score"] == 0
    assert second["mask"] == segmenter.segment(picture, boxes=(20, 10, 140, 80)).mask.rle()[0]


# ---- what is said ------------------------------------------------------------------------------------------


def _made(scores: list[float]) -> Masks:
    planes = np.zeros((len(scores), 4, 5), bool)
    return Masks(
        InstanceMasks.from_dense(planes), np.array(scores, np.float32), np.zeros(len(scores), np.int64), (4, 5)
    )


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([], "no masks"),
        ([0.934], "1 mask, score 0.93"),
        ([0.1, 0.98, 0.5], "3 masks, scores 0.10, 0.98, 0.50"),
        ([0.1, 0.98, 0.5, 0.2, 0.3], "5 masks, scores 0.10 to 0.98"),
    ],
)
def test_words(scores: list[float], words: str) -> None:
    assert Segmented(_made(scores), Prompts()).words() == words


def test_an_empty_mask_is_a_record_like_any_other() -> None:
    (one,) = Segmented(_made([0.25]), Prompts()).record()["masks"]
    assert one == {"prompt": 0, "score": 0.25, "xyxy": [0, 0, 0, 0], "area": 0, "mask": _made([0]).mask.rle()[0]}
    assert Segmented(_made([]), Prompts()).record() == {"masks": []}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--point X,Y or --box X1,Y1,X2,Y2, --everything, or --boxes-from"),
        (("--point", "1,2", "--everything"), "--point with --everything"),
        (("--box", "1,2,3,4", "--boxes-from", "YOLO"), "--box with --boxes-from"),
        (("--everything", "--boxes-from", "YOLO"), "--everything with --boxes-from"),
        (("--everything", "--multimask"), "--multimask: goes with --point or --box, got --everything"),
        (("--boxes-from", "YOLO", "--multimask"), "--multimask: goes with --point or --box, got --boxes-from"),
        (("--point", "1,2", "--points-per-side", "0"), "--points-per-side: goes with --everything, got --point"),
        (("--box", "1,2,3,4", "--crop-layers", "1"), "--crop-layers: goes with --everything, got --box"),
        (("--point", "1,2", "--classes", "person"), "--classes: goes with --boxes-from, got --point"),
        (("--everything", "--conf", "0"), "--conf: goes with --boxes-from, got --everything"),
        (("--point", "1,2", "--no-graph"), "--no-graph: goes with --boxes-from, got --point"),
        (("--boxes-from", "SAM"), "--boxes-from .*: expected a detector's engine, got one for prompt-segment"),
        (("--boxes-from", "nothing"), "nothing"),
        (("--boxes-from", "YOLO", "--classes", "horse"), "horse"),
        (("--point", "1,2", "--box", "1,2,3,4", "--box", "1,2,3,5"), "--point with 2 --box: expected points with one"),
        (("--point", "one,two"), "one,two"),
        (("--box", "1,2,3"), "1,2,3"),
        (("--everything", "--points-per-side", "0"), "points_per_side"),
        (("--point", "1,2", "--threads", "0"), "threads"),
        (("--point", "1,2", "--device", "cuda"), "cuda"),
    ],
)
def test_options_that_do_not_fit_a_sam_engine(
    sam_engine: Path, yolo_engine: Path, picture: Path, arguments: tuple[str, ...], words: str
) -> None:
    named = {"SAM": str(sam_engine), "YOLO": str(yolo_engine)}
    with pytest.raises(VisionfastError, match=words) as caught:
        predict(sam_engine, picture, *(named.get(word, word) for word in arguments))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (("--point", "1,2"), "--point"),
        (("--box", "1,2,3,4"), "--box"),
        (("--multimask",), "--multimask"),
        (("--everything",), "--everything"),
        (("--min-area", "0"), "--min-area"),
        (("--boxes-from", "YOLO"), "--boxes-from"),
        (("--cache", "folder"), "--cache"),
    ],
)
def test_options_that_do_not_fit_a_detector_s_engine(
    yolo_engine: Path, picture: Path, arguments: tuple[str, ...], flag: str
) -> None:
    with pytest.raises(OptionError, match=f"^{flag}: .* is for detect and takes none of the options of a SAM engine"):
        predict(yolo_engine, picture, *arguments)


def test_an_engine_s_tensors_are_shown(sam_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not app(["show", str(sam_engine)], standalone_mode=False)
    shown = {
        line.split("  ")[0].strip(): line.strip().split("  ", 1)[-1].strip()
        for line in capsys.readouterr().out.splitlines()
    }
    assert "classes" not in shown
    assert shown["encoder input"] == "1 × 1024×1024, images (1, 3, 1024, 1024) float32"
    assert shown["encoder output"] == "image_embeddings (1, 256, 64, 64) float32"
    assert "points (prompts 1..64, points 1..32, 2) float32" in shown["decoder input"]
    assert shown["decoder output"] == "masks (prompts 1..64, 4, 256, 256) float32, scores (prompts 1..64, 4) float32"
