"""The verb `predict`: which options fit an engine's task, and which way its images go."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visionfast.cli_options import EngineArgument, listed
from visionfast.errors import OptionError

if TYPE_CHECKING:
    from visionfast.embedder import Embedder
    from visionfast.pipeline import Detector
    from visionfast.prompt_segmenter import PromptSegmenter
    from visionfast.types import Task

__all__ = ["predict_verb"]


def predict_verb(
    engine: EngineArgument,
    sources: Annotated[
        list[str], typer.Argument(metavar="IMAGE|DIR|GLOB...", help="What to look at; in a DIR, not below it.")
    ],
    save: Annotated[Path | None, typer.Option(help="Folder for annotated pictures.")] = None,
    json: Annotated[str | None, typer.Option(help="File for one JSON line an image; - is stdout.")] = None,
    conf: Annotated[float | None, typer.Option(help="Detector: objects above this confidence. Default: 0.25.")] = None,
    iou: Annotated[
        float | None, typer.Option(help="Detector: overlap above which the less confident box goes. Default: 0.7.")
    ] = None,
    max_det: Annotated[int | None, typer.Option(help="Detector: objects an image at most. Default: 300.")] = None,
    classes: Annotated[str | None, typer.Option(help="Detector: only these, names or ids with commas between.")] = None,
    class_agnostic: Annotated[
        bool, typer.Option("--class-agnostic", help="Detector: boxes of different classes suppress one another too.")
    ] = False,
    point: Annotated[
        list[str] | None,
        typer.Option(metavar="X,Y[:0]", help="SAM: a pixel on the object, or with :0 beside it; all are one prompt."),
    ] = None,
    box: Annotated[
        list[str] | None,
        typer.Option(metavar="X1,Y1,X2,Y2", help="SAM: round the object, pixels; each of several is a prompt."),
    ] = None,
    multimask: Annotated[
        bool, typer.Option("--multimask", help="SAM: three masks a prompt, for one that may mean several things.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--everything", help="SAM: the masks of all there is, prompted by a grid of points.")
    ] = False,
    points_per_side: Annotated[
        int | None, typer.Option(help="Everything: the grid has its square of points. Default: 32.")
    ] = None,
    score_threshold: Annotated[
        float | None, typer.Option(help="Everything: masks above this predicted IoU. Default: the model's.")
    ] = None,
    stability_threshold: Annotated[
        float | None, typer.Option(help="Everything: masks of at least this stability. Default: the model's.")
    ] = None,
    crop_layers: Annotated[
        int | None, typer.Option(help="Everything: layers of ever smaller crops to look at too. Default: 0.")
    ] = None,
    min_area: Annotated[
        int | None, typer.Option(help="Everything: holes and islands of fewer pixels go. Default: 0.")
    ] = None,
    boxes_from: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="SAM: a detector's engine, whose boxes are the prompts.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="SAM: folder that keeps encoded images; the next call on one is quick.")
    ] = None,
    shared_colours: Annotated[
        bool, typer.Option("--shared-colours", help="DINO: the same colours in all pictures; takes twice the time.")
    ] = False,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all there are.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: what the engine is for.")] = None,
    no_graph: Annotated[
        bool, typer.Option("--no-graph", help="Detector on a GPU: launch each part, don't replay one CUDA graph.")
    ] = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Decode what is there of damaged files.")
    ] = False,
) -> None:
    """Answer images: a line each, and JSON and annotated pictures on request. Exit code 1 if any was bad.

    A detector's engine needs no more than images. A SAM engine is told what to look for: --point or --box,
    --everything, or --boxes-from. A DINO engine gives vectors; its pictures show the patches' three principal
    components as colours.
    """
    from visionfast.predict import expand, run, tell_overlooked
    from visionfast.predict_embeddings import run_embedder
    from visionfast.predict_output import check_targets
    from visionfast.predict_prompts import Prompts, run_boxes_from, run_everything, run_prompts
    from visionfast.preprocess.limits import DecodeLimits
    from visionfast.preprocess.prompts import parse_box, parse_point

    paths = expand(sources)
    check_targets(paths, save=save, json_to=json)  # before an engine is opened, and asked
    tell_overlooked(sources)
    folder, task = _engine(engine)
    ways = _given(point=point, box=box, everything=everything, boxes_from=boxes_from)
    of_clicks = _given(multimask=multimask)
    of_everything = _given(
        points_per_side=points_per_side,
        score_threshold=score_threshold,
        stability_threshold=stability_threshold,
        crop_layers=crop_layers,
        min_area=min_area,
    )
    of_detector = _given(
        conf=conf,
        iou=iou,
        max_det=max_det,
        classes=listed(classes),
        class_agnostic=class_agnostic,
        no_graph=no_graph,
    )
    of_sam = [*ways, *of_clicks, *of_everything, *_given(cache=cache)]
    of_embedder = list(_given(shared_colours=shared_colours))
    for options, kind, tasks in (
        (of_sam, "SAM", ("prompt-segment",)),
        (of_embedder, "DINO", ("embed",)),
        (list(of_detector), "detector's", ("detect", "segment", "prompt-segment")),
    ):
        if options and task not in tasks:
            what = f"{engine} is for {task} and takes none of the options of a {kind} engine"
            raise OptionError(f"{_flag(options[0])}: {what}")
    if shared_colours and save is None:
        raise OptionError("--shared-colours: goes with --save, whose pictures have them")
    if task == "prompt-segment":
        _check_prompts(engine, ways, of_clicks, of_everything, of_detector)
    if of_detector.pop("no_graph", False):
        of_detector["graph"] = False

    opening = {"threads": threads, "device": device, "limits": DecodeLimits(allow_truncated=allow_truncated)}
    if task == "embed":
        with _embedder(folder, opening) as embedder:
            bad = run_embedder(embedder, paths, save=save, json_to=json, shared_colours=shared_colours)
    elif task != "prompt-segment":
        with _detector(folder, task, opening | of_detector) as detector:
            bad = run(detector, paths, save=save, json_to=json)
    elif boxes_from is not None:
        finder, finds = _engine(boxes_from)
        if finds not in ("detect", "segment"):
            raise OptionError(f"--boxes-from {boxes_from}: expected a detector's engine, got one for {finds}")
        with _detector(finder, finds, opening | of_detector) as detector, _segmenter(folder, opening, cache) as sam:
            bad = run_boxes_from(detector, sam, paths, save=save, json_to=json)
    elif everything:
        with _segmenter(folder, opening, cache) as sam:
            bad = run_everything(sam, paths, of_everything, save=save, json_to=json)
    else:
        prompts = Prompts(
            points=[parse_point(text) for text in point or ()],
            boxes=[parse_box(text) for text in box or ()],
            multimask=multimask,
        )
        with _segmenter(folder, opening, cache) as sam:
            bad = run_prompts(sam, paths, prompts, save=save, json_to=json)
    if bad:
        raise typer.Exit(1)


def _check_prompts(
    engine: str,
    ways: Mapping[str, Any],
    of_clicks: Mapping[str, Any],
    of_everything: Mapping[str, Any],
    of_detector: Mapping[str, Any],
) -> None:
    """Raises `OptionError` unless a SAM engine is told in one way what to look for, and with that way's options."""
    if not ways:
        raise OptionError(
            f"{engine} answers prompts: expected --point X,Y or --box X1,Y1,X2,Y2, --everything, or --boxes-from a "
            "detector's engine"
        )
    clicks = [way for way in ways if way in ("point", "box")]
    others = [way for way in ways if way not in clicks]
    if len(named := clicks[:1] + others) > 1:
        raise OptionError(f"{_flag(named[0])} with {_flag(named[1])}: expected one of them")
    for options, fits, needed in (
        (of_clicks, bool(clicks), "--point or --box"),
        (of_everything, "everything" in ways, "--everything"),
        (of_detector, "boxes_from" in ways, "--boxes-from"),
    ):
        if options and not fits:
            raise OptionError(f"{_flag(next(iter(options)))}: goes with {needed}, got {_flag(named[0])}")


