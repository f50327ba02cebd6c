"""From file to answer the same as ultralytics' own predict, on real weights and real pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from visionfast.pipeline import open_engine
from visionfast.postprocess.masks import InstanceMasks, mask_iou
from visionfast.postprocess.nms import box_iou
from visionfast.results import Detections

pytest.importorskip("ultralytics", reason="parity needs ultralytics: pip install 'visionfast[build]'")

Pixels = npt.NDArray[np.uint8]
_CONF, _IOU = 0.25, 0.7
# Two exact decoders of slightly different sums may differ on an object whose confidence is this near the threshold.
_BORDERLINE = 1e-3


@pytest.fixture(scope="module")
def variants(photographs: list[Path]) -> dict[str, Pixels]:
    """Crops, flips and resizes of the two photographs: odd sizes, small, large, wide and tall."""
    made: dict[str, Pixels] = {}
    for path in photographs:
        image = Image.open(path).convert("RGB")
        w, h = image.size
        for name, variant in {
            "whole": image,
            "flipped": image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
            "left": image.crop((0, 0, w // 2, h)),
            "right": image.crop((w // 3, 0, w, h)),
            "lower": image.crop((0, h // 3, w, h)),
            "odd": image.crop((11, 7, w - 14, h - 22)),
            "band": image.crop((0, h // 2, w, h // 2 + 201)),
            "half": image.resize((w // 2, h // 2), Image.Resampling.BILINEAR),
            "square": image.resize((640, 640), Image.Resampling.BICUBIC),
            "third": image.resize((w // 3 + 1, h // 3), Image.Resampling.LANCZOS),
            "double": image.resize((w * 3 // 2, h * 3 // 2), Image.Resampling.BILINEAR),
            "wide": image.resize((w * 2, h), Image.Resampling.BILINEAR),
        }.items():
            made[f"{path.stem} {name}"] = np.asarray(variant)
    assert len(made) >= 22
    return made


def _png(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _ultralytics(checkpoint: Path) -> Callable[[Pixels], Detections]:
    from ultralytics import YOLO

    yolo = YOLO(checkpoint)

    def predict(rgb: Pixels) -> Detections:
        bgr = np.ascontiguousarray(rgb[..., ::-1])
        options = {"rect": False, "conf": _CONF, "iou": _IOU, "imgsz": 640, "verbose": False, "device": "cpu"}
        (result,) = yolo.predict(bgr, retina_masks=True, **options)
        boxes = result.boxes
        masks: Any = result.masks
        return Detections(
            xyxy=boxes.xyxy.numpy(),
            confidence=boxes.conf.numpy(),
            class_id=boxes.cls.numpy().astype(np.int64),
            image_hw=rgb.shape[:2],  # type: ignore[arg-type]
            mask=None if masks is None else InstanceMasks.from_dense(masks.data.numpy() > 0.5),
        )

    return predict


def _pairs(expected: Detections, got: Detections, what: str) -> Iterator[tuple[int, int]]:
    """Each object's counterpart by greatest overlap; who has none must be borderline."""
    iou = box_iou(expected.xyxy, got.xyxy)  # (N, M)
    iou[expected.class_id[:, None] != got.class_id[None, :]] = 0
    left, right = set(range(len(expected))), set(range(len(got)))
    for i, j in sorted(np.ndindex(*iou.shape), key=lambda ij: -iou[ij]):
        if i in left and j in right and iou[i, j] > 0.5:
            left.remove(i)
            right.remove(j)
            assert iou[i, j] >= 0.99, f"{what}: IoU {iou[i, j]}"
            assert abs(expected.confidence[i] - got.confidence[j]) <= 0.01, what
            yield i, j
    alone = [*expected.confidence[sorted(left)], *got.confidence[sorted(right)]]
    assert all(confidence - _CONF <= _BORDERLINE for confidence in alone), f"{what}: only one side has {alone}"


def test_detection(
    people_checkpoint: Path, built_engine: Callable[..., Path], variants: dict[str, Pixels], photographs: list[Path]
) -> None:
    predict = _ultralytics(people_checkpoint)
    matched = 0
    with open_engine(built_engine(people_checkpoint, size_hw=(640, 640)), conf=_CONF, iou=_IOU) as detector:
        for what, pixels in variants.items():
            (got,) = detector(_png(pixels))
            matched += len(list(_pairs(predict(pixels), got, what)))
        for path in photographs:
            # the file itself, whose JPEG decoder need not be the one that made the pixels above
            (got,) = detector(path)
            matched += len(list(_pairs(predict(variants[f"{path.stem} whole"]), got, path.name)))
    assert matched >= 40


def test_segmentation(shared_data: Path, built_engine: Callable[..., Path]) -> None:
    checkpoint = shared_data / "weights" / "yolov8n-seg-coco.pt"
    images = sorted((shared_data / "coco-val27" / "images").glob("*.jpg"))
    if not checkpoint.is_file() or not images:
        pytest.skip(f"{shared_data} has no weights/yolov8n-seg-coco.pt or no coco-val27/images")
    predict = _ultralytics(checkpoint)
    matched = 0
    with open_engine(built_engine(checkpoint, size_hw=(640, 640)), conf=_CONF, iou=_IOU) as segmenter:
        for path in images:
            pixels = np.asarray(Image.open(path).convert("RGB"))
            expected, (got,) = predict(pixels), segmenter(_png(pixels))
            pairs = list(_pairs(expected, got, path.name))
            matched += len(pairs)
            if pairs:
                assert expected.mask is not None
                assert got.mask is not None
                iou = mask_iou(expected.mask, got.mask)
                worst = min(iou[i, j] for i, j in pairs)
                assert worst >= 0.98, f"{path.name}: mask IoU {worst}"
    assert matched >= 80
