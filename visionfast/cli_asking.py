"""What is asked of an image, in the options of `predict` and of `client`: which there are, and which fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from visionfast.errors import OptionError

if TYPE_CHECKING:
    from visionfast.predict_prompts import Prompts
    from visionfast.types import Task

__all__ = [
    "Asked",
    "BoxOption",
    "CropLayersOption",
    "EverythingOption",
    "MinAreaOption",
    "MultimaskOption",
    "PointOption",
    "PointsPerSideOption",
    "ScoreThresholdOption",
    "SharedColoursOption",
    "StabilityThresholdOption",
    "flag",
    "given",
]

PointOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="X,Y[:0]", help="SAM: a pixel on the object, or with :0 beside it; all are one prompt."),
]
BoxOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="X1,Y1,X2,Y2", help="SAM: round the object, pixels; each of several is a prompt."),
]
MultimaskOption: TypeAlias = Annotated[
    bool, typer.Option("--multimask", help="SAM: three masks a prompt, for one that may mean several things.")
]
EverythingOption: TypeAlias = Annotated[
    bool, typer.Option("--everything", help="SAM: the masks of all there is, prompted by a grid of points.")
]
PointsPerSideOption: TypeAlias = Annotated[
    int | None, typer.Option(help="Everything: the grid has its square of points. Default: 32.")
]
ScoreThresholdOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Everything: masks above this predicted IoU. Default: the model's.")
]
StabilityThresholdOption: TypeAlias = Annotated[
    float | None, typer.Option(help="Everything: masks of at least this stability. Default: the model's.")
]
CropLayersOption: TypeAlias = Annotated[
    int | None, typer.Option(help="Everything: layers of ever smaller crops to look at too. Default: 0.")
]
MinAreaOption: TypeAlias = Annotated[
    int | None, typer.Option(help="Everything: holes and islands of fewer pixels go. Default: 0.")
]
SharedColoursOption: TypeAlias = Annotated[
    bool, typer.Option("--shared-colours", help="DINO: the same colours in all pictures; takes twice the time.")
]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks for, each of `given`, by what it goes with.

    Attributes:
        ways: of telling SAM what to look for: `point`, `box`, `everything`, `boxes_from`.
        of_clicks: go with points and boxes.
        of_everything: go with `everything`.
        of_detector: go with a detector, or with `boxes_from`.
        of_embedder: go with DINO.
        of_sam: further ones, that go with any of SAM's ways.
    """

    ways: Mapping[str, Any]
    of_clicks: Mapping[str, Any]
    of_everything: Mapping[str, Any]
    of_detector: Mapping[str, Any]
    of_embedder: Mapping[str, Any]
    of_sam: Mapping[str, Any]

    def check(self, model: str, task: Task, *, detectors: bool) -> None:
        """Holds the options against a model's task.

        Args:
            model: what the command line calls it.
            task: its.
            detectors: the boxes of a detector are a way of telling SAM what to look for, too.

        Raises:
            OptionError: one does not fit the task or another one, or SAM is not told what to look for.
        """
        of_sam = [*self.ways, *self.of_clicks, *self.of_everything, *self.of_sam]
        also: tuple[Task, ...] = ("prompt-segment",) if detectors else ()
        kinds: tuple[tuple[Sequence[str], str, tuple[Task, ...]], ...] = (
            (of_sam, "SAM", ("prompt-segment",)),
            (list(self.of_embedder), "DINO", ("embed",)),
            (list(self.of_detector), "detector's", ("detect", "segment", *also)),
        )
        for options, kind, tasks in kinds:
            if options and task not in tasks:
                what = f"{model} is for {task} and takes none of the options of a {kind} engine"
                raise OptionError(f"{flag(options[0])}: {what}")
        if task == "prompt-segment":
            self._check_ways(model, detectors=detectors)

    def _check_ways(self, model: str, *, detectors: bool) -> None:
        if not self.ways:
            or_boxes = ", or --boxes-from a detector's engine" if detectors else ""
            expected = "--point X,Y or --box X1,Y1,X2,Y2" + (", --everything" if detectors else ", or --everything")
            raise OptionError(f"{model} answers prompts: expected {expected}{or_boxes}")
        clicks = [way for way in self.ways if way in ("point", "box")]
        others = [way for way in self.ways if way not in clicks]
        if len(named := clicks[:1] + others) > 1:
            raise OptionError(f"{flag(named[0])} with {flag(named[1])}: expected one of them")
        for options, fits, needed in (
            (self.of_clicks, bool(clicks), "--point or --box"),
            (self.of_everything, "everything" in self.ways, "--everything"),
            (self.of_detector, "boxes_from" in self.ways, "--boxes-from"),
        ):
            if options and not fits:
                raise OptionError(f"{flag(next(iter(options)))}: goes with {needed}, got {flag(named[0])}")

    def prompts(self) -> Prompts:
        """The points and boxes.

        Raises:
            OptionError: one cannot be read, or they do not go together.
        """
        from visionfast.predict_prompts import Prompts
        from visionfast.preprocess.prompts import parse_box, parse_point

        return Prompts(
            points=[parse_point(text) for text in self.ways.get("point", ())],
            boxes=[parse_box(text) for text in self.ways.get("box", ())],
            multimask=self.of_clicks.get("multimask", False),
        )


def given(**options: Any) -> dict[str, Any]:
    """Those that are on the command line."""
    return {name: value for name, value in options.items() if value is not None and value is not False and value != []}


def flag(name: str) -> str:
    """`boxes_from` → `--boxes-from`."""
    return f"--{name.replace('_', '-')}"
