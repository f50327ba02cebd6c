"""Everything mode: the masks of a whole image, prompted by a grid of points, with doubtful ones and duplicates removed.

Decision by decision as Segment Anything's automatic generator (`segment_anything/automatic_mask_generator.py`), and
as SAM 2's (`sam2/automatic_mask_generator.py`), whose thresholds differ; both in a memory that does not grow with the
points: a few prompts are decoded at a time, what their predicted IoU rules out is never enlarged, and of the rest
only run lengths are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from visionfast.crops import Crop, crops_of, near_crop_edge, point_grid, uncrop
from visionfast.errors import OptionError, ShapeError
from visionfast.postprocess.choose import choose_masks
from visionfast.postprocess.masks import InstanceMasks
from visionfast.postprocess.nms import nms
from visionfast.postprocess.regions import remove_small_regions
from visionfast.preprocess.antialias import geometry
from visionfast.preprocess.prompts import prompt_tensors
from visionfast.results import Masks
from visionfast.sessions.prompts import Decoded, Features, PromptSession
from visionfast.types import Letterbox, ModelSpec, PromptSpec, PromptTensors

__all__ = ["MOST_CROP_LAYERS", "Encode", "Progress", "everything"]

MOST_CROP_LAYERS = 4
"""1 + 4 + 16 + 64 + 256 encodings: each layer has four times those of the one before."""

_MOST_POINTS_PER_SIDE = 1024  # a million prompts: hours
_MOST_PIXELS = 1 << 40
_MOST_OVERLAP = 0.999  # of crops that are to be smaller than the image
_LARGEST_OFFSET = 1e6  # of logits, which are some tens

Encode: TypeAlias = Callable[[npt.NDArray[np.uint8], dict[str, int]], Features]
"""(H, W, 3) uint8 RGB, contiguous, and the nanoseconds of each stage, which it fills in → features."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the points that are done and with how many there are."""