def _engine(named: str) -> tuple[Path, Task]:
    """An engine's folder, and what it is for."""
    from visionfast.artifacts import find_engine, read_manifest
    from visionfast.loading import runs_here

    folder = find_engine(named, usable=runs_here)
    manifest = read_manifest(folder)
    if manifest.certificate.status == "failed":
        print(f"visionfast: {named}: its certificate failed: it does not agree with PyTorch", file=sys.stderr)
    return folder, manifest.spec.task


def _detector(folder: Path, task: Task, options: Mapping[str, Any]) -> Detector:
    from visionfast.pipeline import Detector, Segmenter

    return (Segmenter if task == "segment" else Detector).open(folder, **options)


def _embedder(folder: Path, options: Mapping[str, Any]) -> Embedder:
    from visionfast.embedder import Embedder

    return Embedder.open(folder, **options)


@contextlib.contextmanager
def _segmenter(folder: Path, options: Mapping[str, Any], cache: Path | None) -> Iterator[PromptSegmenter]:
    from visionfast.prompt_segmenter import PromptSegmenter

    # Nothing in memory: each image is asked about once a call.
    with PromptSegmenter.open(folder, cache_bytes=0, cache_folder=cache, **options) as segmenter:
        yield segmenter
        disk = segmenter.cache_stats().disk
    if disk is not None and disk.not_kept:
        print(f"visionfast: {cache}: {disk.not_kept} encoded images could not be kept there", file=sys.stderr)


def _given(**options: Any) -> dict[str, Any]:
    """Those that are on the command line."""
    return {name: value for name, value in options.items() if value is not None and value is not False and value != []}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
