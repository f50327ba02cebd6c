"""The verb `predict`: which options fit an engine's task, and which way its images go."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visionfast.cli_asking import (
    Asked,
    BoxOption,
    CropLayersOption,
    EverythingOption,
    MinAreaOption,
    MultimaskOption,
    PointOption,
    PointsPerSideOption,
    ScoreThresholdOption,
    SharedColoursOption,
    StabilityThresholdOption,
    given,
)
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
    point: PointOption = None,
    box: BoxOption = None,
    multimask: MultimaskOption = False,
    everything: EverythingOption = False,
    points_per_side: PointsPerSideOption = None,
    score_threshold: ScoreThresholdOption = None,
    stability_threshold: StabilityThresholdOption = None,
    crop_layers: CropLayersOption = None,
    min_area: MinAreaOption = None,
    boxes_from: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="SAM: a detector's engine, whose boxes are the prompts.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="SAM: folder that keeps encoded images; the next call on one is quick.")
    ] = None,
    shared_colours: SharedColoursOption = False,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all there are.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: what the engine is for.")] = None,
    no_graph: Annotated[
        bool, typer.Option("--no-graph", help="Detector on a GPU: launch each part, don't replay one CUDA graph.")
    ] = False,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Decode what is there of damaged files.")
    ] = False,
) -> None:
    """Answer images: a line each; on request JSON and pictures. Exit code 1 if any was bad.

    A detector's engine needs no more than images. A SAM engine is told what to look for: --point or --box,
    --everything, or --boxes-from. A DINO engine gives vectors; its pictures show the patches' three principal
    components as colours.
    """
    from visionfast.predict import expand, run, tell_overlooked
    from visionfast.predict_embeddings import run_embedder
    from visionfast.predict_output import check_targets
    from visionfast.predict_prompts import run_boxes_from, run_everything, run_prompts
    from visionfast.preprocess.limits import DecodeLimits

    paths = expand(sources)
    check_targets(paths, save=save, json_to=json)  # before an engine is opened, and asked
    tell_overlooked(sources)
    folder, task = _engine(engine)
    of_detector = given(
        conf=conf,
        iou=iou,
        max_det=max_det,
        classes=listed(classes),
        class_agnostic=class_agnostic,
        no_graph=no_graph,
    )
    asked = Asked(
        ways=given(point=point, box=box, everything=everything, boxes_from=boxes_from),
        of_clicks=given(multimask=multimask),
        of_everything=given(
            points_per_side=points_per_side,
            score_threshold=score_threshold,
            stability_threshold=stability_threshold,
            crop_layers=crop_layers,
            min_area=min_area,
        ),
        of_detector=of_detector,
        of_embedder=given(shared_colours=shared_colours),
        of_sam=given(cache=cache),
    )
    asked.check(engine, task, detectors=True)
    if shared_colours and save is None:
        raise OptionError("--shared-colours: goes with --save, whose pictures have them")
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
            bad = run_everything(sam.everything, paths, asked.of_everything, save=save, json_to=json)
    else:
        prompts = asked.prompts()
        with _segmenter(folder, opening, cache) as sam:
            bad = run_prompts(sam.segment, paths, prompts, save=save, json_to=json)
    if bad:
        raise typer.Exit(1)


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
