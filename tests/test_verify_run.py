"""`verify` from encoded images to the verdict: real engines beside the checkpoints that they were built from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pytest
from coco_reference import IMAGE_HW, Scene, found, labelled, matched
from small_dataset import annotation, document, write_dataset

import visionfast as vf
from visionfast.errors import CheckpointError, ImageError, ImageFormatError, OptionError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.verify_dataset import CocoDataset, DatasetImage
from visionfast.verify_matches import Matches
from visionfast.verify_report import BadImage, compare
from visionfast.verify_sides import answered, naive_side

# ---- what both sides answer --------------------------------------------------------------------------------


def _dataset(folder: Path, names: Sequence[str], image_hw: tuple[int, int] | None = (4, 5)) -> CocoDataset:
    images = tuple(DatasetImage(number, name, image_hw, ()) for number, name in enumerate(names))
    return CocoDataset(folder / "instances.json", "", folder, images, {})


def _side(asked: list[list[bytes]], bad: Sequence[bytes] = (), image_hw: tuple[int, int] = (4, 5)) -> Any:
    def answer(images: Sequence[bytes], *, on_error: Literal["return"]) -> list[Detections | ImageError]:
        asked.append(list(images))
        empty = Detections.empty(image_hw)
        return [ImageFormatError("bytes", "not an image") if data in bad else empty for data in images]

    return answer


def test_an_image_that_one_side_cannot_use_is_left_out_on_both(tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / name).write_bytes(name.encode())
    ours: list[list[bytes]] = []
    theirs: list[list[bytes]] = []
    told: list[tuple[str, int, int | None]] = []
    answers = answered(
        _dataset(tmp_path, ["a", "b", "missing", "../a", "d", "e"]),
        (_side(ours, bad=[b"b"]), _side(theirs, bad=[b"d"])),
        3,
        DecodeLimits(),
        lambda *progress: told.append(progress),
    )
    outcome = {image.file_name: one for image, one in answers}
    assert {name: type(one).__name__ for name, one in outcome.items()} == {
        "a": "tuple",
        "b": "ImageFormatError",
        "missing": "ImageNotFoundError",
        "../a": "ImageNotFoundError",
        "d": "ImageFormatError",
        "e": "tuple",
    }
    assert ours == [[b"a", b"b"], [b"d", b"e"]]
    assert theirs == [[b"a"], [b"d", b"e"]]
    assert told == [("verifying", 0, 6), ("verifying", 3, 6), ("verifying", 6, 6)]


def test_an_image_of_another_size_than_its_annotations_say(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    sides = (_side([]), _side([], image_hw=(5, 4)))
    for first, second in (sides, sides[::-1]):
        ((_, error),) = answered(_dataset(tmp_path, ["a"]), (first, second), 1, DecodeLimits(), lambda *_: None)
        assert isinstance(error, ImageError)
        assert error.reason == "expected 4×5 pixels as its annotations say, got 5×4"
    ((_, pair),) = answered(_dataset(tmp_path, ["a"], None), sides, 1, DecodeLimits(), lambda *_: None)
    assert not isinstance(pair, ImageError)  # nothing is said of its size


# ---- the verdict -------------------------------------------------------------------------------------------


def _scenes(count: int, good: int) -> Matches:
    """So many images with an object; it is found on the first `good` of them."""
    thing = labelled((10, 10, 40, 40))
    there, beside = found([10, 10, 50, 50]), found([200, 10, 240, 50])
    return matched([Scene((thing,), there if i < good else beside) for i in range(count)])


def _report(engine: Matches, reference: Matches, **fields: Any) -> vf.VerifyReport:
    names = ("a", "b", "c")
    given: dict[str, Any] = {field.name: "" for field in dataclasses.fields(vf.VerifyReport)}
    given |= {
        "images": engine.images,
        "boxes": compare(engine, reference, class_names=names, resamples=200, seed=0),
        "masks": None,
        "bad_images": (),
        "tolerance_points": 0.5,
        "certificate": "passed",
    }
    return vf.VerifyReport(**(given | fields))


def test_the_same_passes() -> None:
    report = _report(_scenes(20, 20), _scenes(20, 20))
    assert report.passed
    assert report.doubts == ()
    assert report.boxes.engine.ap == report.boxes.reference.ap == 1
    assert report.boxes.interval95 == (0, 0)
    assert report.boxes.class_ap == {"a": (1, 1)}
    assert report.boxes.engine.ap_small is None  # 40 × 40 pixels are a medium object
    assert report.boxes.engine.ap_medium == 1
    assert report.boxes.difference == 0


@pytest.mark.parametrize("worse", ["engine", "reference"])
def test_a_difference_beyond_the_tolerance_fails_either_way(worse: str) -> None:
    some, all_of_them = _scenes(40, 20), _scenes(40, 40)
    report = _report(some, all_of_them) if worse == "engine" else _report(all_of_them, some)
    assert not report.passed
    (reason,) = report.reasons
    assert "more than 0.5" in reason
    assert "too few" not in reason
    assert _report(some, all_of_them, tolerance_points=100).passed


def test_few_images_say_so() -> None:
    """An object more here, another less there."""
    thing = labelled((10, 10, 40, 40))
    there, beside = found([10, 10, 50, 50]), found([200, 10, 240, 50])
    pairs = [(there, beside), (beside, there), (there, there), (there, beside)] * 2
    ours, theirs = (matched([Scene((thing,), pair[side]) for pair in pairs]) for side in (0, 1))
    (reason,) = _report(ours, theirs).reasons
    assert reason.endswith("its interval includes 0: 8 images are too few to tell that from chance")
    (doubt,) = _report(ours, theirs, tolerance_points=60).doubts
    assert "reaches beyond the tolerance of 60" in doubt


def test_no_claim_where_the_certificate_failed() -> None:
    report = _report(_scenes(5, 5), _scenes(5, 5), certificate="failed")
    assert not report.passed
    assert "certificate failed" in report.reasons[0]
    assert _report(_scenes(5, 5), _scenes(5, 5), certificate="not yet run on a device").passed


def test_nothing_to_find_proves_nothing() -> None:
    nothing = matched([Scene((), Detections.empty(IMAGE_HW))])
    report = _report(nothing, nothing)
    assert report.boxes.difference is None
    assert report.boxes.interval95 is None
    assert not report.passed


def test_json() -> None:
    report = _report(_scenes(5, 5), _scenes(5, 4), bad_images=(BadImage("a.jpg", "format", "no image"),))
    content = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert content["passed"] is False
    assert content["boxes"]["difference"] == report.boxes.difference
    assert content["boxes"]["engine"]["ap_small"] is None
    assert content["bad_images"] == [{"file": "a.jpg", "kind": "format", "reason": "no image"}]


# ---- real engines ------------------------------------------------------------------------------------------

Built = Callable[..., Path]


@pytest.fixture(scope="module")
def coco(shared_data: Path) -> Path:
    folder = shared_data / "coco-val27"
    if not (folder / "instances.json").is_file():
        pytest.skip("coco-val27 is not in the test data")
    return folder


@pytest.mark.parametrize(
    ("weights", "options", "least"),
    [
        pytest.param("yolov8n-coco.pt", {}, {"boxes": 0.40}, marks=pytest.mark.slow),
        ("yolov8n-coco.pt", {"reference": "naive", "limit": 5}, {"boxes": 0.30}),
        ("yolov8n-seg-coco.pt", {"limit": 5}, {"boxes": 0.30, "masks": 0.25}),
    ],
)
def test_a_real_engine_is_as_accurate_as_its_checkpoint(
    shared_data: Path, coco: Path, built_engine: Built, weights: str, options: dict[str, Any], least: dict[str, float]
) -> None:
    path = shared_data / "weights" / weights
    if not path.is_file():
        pytest.skip(f"{weights} is not in the test data")
    report = vf.verify(built_engine(path), coco, weights=path, resamples=200, **options)
    assert report.passed, report.reasons
    assert report.images == options.get("limit", 27)
    assert report.bad_images == ()
    assert report.classes_without_category == report.categories_without_class == ()
    assert report.comparisons.keys() == least.keys()
    for kind, compared in report.comparisons.items():
        assert compared.engine.ap is not None
        assert compared.engine.ap > least[kind]
        assert compared.engine.ap50 is not None
        assert compared.engine.ap < compared.engine.ap50 < 1
        assert compared.difference == pytest.approx(0, abs=0.005)
        assert compared.interval95 is not None
        low, high = compared.interval95
        assert -0.02 < low <= high < 0.02
    if not options:
        assert report.objects == 174


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, reduced_photographs: Callable[[int], list[Path]]) -> Path:
    """Two small photographs with objects, one that is missing, one that is none."""
    images: dict[str, tuple[int, int]] = {}
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "val").mkdir()
    for path in reduced_photographs(4):
        shutil.copy(path, folder / "val" / path.name)
        height, width = cv2.imread(str(path)).shape[:2]
        images[path.name] = (height, width)
    (folder / "val" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    images |= {"broken.png": (3, 4), "gone.png": (3, 4)}
    things = [annotation(1, 1), annotation(2, 1, category=2), annotation(3, 3), annotation(4, 1, category=3)]
    write_dataset(folder, document(images, things, {1: "Kind-0", 2: "kind 1", 3: "cow"}))
    return folder


def test_what_is_left_out_is_named(pictures: Path, built_engine: Built, seeded_checkpoint: Callable[..., Path]) -> None:
    weights = seeded_checkpoint("detect", 3)
    report = vf.verify(built_engine(weights), pictures, weights=weights, resamples=20)
    assert report.images == 2
    assert [(bad.file, bad.kind) for bad in report.bad_images] == [
        ("broken.png", "truncated"),
        ("gone.png", "not-found"),
    ]
    assert report.classes == ("kind 0", "kind 1")
    assert report.classes_without_category == ("kind 2",)
    assert report.categories_without_class == ("cow",)
    assert report.objects == 2  # of images that could be used, and of classes that both have
    assert report.boxes.class_ap.keys() == {"kind 0", "kind 1"}
    assert report.passed


def test_what_is_refused(
    pictures: Path, tmp_path: Path, built_engine: Built, seeded_checkpoint: Callable[..., Path]
) -> None:
    weights = seeded_checkpoint("detect", 3)
    engine = built_engine(weights)
    for options, word in (
        ({"reference": "official"}, "eager or naive"),
        ({"tolerance_points": -1}, "at least 0"),
        ({"tolerance_points": float("nan")}, "at least 0"),
        ({"resamples": 0}, "resamples"),
        ({"limit": 0}, "limit"),
    ):
        with pytest.raises(OptionError, match=word):
            vf.verify(engine, pictures, weights=weights, **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="expected the weights that the engine was built from"):
        vf.verify(engine, pictures, weights=seeded_checkpoint("segment", 2))
    write_dataset(tmp_path, document({"gone.png": (3, 4), "b.png": (3, 4)}, [annotation(1, 1)]))
    (tmp_path / "val" / "b.png").touch()
    with pytest.raises(OptionError, match="none of its 2 images can be used; gone"):
        vf.verify(engine, tmp_path, weights=weights)
    write_dataset(tmp_path, document({"b.png": (3, 4)}, [annotation(1, 1, iscrowd=1)]))
    with pytest.raises(OptionError, match="expected objects of the engine's classes on 1 images"):
        vf.verify(engine, tmp_path, weights=weights)


def test_a_segmenter_on_boxes_alone(
    pictures: Path, built_engine: Built, seeded_checkpoint: Callable[..., Path]
) -> None:
    weights = seeded_checkpoint("segment", 2)
    engine = built_engine(weights)
    report = vf.verify(engine, pictures, weights=weights, limit=1, resamples=5)
    assert report.masks is None
    assert report.comparisons.keys() == {"boxes"}
    with pytest.raises(OptionError, match="finds boxes only"):
        vf.verify(engine, pictures, weights=weights, reference="naive")


def test_naive_pytorch_names_what_it_cannot_decode(
    photographs: list[Path], built_engine: Built, seeded_checkpoint: Callable[..., Path]
) -> None:
    from visionfast.artifacts import read_manifest

    weights = seeded_checkpoint("detect", 3)
    manifest = read_manifest(built_engine(weights))
    side = naive_side(manifest, weights, {"conf": 0.05, "iou": 0.7, "max_det": 5, "limits": None})
    broken_png = b"\x89PNG\r\n\x1a\n" + bytes(40)
    answers = side([b"junk", photographs[0].read_bytes(), broken_png], on_error="return")
    assert [type(answer) for answer in answers] == [ImageFormatError, Detections, ImageFormatError]
    assert isinstance(answers[1], Detections)
    assert len(answers[1]) == 5
    assert np.isfinite(answers[1].xyxy).all()
