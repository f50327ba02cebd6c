"""The verbs `deploy` and `rollback`: an engine into pipelines/, and back to an earlier version of it."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from visionfast.cli_asking import given
from visionfast.cli_options import EngineArgument, listed
from visionfast.errors import OptionError

__all__ = ["deploy_verb", "rollback_verb"]


def deploy_verb(
    engine: EngineArgument,
    name: Annotated[str | None, typer.Option(help="What clients will ask for. Default: the model's name.")] = None,
    layout: Annotated[str, typer.Option(help="fused, one process for all, or ensemble, one for each step.")] = "fused",
    target: Annotated[
        str, typer.Option(help="What it will be served on: cpu, or nvidia, NVIDIA's container on a GPU.")
    ] = "cpu",
    engine_backend: Annotated[
        str,
        typer.Option(
            help="What runs an ensemble's engine on a cpu: python, or openvino, the backend of NVIDIA's server."
        ),
    ] = "python",
    image: Annotated[
        str | None,
        typer.Option(help="NVIDIA's container that it will run in. Default: the one docs/serve-nvidia.md names."),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Images that are answered together, at most.")] = 8,
    instances: Annotated[int, typer.Option(help="Processes of each step; the processors are shared out.")] = 1,
    queue_delay_us: Annotated[
        int, typer.Option(help="Microseconds that an image waits for others to be answered with.")
    ] = 1000,
    online: Annotated[
        str | None,
        typer.Option(
            metavar="N[:MS]", help="Online requests that wait, at most, and for how long. Default: 256:10000."
        ),
    ] = None,
    offline: Annotated[
        str | None, typer.Option(metavar="N[:MS]", help="The same of offline requests. Default: 1024:60000.")
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache", help="Keep answers: the same image, asked the same, costs nothing again.")
    ] = False,
    conf: Annotated[float | None, typer.Option(help="Detector: objects above this confidence. Default: 0.25.")] = None,
    iou: Annotated[
        float | None, typer.Option(help="Detector: overlap above which the less confident box goes. Default: 0.7.")
    ] = None,
    max_det: Annotated[int | None, typer.Option(help="Detector: objects an image at most. Default: 300.")] = None,
    classes: Annotated[str | None, typer.Option(help="Detector: only these, names or ids with commas between.")] = None,
    class_agnostic: Annotated[
        bool, typer.Option("--class-agnostic", help="Detector: boxes of different classes suppress one another too.")
    ] = False,
    normalise: Annotated[
        bool,
        typer.Option("--normalise", help="DINO: vectors of length 1, unless a request says otherwise."),
    ] = False,
    multimask: Annotated[
        bool, typer.Option("--multimask", help="SAM: three masks a prompt, unless a request says otherwise.")
    ] = False,
    image_cache_mb: Annotated[
        int | None, typer.Option(help="SAM: encoded images that a process keeps, MiB. Default: 1024.")
    ] = None,
    max_pixels: Annotated[int | None, typer.Option(help="Of an image, at most. Default: 100 million.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Of an image's file, at most. Default: 256 MiB.")] = None,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Decode what is there of damaged images.")
    ] = False,
    uncertified: Annotated[
        bool, typer.Option("--uncertified", help="Also an engine that is not shown to agree with PyTorch.")
    ] = False,
) -> None:
    """Write an engine into pipelines/ for `serve`. There it is the next version.

    What a request does not say for itself (--conf and so on) is taken from here.
    """
    from visionfast.preprocess.limits import DecodeLimits
    from visionfast.serving.container import IMAGE, commands
    from visionfast.serving.repository import deploy, versions
    from visionfast.serving.scheduling import Scheduling

    scheduling = Scheduling(
        max_batch=max_batch,
        queue_delay_us=queue_delay_us,
        instances=instances,
        cache=cache,
        **given(online=_queue("--online", online), offline=_queue("--offline", offline)),
    )
    for option, value in (("--max-pixels", max_pixels), ("--max-bytes", max_bytes)):
        if value is not None and value < 1:
            raise OptionError(f"{option}: expected at least 1, got {value}")
    limits = DecodeLimits(**given(max_pixels=max_pixels, max_bytes=max_bytes), allow_truncated=allow_truncated)
    ours = (target, engine_backend) == ("cpu", "python")
    if image is not None and ours:
        raise OptionError(f"--image {image}: expected --target nvidia or --engine-backend openvino, which run in it")
    options = given(
        conf=conf,
        iou=iou,
        max_det=max_det,
        classes=listed(classes),
        class_agnostic=class_agnostic,
        normalise=normalise,
        multimask=multimask,
        image_cache_mb=image_cache_mb,
    )
    folder = deploy(
        engine,
        name=name,
        layout=layout,  # type: ignore[arg-type]  # it says what it takes
        target=target,
        engine_backend=engine_backend,
        image=image or IMAGE,
        scheduling=scheduling,
        options=options,
        limits=limits,
        uncertified=uncertified,
    )
    version, _ = versions(folder)
    if ours:
        print(f"{folder}: version {version}; `visionfast serve {folder.name}` starts it")
        return
    print(f"{folder}: version {version}; NVIDIA's container serves it:")
    for command in commands(folder, gpu=target == "nvidia", cache=cache):
        print(f"  {command}")


def rollback_verb(
    name: Annotated[str, typer.Argument(metavar="PIPELINE", help="Its name under pipelines/.")],
    version: Annotated[int | None, typer.Option(help="To go to. Default: the one before that which is served.")] = None,
) -> None:
    """Serve another version of a pipeline from the next start on. Nothing is deleted."""
    from visionfast.serving.repository import rollback

    print(f"{name}: version {rollback(name, version)} is served from the server's next start on")


def _queue(option: str, text: str | None) -> Any:
    """`256:10000` → at most 256 requests, each for at most 10 s."""
    if text is None:
        return None
    from visionfast.serving.scheduling import QueueLimits, Scheduling

    if not (found := re.fullmatch("([0-9]{1,9})(?::([0-9]{1,9}))?", text)):
        raise OptionError(f"{option} {text}: expected requests, or requests:milliseconds, such as 256:10000")
    usual = getattr(Scheduling(), option.removeprefix("--"))
    return QueueLimits(int(found[1]), usual.timeout_ms if found[2] is None else int(found[2]))
