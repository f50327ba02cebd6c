"""Everything mode on a session that draws discs: its bookkeeping, its options, its memory.

That its masks are the official generators' is in `test_everything_official.py`.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from visionfast.errors import BackendError, OptionError, ShapeError
from visionfast.everything import everything
from visionfast.postprocess.decoded import HostDecoded
from visionfast.postprocess.nms import box_iou
from visionfast.results import Masks
from visionfast.sessions.prompts import Features
from visionfast.types import ModelSpec, PreprocessSpec, PromptSpec, PromptTensors

_SPEC = ModelSpec(
    name="discs",
    family="sam",
    architecture="discs",
    task="prompt-segment",
    graphs=(),
    preprocess=PreprocessSpec((1024, 1024), "longest-side", "bilinear-antialias", None),
    class_names=(),
    strides=(),
    prompts=PromptSpec(box_first=False, pad_with_box=False, score_threshold=0.5, stability_threshold=0.9),
)
_PLACE = np.arange(256, dtype=np.float32) + 0.5


class _Discs:
    """Around each point discs of radius 40, 12, 30 and 60 (of 256), scored 0.9, 0.8, 0.7, 0.6, less to the right."""

    points = 32

    def __init__(self, prompts: int = 4, *, score: float = 1.0, edge: float = 8.0) -> None:
        self.prompts = prompts
        self.encoded: list[npt.NDArray[np.uint8]] = []
        self.decoded: list[tuple[Features, int]] = []
        self._score, self._edge = score, edge

    def encode(self, pixels: npt.NDArray[np.uint8], stage_ns: dict[str, int] | None = None) -> Features:
        assert pixels.flags.c_contiguous
        self.encoded.append(pixels)
        if stage_ns is not None:
            stage_ns |= {"preprocess": 1, "encoder": 10}
        return {"mean": pixels.mean()}

    def decode(self, features: Features, prompts: PromptTensors) -> HostDecoded:
        assert (prompts.labels == (1, -1)).all()
        self.decoded.append((features, len(prompts)))
        centre = prompts.points[:, 0] / 4  # (P, 2)
        away = np.hypot(_PLACE - centre[:, :1, None], _PLACE[:, None] - centre[:, 1:, None])  # (P, 256, 256)
        radius = np.array([40, 12, 30, 60], np.float32)[:, None, None]
        logits = ((radius - away[:, None]) * np.float32(self._edge)).astype(np.float32)
        scores = np.array([0.9, 0.8, 0.7, 0.6]) - centre[:, :1] / 10000
        return HostDecoded(logits, (scores * self._score).astype(np.float32), "longest-side")

    def close(self) -> None:
        pass


def _image(height: int = 96, width: int = 128) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def _same(a: Masks, b: Masks) -> bool:
    pairs = [(a.score, b.score), (a.prompt, b.prompt), (a.stability, b.stability), (a.points, b.points)]
    return a.mask == b.mask and all(np.array_equal(x, y) for x, y in pairs)


# ---- what comes out -------------------------------------------------------------------------------------------


def test_of_each_point_the_three_masks_that_are_no_clear_prompts() -> None:
    masks = everything(_image(), _Discs(), _SPEC, points_per_side=2, nms_threshold=1)
    assert masks.image_hw == masks.mask.image_hw == (96, 128)
    assert masks.prompt.tolist() == [0, 2, 1, 3] * 3  # by score: radius 12, 30, 60; then from left to right
    assert (np.diff(masks.score) <= 0).all()
    assert masks.points is not None
    np.testing.assert_array_equal(masks.points[:4], [[32, 24], [32, 72], [96, 24], [96, 72]])
    assert masks.stability is not None
    assert ((masks.stability > 0.9) & (masks.stability < 1)).all()
    left, top, right, bottom = masks.xyxy[0]  # radius 12 of 256 is 6 of 128
    assert (right - left, bottom - top) == (12, 12)
    assert ((left + right) / 2, (top + bottom) / 2) == (32, 24)
    assert masks.logits is None


def test_duplicates_go_and_nothing_else() -> None:
    every = everything(_image(), _Discs(), _SPEC, points_per_side=8, nms_threshold=1)
    masks = everything(_image(), _Discs(), _SPEC, points_per_side=8, nms_threshold=0.3)
    assert len(every) == 3 * 64
    stayed = np.array([counts in masks.mask.counts for counts in every.mask.counts])
    assert 0 < len(masks) == stayed.sum() < len(every)
    corners = every.xyxy - np.array([0, 0, 1, 1], np.float32)  # inclusive, as the generators compare boxes
    overlap = box_iou(corners, corners) > 0.3
    np.fill_diagonal(overlap, False)
    assert not overlap[np.ix_(stayed, stayed)].any()
    better = np.tri(len(every), k=-1, dtype=bool)  # `every` comes by descending score
    assert (overlap & better & stayed).any(axis=1)[~stayed].all()


@pytest.mark.parametrize("crop_layers", [0, 1])
def test_how_many_prompts_go_at_once_does_not_matter(crop_layers: int) -> None:
    sessions = [_Discs(prompts) for prompts in (1, 5, 64)]
    one, *others = [
        everything(_image(), session, _SPEC, points_per_side=4, crop_layers=crop_layers) for session in sessions
    ]
    assert len(one) > 0
    assert all(_same(one, other) for other in others)
    for session in sessions:
        counts = [count for _, count in session.decoded]
        assert max(counts) == min(session.prompts, 16)
        assert sum(counts) == 16 * (1 + 4 * crop_layers)


def test_masks_of_crops_come_first_and_in_the_images_pixels() -> None:
    image, session = _image(600, 800), _Discs()
    whole = everything(image, session, _SPEC, points_per_side=3)
    masks = everything(image, session, _SPEC, points_per_side=3, crop_layers=1, crop_nms_threshold=1)
    from_crops = masks.prompt >= 9
    assert from_crops.any()
    assert not from_crops.all()
    assert (np.diff(from_crops.astype(int)) <= 0).all()
    assert _same(masks[~from_crops], whole)
    assert masks.points is not None
    middle = (masks.xyxy[:, :2] + masks.xyxy[:, 2:]) / 2
    inside = (masks.xyxy > 0).all(axis=1) & (masks.xyxy[:, 2:] < (800, 600)).all(axis=1)  # not cut off
    assert (inside & from_crops).any()
    np.testing.assert_allclose(middle[inside], masks.points[inside], atol=1.5)


def test_disks_cut_off_by_a_crop_are_left_to_others() -> None:
    image = _image(600, 800)
    masks = everything(image, _Discs(), _SPEC, points_per_side=3, crop_layers=1, nms_threshold=1, crop_nms_threshold=1)
    assert 3 * 9 < len(masks) < 3 * 9 * 5
    assert (np.bincount(masks.prompt)[:9] == 3).all()  # of the whole image none is


def test_crops_are_encoded_one_by_one_and_only_they_where_the_image_is_known() -> None:
    image, session = _image(), _Discs()
    everything(image, session, _SPEC, points_per_side=2, crop_layers=1)
    assert len(session.encoded) == 5
    np.testing.assert_array_equal(session.encoded[0], image)
    last = session.encoded[4]  # the crop below to the right
    np.testing.assert_array_equal(last, image[-last.shape[0] :, -last.shape[1] :])

    known = _Discs()
    features = {"mean": 5.0}
    everything(image, known, _SPEC, points_per_side=2, crop_layers=1, features=features)
    assert len(known.encoded) == 4
    assert known.decoded[0][0] is features
    assert [f["mean"] for f, _ in known.decoded[1:]] == [part.mean() for part in known.encoded]


def test_a_cache_may_stand_in_front_of_the_encoder() -> None:
    session, seen = _Discs(), []

    def encode(pixels: npt.NDArray[np.uint8], stage_ns: dict[str, int]) -> Features:
        seen.append(pixels.shape)
        stage_ns["hash"] = 3
        return {"mean": 1.0}

    masks = everything(_image(), session, _SPEC, points_per_side=2, crop_layers=1, encode=encode)
    assert not session.encoded
    assert len(seen) == 5
    assert masks.stage_ns["hash"] == 15


def test_where_the_time_went() -> None:
    masks = everything(_image(), _Discs(), _SPEC, points_per_side=2, crop_layers=1)
    assert list(masks.stage_ns) == ["preprocess", "encoder", "decoder", "postprocess"]
    assert (masks.stage_ns["preprocess"], masks.stage_ns["encoder"]) == (5, 50)
    assert min(masks.stage_ns.values()) > 0
    known = everything(_image(), _Discs(), _SPEC, points_per_side=2, features={})
    assert list(known.stage_ns) == ["decoder", "postprocess"]


def test_progress_is_told_in_points() -> None:
    told: list[tuple[int, int]] = []
    everything(
        _image(),
        _Discs(prompts=3),
        _SPEC,
        points_per_side=4,
        crop_layers=1,
        crop_points_scale=2,
        progress=lambda done, total: told.append((done, total)),
    )
    first = [3, 6, 9, 12, 15, 16]
    assert told == [(done, 32) for done in [*first, 19, 20, 23, 24, 27, 28, 31, 32]]


# ---- awkward cases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hw", [(1, 1), (1, 500), (500, 1), (3, 2)])
@pytest.mark.parametrize("crop_layers", [0, 2])
def test_images_of_hardly_any_pixels(hw: tuple[int, int], crop_layers: int) -> None:
    masks = everything(
        _image(*hw), _Discs(), _SPEC, points_per_side=2, crop_layers=crop_layers, stability_threshold=0, min_area=2
    )
    assert masks.image_hw == hw


@pytest.mark.parametrize("score", [float("nan"), -1.0, 0.1])
def test_nothing_is_left_of_bad_scores(score: float) -> None:
    masks = everything(_image(), _Discs(score=score), _SPEC, points_per_side=2, crop_layers=1, min_area=5)
    assert len(masks) == 0
    assert masks.image_hw == masks.mask.image_hw == (96, 128)
    assert masks.points is not None
    assert masks.points.shape == (0, 2)


def test_a_threshold_of_zero_keeps_all() -> None:
    session = _Discs(score=-1.0, edge=0.001)
    masks = everything(
        _image(), session, _SPEC, points_per_side=2, score_threshold=0, stability_threshold=0, nms_threshold=1
    )
    assert len(masks) == 12
    assert (masks.score < 0).all()


def test_a_session_that_fails_ends_it() -> None:
    class Failing(_Discs):
        def decode(self, features: Features, prompts: PromptTensors) -> HostDecoded:
            if len(self.decoded) == 2:
                raise BackendError("decoder: it failed")
            return super().decode(features, prompts)

    with pytest.raises(BackendError, match="it failed"):
        everything(_image(), Failing(), _SPEC, points_per_side=4)


def test_memory_does_not_grow_with_the_points() -> None:
    image = _image(480, 640)

    def peak(points_per_side: int) -> tuple[int, int]:
        tracemalloc.start()
        try:
            masks = everything(image, _Discs(prompts=2), _SPEC, points_per_side=points_per_side, nms_threshold=1)
            return tracemalloc.get_traced_memory()[1], len(masks)
        finally:
            tracemalloc.stop()

    everything(image, _Discs(), _SPEC, points_per_side=1)  # what is kept from call to call is there now
    (few_bytes, few), (many_bytes, many) = peak(3), peak(12)
    assert (few, many) == (3 * 9, 3 * 144)
    assert many_bytes - few_bytes < (many - few) * 2048  # of each mask its run lengths; its pixels are 307,200
    assert many_bytes < many * 480 * 640 / 8


# ---- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points_per_side": 0}, "points_per_side: expected a whole number from 1 to 1024, got 0"),
        ({"score_threshold": 1.5}, "score_threshold: expected a number from 0 to 1, got 1.5"),
        ({"score_threshold": float("nan")}, "score_threshold: expected a number from 0 to 1, got nan"),
        ({"stability_threshold": -0.1}, "stability_threshold: expected a number from 0 to 1, got -0.1"),
        ({"stability_offset": -1.0}, "stability_offset: expected a number from 0 to 1e+06, got -1.0"),
        ({"stability_offset": float("inf")}, "stability_offset: expected a number from 0 to 1e+06, got inf"),
        ({"nms_threshold": 7}, "nms_threshold: expected a number from 0 to 1, got 7"),
        ({"crop_nms_threshold": -1}, "crop_nms_threshold: expected a number from 0 to 1, got -1"),
        ({"crop_layers": -1}, "crop_layers: expected a whole number from 0 to 4, got -1"),
        ({"crop_layers": 5}, "crop_layers: expected a whole number from 0 to 4, got 5"),
        ({"crop_overlap": 1.0}, "crop_overlap: expected a number from 0 to 0.999, got 1.0"),
        ({"crop_points_scale": 0}, "crop_points_scale: expected a whole number from 1 to 1024, got 0"),
        (
            {"crop_layers": 2, "crop_points_scale": 3, "points_per_side": 8},
            "points_per_side: expected at least 9, or the last of 2 crop layers would have no points at "
            "crop_points_scale 3; got 8",
        ),
        ({"min_area": -1}, "min_area: expected a whole number from 0 to 1099511627776, got -1"),
        ({"min_area": 2.5}, "min_area: expected a whole number from 0 to 1099511627776, got 2.5"),
        ({"points_per_side": "4"}, "points_per_side: expected a whole number from 1 to 1024, got '4'"),
        ({"points_per_side": True}, "points_per_side: expected a whole number from 1 to 1024, got True"),
        ({"points_per_side": 100_000}, "points_per_side: expected a whole number from 1 to 1024, got 100000"),
        ({"nms_threshold": None}, "nms_threshold: expected a number from 0 to 1, got None"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    session = _Discs()
    with pytest.raises(OptionError) as raised:
        everything(_image(), session, _SPEC, **options)
    assert str(raised.value) == message
    assert not session.encoded


def test_the_models_own_thresholds_are_the_default() -> None:
    assert _SPEC.prompts is not None
    strict = dataclasses.replace(_SPEC, prompts=dataclasses.replace(_SPEC.prompts, score_threshold=0.75))
    by_model = everything(_image(), _Discs(), strict, points_per_side=3)
    by_option = everything(_image(), _Discs(), _SPEC, points_per_side=3, score_threshold=0.75)
    assert len(by_model) == 9
    assert _same(by_model, by_option)


def test_a_detector_has_no_everything_mode() -> None:
    with pytest.raises(OptionError, match="everything: expected a prompt-segment model, got yolo, which is for detect"):
        everything(_image(), _Discs(), dataclasses.replace(_SPEC, name="yolo", task="detect", prompts=None))


@pytest.mark.parametrize(
    "pixels", [np.zeros((0, 5, 3), np.uint8), np.zeros((5, 5), np.uint8), np.zeros((5, 5, 3), np.float32)]
)
def test_pixels_of_another_kind(pixels: npt.NDArray[Any]) -> None:
    with pytest.raises(ShapeError, match=r"pixels: expected \(H, W, 3\) uint8"):
        everything(pixels, _Discs(), _SPEC)
