"""The verb `client`: what `predict` does, answered by a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from visionfast.cli_options import listed
from visionfast.errors import OptionError

if TYPE_CHECKING:
    from visionfast.serving.client_request import Options, Priority

__all__ = ["client_verb"]


def client_verb(
    url: Annotated[str, typer.Argument(metavar="URL", help="localhost:8001, grpc://... or http://localhost:8000.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model's, on the server.")],
    sources: Annotated[list[str], typer.Argument(metavar="IMAGE|DIR|GLOB...", help="What to look at.")],
    save: Annotated[Path | None, typer.Option(help="Folder for annotated pictures.")] = None,
    json: Annotated[str | None, typer.Option(help="File for one JSON line an image; - is stdout.")] = None,
    conf: Annotated[
        float | None, typer.Option(help="Detector: objects above this confidence. Default: as deployed.")
    ] = None,
    iou: Annotated[
        float | None,
        typer.Option(help="Detector: overlap above which the less confident box goes. Default: as deployed."),
    ] = None,
    max_det: Annotated[
        int | None, typer.Option(help="Detector: objects an image at most. Default: as deployed.")
    ] = None,
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
    shared_colours: SharedColoursOption = False,
    offline: Annotated[bool, typer.Option("--offline", help="Nobody waits for it: others are answered first.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that one image may take.")] = 30.0,
    trace: Annotated[
        bool, typer.Option("--trace", help="One image after the other, and where the time of each went.")
    ] = False,
    trace_json: Annotated[
        Path | None, typer.Option(help="The same into a file that ui.perfetto.dev and chrome://tracing open.")
    ] = None,
) -> None:
    """Have a server answer images, as `predict` does here. Exit code 1 if any was bad, or the server failed.

    A SAM model is told what to look for: --point or --box, or --everything, which may take minutes: --timeout allows
    for it. A DINO model gives vectors; its pictures show the patches' three principal components as colours.
    """
    from visionfast.predict import expand
    from visionfast.predict_output import check_targets
    from visionfast.serving.client import Client

    paths = expand(sources)
    check_targets(paths, save=save, json_to=json)  # before a server is asked
    if trace_json is not None:
        check_targets(paths, save=save, json_to=str(trace_json), option="--trace-json")
        if trace_json.is_dir() or (json is not None and trace_json.resolve() == Path(json).resolve()):
            raise OptionError(f"--trace-json {trace_json}: expected a file of its own")
    of_detector = given(conf=conf, iou=iou, max_det=max_det, classes=listed(classes), class_agnostic=class_agnostic)
    asked = Asked(
        ways=given(point=point, box=box, everything=everything),
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
        of_sam={},
    )
    if shared_colours and save is None:
        raise OptionError("--shared-colours: goes with --save, whose pictures have them")
    if shared_colours and (trace or trace_json is not None):
        raise OptionError("--shared-colours: asks about every image twice; leave it or --trace out")
    priority: Priority = "offline" if offline else "online"
    with Client(url, name, timeout=timeout) as client:
        task = client.spec.task
        asked.check(name, task, detectors=False)
        if client.certificate.status == "failed":
            print(f"visionfast: {name}: its certificate failed: it does not agree with PyTorch", file=sys.stderr)
        traces = None
        if trace or trace_json is not None:
            from visionfast.waterfall import Traces

            traces = Traces(shown=None if not trace else sys.stderr if json == "-" else sys.stdout, to=trace_json)
        try:
            if task == "embed":
                from visionfast.predict_served import run_served_embedder

                bad = run_served_embedder(
                    client,
                    paths,
                    priority=priority,
                    save=save,
                    json_to=json,
                    shared_colours=shared_colours,
                    traces=traces,
                )
            elif task == "prompt-segment":
                from visionfast.predict_served import run_served_segmenter

                prompts = None if everything else asked.prompts()
                bad = run_served_segmenter(
                    client,
                    paths,
                    prompts,
                    asked.of_everything,
                    priority=priority,
                    save=save,
                    json_to=json,
                    traces=traces,
                )
            else:
                from visionfast.predict_served import run_served_detector

                options: Options = {"priority": priority, **of_detector}  # type: ignore[typeddict-item]
                bad = run_served_detector(client, paths, options, save=save, json_to=json, traces=traces)
        finally:  # also of those that were answered before the server failed
            if traces is not None:
                traces.end()
    if bad:
        raise typer.Exit(1)
