"""The verb `client`: what `predict` does, answered by a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from visionfast.cli_options import listed
from visionfast.errors import ImageError, ServerError

if TYPE_CHECKING:
    from visionfast.predict import Found
    from visionfast.serving.client import Client
    from visionfast.serving.client_request import Options

__all__ = ["client_verb"]


def client_verb(
    url: Annotated[str, typer.Argument(metavar="URL", help="localhost:8001, grpc://... or http://localhost:8000.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model's, on the server.")],
    sources: Annotated[list[str], typer.Argument(metavar="IMAGE|DIR|GLOB...", help="What to look at.")],
    save: Annotated[Path | None, typer.Option(help="Folder for annotated pictures.")] = None,
    json: Annotated[str | None, typer.Option(help="File for one JSON line an image; - is stdout.")] = None,
    conf: Annotated[float | None, typer.Option(help="Objects above this confidence. Default: as deployed.")] = None,
    iou: Annotated[
        float | None, typer.Option(help="Overlap above which the less confident box goes. Default: as deployed.")
    ] = None,
    max_det: Annotated[int | None, typer.Option(help="Objects an image at most. Default: as deployed.")] = None,
    classes: Annotated[str | None, typer.Option(help="Only these, names or ids with commas between.")] = None,
    class_agnostic: Annotated[
        bool, typer.Option("--class-agnostic", help="Boxes of different classes suppress one another too.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Nobody waits for it: others are answered first.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that one image may take.")] = 30.0,
) -> None:
    """Have a server answer images, as `predict` does here. Exit code 1 if any was bad, or the server failed."""
    from visionfast.predict import expand
    from visionfast.predict_output import report
    from visionfast.serving.client import Client

    paths = expand(sources)
    given = {"conf": conf, "iou": iou, "max_det": max_det, "classes": listed(classes)}
    options: Options = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    if class_agnostic:
        options["class_agnostic"] = True
    options["priority"] = "offline" if offline else "online"
    with Client(url, name, timeout=timeout) as client:
        if client.certificate.status == "failed":
            print(f"visionfast: {name}: its certificate failed: it does not agree with PyTorch", file=sys.stderr)
        bad = report(_found(client, paths, options), paths, save=save, json_to=json)
    if bad:
        raise typer.Exit(1)


def _found(client: Client, paths: Sequence[Path], options: Options) -> Iterator[tuple[Path, Found | ImageError]]:
    """Every file with its answer, in order. Raises `ServerError` for the first that was refused."""
    from visionfast.predict import Found

    for path, answer in zip(paths, client.stream(paths, on_error="return", **options), strict=True):
        if isinstance(answer, ServerError):
            raise answer
        yield path, answer if isinstance(answer, ImageError) else Found(answer, client.class_names)
