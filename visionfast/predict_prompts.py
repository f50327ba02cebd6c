"""`visionfast predict` on a prompt segmenter's engine: clicks and boxes, everything, or the boxes of a detector."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, OptionError
from visionfast.pipeline import Detector
from visionfast.postprocess.masks import InstanceMasks, counts_from_runs
from visionfast.predict import Found, detected
from visionfast.predict_output import MANY, Answer, report
from visionfast.prompt_segmenter import PromptSegmenter
from visionfast.results import Detections, Masks

__all__ = ["Prompts", "run_boxes_from", "run_everything", "run_prompts"]


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is asked of every image, in its pixels.

    Attributes:
        points: x, y, and 1 on the object or 0 beside it; all of them are one prompt.
        boxes: x1, y1, x2, y2; each is a prompt, and a single one may be joined by points.
        multimask: three masks a prompt instead of one.

    Raises:
        OptionError: points with several boxes.
    """

    points: Sequence[tuple[float, float, int]] = ()
    boxes: Sequence[tuple[float, float, float, float]] = ()
    multimask: bool = False

    def __post_init__(self) -> None:
        if self.points and len(self.boxes) > 1:
            raise OptionError(
                f"--point with {len(self.boxes)} --box: expected points with one box, or boxes alone: which box do the "
                "points belong to? Ask once for each box"
            )


class _PromptError(ImageError):
    """The prompts do not fit this image."""

    kind = "prompt"


def run_prompts(
    segment: Callable[..., Masks], paths: Sequence[Path], prompts: Prompts, *, save: Path | None, json_to: str | None
) -> int:
    """Asks the same prompts of every file; what comes of each, and what is raised, is said at `predict_output.report`.

    Args:
        segment: `PromptSegmenter.segment`, or a client's.
        paths: of the images.
        prompts: what is asked.
        save: folder for the pictures.
        json_to: file for the JSON lines; `-` is stdout.

    Returns:
        how many files could not be answered, those that the prompts do not fit among them.
    """

    def ask(path: Path) -> Segmented:
        try:
            masks = segment(
                path, points=prompts.points or None, boxes=prompts.boxes or None, multimask=prompts.multimask
            )
        except OptionError as error:
            raise _PromptError(str(path), str(error)) from error
        return Segmented(masks, prompts)

    return report(_each(paths, ask), paths, save=save, json_to=json_to)


def run_everything(
    everything: Callable[..., Masks],
    paths: Sequence[Path],
    options: Mapping[str, Any],
    *,
    save: Path | None,
    json_to: str | None,
) -> int:
    """Finds the masks of everything in every file, by `PromptSegmenter.everything` or what is called like it; `options`
    of `visionfast.everything`, otherwise as `run_prompts`."""

    def ask(path: Path) -> Segmented:
        with _points_bar(len(paths)) as progress:
            return Segmented(everything(path, progress=progress, **options))

    return report(_each(paths, ask), paths, save=save, json_to=json_to)


def run_boxes_from(
    detector: Detector, segmenter: PromptSegmenter, paths: Sequence[Path], *, save: Path | None, json_to: str | None
) -> int:
    """Prompts with each box that a detector finds, which gets a mask thereby; otherwise as `run_prompts`."""

    def answers() -> Iterator[tuple[Path, Answer | ImageError]]:
        for path, found in detected(detector, paths):
            if isinstance(found, ImageError):
                yield path, found
                continue
            try:
                yield path, _masked(found, segmenter, path, detector.class_names)
            except ImageError as error:  # the file is not what it was when the detector read it
                yield path, error

    return report(answers(), paths, save=save, json_to=json_to)


