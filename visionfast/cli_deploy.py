"""The verbs `deploy` and `rollback`: an engine into pipelines/, and back to an earlier version of it."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from visionfast.cli_options import EngineArgument, listed
from visionfast.errors import OptionError

__all__ = ["deploy_verb", "rollback_verb"]


def deploy_verb(
    engine: EngineArgument,
    name: Annotated[str | None, typer.Option(help="What clients will ask for. Default: the model's name.")] = None,
    layout: Annotated[str, typer.Option(help="fused, one process for all, or ensemble, one for each step.")] = "fused",
    target: Annotated[str, typer.Option(help="What it will be served on: cpu.")] = "cpu",
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
    conf: Annotated[float | None, typer.Option(help="Objects above this confidence. Default: 0.25.")] = None,
    iou: Annotated[
        float | None, typer.Option(help="Overlap above which the less confident box goes. Default: 0.7.")
    ] = None,
    max_det: Annotated[int | None, typer.Option(help="Objects an image at most. Default: 300.")] = None,
    classes: Annotated[str | None, typer.Option(help="Only these, names or ids with commas between.")] = None,
    class_agnostic: Annotated[
        bool, typer.Option("--class-agnostic", help="Boxes of different classes suppress one another too.")
    ] = False,
    max_pixels: Annotated[int | None, typer.Option(help="Of an image, at most. Default: 100 million.")] = None,
    max_bytes: Annotated[int | None, typer.Option(help="Of an image's file, at most. Default: 256 MiB.")] = None,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Decode what is there of damaged images.")
    ] = False,
    uncertified: Annotated[
        bool, typer.Option("--uncertified", help="Also an engine that is not shown to agree with PyTorch.")
    ] = False,
) -> None:
    """Write an engine into pipelines/, as its next version there, for `visionfast serve`.

    What a request does not say for itself (--conf and so on) is taken from here.
    """
    from visionfast.preprocess.limits import DecodeLimits
    from visionfast.serving.repository import deploy, versions
    from visionfast.serving.scheduling import Scheduling

    scheduling = Scheduling(
        max_batch=max_batch,
        queue_delay_us=queue_delay_us,
        instances=instances,
        cache=cache,
        **_given(online=_queue("--online", online), offline=_queue("--offline", offline)),
    )
    for option, value in (("--max-pixels", max_pixels), ("--max-bytes", max_bytes)):
        if value is not None and value < 1:
            raise OptionError(f"{option}: expected at least 1, got {value}")
    limits = DecodeLimits(**_given(max_pixels=max_pixels, max_bytes=max_bytes), allow_truncated=allow_truncated)
    options = _given(
        conf=conf, iou=iou, max_det=max_det, classes=listed(classes), class_agnostic=class_agnostic or None
    )
    folder = deploy(
        engine,
        name=name,
        layout=layout,  # type: ignore[arg-type]  # it says what it takes
        target=target,
        scheduling=scheduling,
        options=options,
        limits=limits,
        uncertified=uncertified,
    )
    version, _ = versions(folder)
    print(f"{folder}: version {version}; `visionfast serve {folder.name}` starts it")


def rollback_verb(
    name: Annotated[str, typer.Argument(metavar="PIPELINE", help="Its name under pipelines/.")],
    version: Annotated[int | None, typer.Option(help="To go to. Default: the one before that which is served.")] = None,
) -> None:
    """Serve another version of a pipeline from the server's next start on. Nothing is deleted."""
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


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