def everything(
    pixels: npt.NDArray[np.uint8],
    session: PromptSession,
    spec: ModelSpec,
    *,
    points_per_side: int = 32,
    score_threshold: float | None = None,
    stability_threshold: float | None = None,
    stability_offset: float = 1.0,
    nms_threshold: float = 0.7,
    crop_layers: int = 0,
    crop_nms_threshold: float = 0.7,
    crop_overlap: float = 512 / 1500,
    crop_points_scale: int = 1,
    min_area: int = 0,
    features: Features | None = None,
    encode: Encode | None = None,
    progress: Progress | None = None,
) -> Masks:
    """The masks of one image, duplicates removed, in the order of the official generator.

    Within a crop the masks come by descending score; with more than one crop those of smaller crops come first; with
    `min_area`, those that needed no repair.

    Args:
        pixels: (H, W, 3) uint8 RGB.
        session: of the model's two engines.
        spec: of the model.
        points_per_side: the grid has its square of points, of which each prompts three masks.
        score_threshold: masks above this predicted IoU stay; 0: all of them; `None`: the model's own.
        stability_threshold: masks of at least this stability stay; 0: all of them; `None`: the model's own.
        stability_offset: the stability is the IoU of the mask at this logit and at its negative.
        nms_threshold: of two masks in one crop whose boxes overlap more than this, the one of lower score goes.
        crop_layers: beside the whole image, the layers of ever smaller crops that are encoded and prompted too:
            4 in the first, 16 in the second.
        crop_nms_threshold: as `nms_threshold`, between crops, where the mask from the smaller one stays.
        crop_overlap: of neighbours in the first layer, as a share of the image's shorter side.
        crop_points_scale: layer i has `points_per_side / crop_points_scale^i` points on a side.
        min_area: holes and separate parts of fewer pixels than this are removed from each mask; 0: none. SAM 2's own
            generator does another thing here, on the logits, and on a CUDA device only.
        features: of the whole image, where it is encoded already.
        encode: as `session.encode`, which is the default: a cache that stands in front of it, for example.
        progress: called after each few prompts.

    Returns:
        The masks with their scores, stabilities and points; `prompt` counts the points of all crops, crop by crop and
        row by row.

    Raises:
        OptionError: an option is out of its range, or the model takes no prompts.
        ShapeError: `pixels` is not of the shape and dtype above.
        BackendError: the runtime failed.
    """
    if spec.prompts is None:
        raise OptionError(f"everything: expected a prompt-segment model, got {spec.name}, which is for {spec.task}")
    keep = _Thresholds(
        score=spec.prompts.score_threshold if score_threshold is None else score_threshold,
        stability=spec.prompts.stability_threshold if stability_threshold is None else stability_threshold,
        offset=stability_offset,
    )
    _check_numbers(
        score_threshold=(keep.score, 0, 1),
        stability_threshold=(keep.stability, 0, 1),
        stability_offset=(stability_offset, 0, _LARGEST_OFFSET),
        nms_threshold=(nms_threshold, 0, 1),
        crop_nms_threshold=(crop_nms_threshold, 0, 1),
        crop_overlap=(crop_overlap, 0, _MOST_OVERLAP),
    )
    _check_counts(
        points_per_side=(points_per_side, 1, _MOST_POINTS_PER_SIDE),
        crop_points_scale=(crop_points_scale, 1, _MOST_POINTS_PER_SIDE),
        crop_layers=(crop_layers, 0, MOST_CROP_LAYERS),
        min_area=(min_area, 0, _MOST_PIXELS),
    )
    _check_grid(points_per_side, crop_layers, crop_points_scale)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or not pixels.size:
        raise ShapeError(f"pixels: expected (H, W, 3) uint8 with H, W >= 1, got {pixels.shape} {pixels.dtype.name}")

    image_hw = (pixels.shape[0], pixels.shape[1])
    crops = crops_of(image_hw, crop_layers, crop_overlap)
    grids = [point_grid(points_per_side // crop_points_scale**crop.layer, crop.hw) for crop in crops]
    course = _Course(session, encode or session.encode, sum(map(len, grids)), progress)
    found = []
    for crop, grid in zip(crops, grids, strict=True):
        if crop.layer or features is None:
            features = course.encoded(pixels, crop)
        masks = _good_masks(course, features, spec, geometry(crop.hw, spec.preprocess), grid, keep)
        masks = masks[~near_crop_edge(_extent_xyxy(masks.mask), crop, image_hw)]
        masks = masks[_suppressed(masks.mask, masks.score, nms_threshold)]
        found.append(replace(masks, mask=uncrop(masks.mask, crop, image_hw), image_hw=image_hw))
    masks = _joined(found)
    if len(crops) > 1:
        preferred = np.array([np.float32(1) / np.float32(crop.area) for crop in crops], np.float32)
        preference = np.repeat(preferred, [len(part) for part in found])  # (M,)
        masks = masks[_suppressed(masks.mask, preference, crop_nms_threshold)]
    if min_area:
        masks = _repaired(masks, min_area, max(nms_threshold, crop_nms_threshold))
    points = np.concatenate([grid + crop.corner for crop, grid in zip(crops, grids, strict=True)])
    return replace(masks, points=points[masks.prompt].astype(np.float32), stage_ns=course.stages())


# ---- one crop -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Thresholds:
    """What a mask has to reach, and the logit at which its stability is counted."""

    score: float
    stability: float
    offset: float


class _Course:
    """One call's way through the engines: how far it has come, and where its time went."""

    def __init__(self, session: PromptSession, encode: Encode, total: int, progress: Progress | None) -> None:
        self.session = session
        self.done = 0
        self._encode, self._total, self._progress = encode, total, progress
        self._stage_ns: dict[str, int] = {}
        self._started = perf_counter_ns()

    def encoded(self, pixels: npt.NDArray[np.uint8], crop: Crop) -> Features:
        stage_ns: dict[str, int] = {}
        part = pixels[crop.top : crop.bottom, crop.left : crop.right]
        features = self._encode(np.ascontiguousarray(part), stage_ns)
        for stage, ns in stage_ns.items():
            self._add(stage, ns)
        return features

    def decoded(self, features: Features, prompts: PromptTensors) -> Decoded:
        started = perf_counter_ns()
        decoded = self.session.decode(features, prompts)
        self._add("decoder", perf_counter_ns() - started)
        return decoded

    def advance(self, points: int) -> None:
        self.done += points
        if self._progress is not None:
            self._progress(self.done, self._total)

    def stages(self) -> dict[str, int]:
        """Nanoseconds of each; `postprocess` is all that the encoder's stages and the decoder did not take."""
        others = sum(self._stage_ns.values())
        return {**self._stage_ns, "postprocess": perf_counter_ns() - self._started - others}

    def _add(self, stage: str, ns: int) -> None:
        self._stage_ns[stage] = self._stage_ns.get(stage, 0) + ns


def _good_masks(
    course: _Course,
    features: Features,
    spec: ModelSpec,
    placed: Letterbox,
    grid: npt.NDArray[np.float64],
    keep: _Thresholds,
) -> Masks:
    """A crop's masks that reach the thresholds, in its pixels, by point; `prompt` counts the points of all crops."""
    assert spec.prompts is not None
    points = np.concatenate([grid, np.ones((len(grid), 1))], 1)[:, None]  # (P, 1, 3) x, y, label
    prompts = prompt_tensors(points, None, placed=placed, spec=spec.prompts, most_points=course.session.points)
    found = []
    for first in range(0, len(prompts), course.session.prompts):
        part = slice(first, first + course.session.prompts)
        some = PromptTensors(prompts.points[part], prompts.labels[part])
        masks = _good(course.decoded(features, some), placed, spec.prompts, keep)
        found.append(replace(masks, prompt=masks.prompt + course.done))
        course.advance(len(some))
    return _joined(found)


def _good(decoded: Decoded, placed: Letterbox, prompts: PromptSpec, keep: _Thresholds) -> Masks:
    """Those of a few prompts' masks that reach the thresholds; only they are enlarged and kept."""
    chosen = choose_masks(decoded, prompts, multimask=True).reshape(-1)  # (3P,)
    score = decoded.scores.reshape(-1)
    if keep.score > 0:
        chosen = chosen[score[chosen] > np.float32(keep.score)]
    stability = decoded.stability(chosen, keep.offset, placed)
    if keep.stability > 0:
        stable = stability >= np.float32(keep.stability)
        chosen, stability = chosen[stable], stability[stable]
    return Masks(
        mask=decoded.masks(chosen, placed),
        score=score[chosen],
        prompt=chosen // decoded.scores.shape[1],
        image_hw=placed.image_hw,
        stability=stability,
    )


# ---- masks, however they came ---------------------------------------------------------------------------------


def _joined(parts: Sequence[Masks]) -> Masks:
    """The masks of several parts, which are of one image size, one after another."""
    one = parts[0]
    counts = tuple(itertools.chain.from_iterable(part.mask.counts for part in parts))
    return Masks(
        mask=InstanceMasks(counts, one.image_hw),
        score=np.concatenate([part.score for part in parts]),
        prompt=np.concatenate([part.prompt for part in parts]),
        image_hw=one.image_hw,
        stability=np.concatenate([part.stability for part in parts if part.stability is not None]),
    )


def _suppressed(masks: InstanceMasks, preference: npt.NDArray[np.float32], threshold: float) -> npt.NDArray[np.int64]:
    """Positions of the masks that stay, by descending preference, after suppression on their boxes."""
    count = len(masks)
    return nms(_extent_xyxy(masks), preference, np.zeros(count, np.int64), iou=threshold, max_det=max(1, count))


def _extent_xyxy(masks: InstanceMasks) -> npt.NDArray[np.float32]:
    """(N, 4) float32: left, top, right, bottom of each mask, pixels, the last two inside it; 0 for an empty one.

    The generators compare masks by these boxes, so that one of a single pixel has no area.
    """
    xywh = masks.xywh()
    right_bottom = np.maximum(xywh[:, :2] + xywh[:, 2:] - 1, 0)
    return np.concatenate([xywh[:, :2], right_bottom], 1).astype(np.float32)


def _repaired(masks: Masks, min_area: int, threshold: float) -> Masks:
    """Without small holes and specks, and without what became a duplicate; those without need of repair come first."""
    counts, whole = list(masks.mask.counts), np.ones(len(masks), np.float32)
    for i in range(len(masks)):  # one dense plane at a time
        repaired = remove_small_regions(masks.mask[[i]].dense()[0], min_area)
        if repaired is not None:
            counts[i], whole[i] = InstanceMasks.from_dense(repaired[None]).counts[0], 0
    masks = replace(masks, mask=InstanceMasks(tuple(counts), masks.image_hw))
    return masks[_suppressed(masks.mask, whole, threshold)]


# ---- options --------------------------------------------------------------------------------------------------


def _check_numbers(**options: tuple[Any, float, float]) -> None:
    """Raises `OptionError` for the first that is no number from its least to its most."""
    for name, (value, least, most) in options.items():
        if not isinstance(value, (int, float, np.number)) or not least <= value <= most:
            raise OptionError(f"{name}: expected a number from {least:g} to {most:g}, got {value!r}")


def _check_counts(**options: tuple[Any, int, int]) -> None:
    """Raises `OptionError` for the first that is no whole number from its least to its most."""
    for name, (value, least, most) in options.items():
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or not least <= value <= most:
            raise OptionError(f"{name}: expected a whole number from {least} to {most}, got {value!r}")


def _check_grid(points_per_side: int, crop_layers: int, crop_points_scale: int) -> None:
    """Raises `OptionError` if a layer of crops had no points."""
    if points_per_side < (least := crop_points_scale**crop_layers):
        raise OptionError(
            f"points_per_side: expected at least {least}, or the last of {crop_layers} crop layers would have no "
            f"points at crop_points_scale {crop_points_scale}; got {points_per_side}"
        )