@dataclass(frozen=True, slots=True, eq=False)
class Segmented:
    """A prompt segmenter's answer for one image, on its way out; `prompts` is `None` in everything mode."""

    masks: Masks
    prompts: Prompts | None = None

    @property
    def image_hw(self) -> tuple[int, int]:
        return self.masks.image_hw

    @property
    def stage_ns(self) -> Mapping[str, int]:
        return self.masks.stage_ns

    def words(self) -> str:
        count = len(self.masks)
        if count == 0:
            return "no masks"
        what = "1 mask" if count == 1 else f"{count} masks"
        scores = self.masks.score.tolist()
        if count > 4:
            return f"{what}, scores {min(scores):.2f} to {max(scores):.2f}"
        return f"{what}, score{'' if count == 1 else 's'} {', '.join(f'{score:.2f}' for score in scores)}"

    def record(self) -> dict[str, Any]:
        masks = self.masks
        columns: dict[str, list[Any]] = {
            "prompt": masks.prompt.tolist(),
            "score": _rounded(masks.score, 4),
            "xyxy": masks.xyxy.astype(int).tolist(),
            "area": masks.mask.area().tolist(),
            "mask": masks.mask.rle(),
        }
        if masks.stability is not None:
            columns["stability"] = _rounded(masks.stability, 4)
        if masks.points is not None:
            columns["point"] = _rounded(masks.points, 2)
        return {"masks": [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]}

    def draw(self, image_rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        from visionfast.draw import draw_everything, draw_prompts

        if self.prompts is None:
            return draw_everything(image_rgb, self.masks)
        return draw_prompts(image_rgb, self.masks, points=self.prompts.points, boxes=self.prompts.boxes)


@dataclass(frozen=True, slots=True, eq=False)
class _MaskedFound(Found):
    """A detector's answer whose masks are a prompt segmenter's, with its scores: (N,) f32."""

    mask_score: npt.NDArray[np.float32]

    def record(self) -> dict[str, Any]:
        # Not super(): a dataclass with slots is made anew, and the cell of super() would hold the old class.
        objects = Found.record(self)["detections"]
        scores = _rounded(self.mask_score, 4)
        return {"detections": [one | {"mask_score": score} for one, score in zip(objects, scores, strict=True)]}


def _masked(found: Detections, segmenter: PromptSegmenter, path: Path, class_names: Sequence[str]) -> _MaskedFound:
    """The same objects, each with the mask that its box prompts; an empty one where a box has no area."""
    spent = {"detector": sum(found.stage_ns.values())}
    scores = np.zeros(len(found), np.float32)
    nowhere = np.zeros(0, np.int64)
    counts = [counts_from_runs(nowhere, nowhere, found.image_hw)] * len(found)
    prompted = np.flatnonzero((found.xyxy[:, :2] < found.xyxy[:, 2:]).all(axis=1))
    if len(prompted):
        masks = segmenter.segment(path, boxes=found.xyxy[prompted])
        if masks.image_hw != found.image_hw:
            raise ImageError(str(path), f"the file changed: {found.image_hw} pixels, and then {masks.image_hw}")
        scores[prompted] = masks.score
        for i, runs in zip(prompted.tolist(), masks.mask.counts, strict=True):
            counts[i] = runs
        spent |= masks.stage_ns
    mask = InstanceMasks(tuple(counts), found.image_hw)
    return _MaskedFound(replace(found, mask=mask, stage_ns=spent), class_names, scores)


def _each(paths: Sequence[Path], ask: Callable[[Path], Answer]) -> Iterator[tuple[Path, Answer | ImageError]]:
    """Every file with its answer, in order, asked as they are wanted."""
    for path in paths:
        try:
            answer: Answer | ImageError = ask(path)
        except ImageError as error:
            answer = error
        yield path, answer


@contextlib.contextmanager
def _points_bar(images: int) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr for the points of one image, where somebody watches and the images have no bar of their own."""
    if images >= MANY or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("points", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _rounded(values: npt.NDArray[np.float32], digits: int) -> list[Any]:
    # Through float64: a rounded float32 would be written with all its digits.
    rounded = np.round(values.astype(np.float64), digits).astype(object)
    rounded[~np.isfinite(values)] = None  # JSON has no word for what an engine that is not right may give
    listed: list[Any] = rounded.tolist()
    return listed
