"""The command line: one function a verb. Heavy imports are inside the verbs, so that `--help` is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from visionfast._version import __version__
from visionfast.cli_bench import bench_verb
from visionfast.cli_client import client_verb
from visionfast.cli_deploy import deploy_verb, rollback_verb
from visionfast.cli_embed import embed_verb
from visionfast.cli_options import RESIZES, EngineArgument, listed, size_hw
from visionfast.cli_predict import predict_verb
from visionfast.cli_search import search_verb
from visionfast.cli_serve import serve_verb
from visionfast.cli_top import top_verb
from visionfast.cli_verify import verify_verb
from visionfast.errors import OptionError, VisionfastError
from visionfast.terminal import one_line

__all__ = ["app", "main"]

app = typer.Typer(
    help="Vision checkpoints, unchanged, compiled, certified and run as fast as the machine allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The entry point: a deliberate error is one line on stderr and exit code 1."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        # With standalone mode off, an exit code comes back as the value.
        code = app(standalone_mode=False)
    except VisionfastError as error:
        if debug:
            raise
        _fail(str(error), 1)
    except KeyboardInterrupt:
        _fail("interrupted; nothing half-written is left", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output went away: nobody is left to be told
        sys.exit(141)
    except Exception as error:
        if debug:
            raise
        if _is_usage_error(error):
            if isinstance(message := getattr(error, "message", None), str):
                error.message = one_line(message)  # type: ignore[attr-defined]
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        _fail(
            f"{type(error).__name__}: {' '.join(str(error).split())} (a defect of visionfast; --debug shows where)",
            1,
        )
    if code == 130:  # typer's word for Ctrl-C
        _fail("interrupted; nothing half-written is left", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _is_usage_error(error: Exception) -> bool:
    """Typer brings its own Click or uses the installed one, by release; both name their usage errors alike."""
    return any(kind.__name__ == "ClickException" for kind in type(error).__mro__)


def _fail(message: str, code: int) -> None:
    _complain(message)
    sys.exit(code)


def _complain(message: str) -> None:
    print(f"visionfast: {one_line(message)}", file=sys.stderr)


def _version(shown: bool) -> None:
    if shown:
        print(f"visionfast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback where something fails.")] = False,
) -> None:
    pass


@app.command("fetch")
def fetch_verb(
    name: Annotated[str | None, typer.Argument(help="A published model; without it, they are listed.")] = None,
) -> None:
    """Bring published weights, and a card about them, into models/."""
    from visionfast import render
    from visionfast.fetch import PUBLISHED, fetch

    if name is None:
        render.published(PUBLISHED)
        return
    with render.download(name) as progress:
        path = fetch(name, progress=progress)
    print(path)


@app.command("build")
def build_verb(
    model: Annotated[str, typer.Option(help="A weights file, or a name under models/.")],
    backend: Annotated[
        str | None,
        typer.Option(help="openvino, tensorrt, tensorrt-rtx or torch; default: this machine's best."),
    ] = None,
    imgsz: Annotated[
        str | None,
        typer.Option(help="Input size: 640, or height x width: 384x640. Default: the checkpoint's."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Images a call.")] = 1,
    resize: Annotated[
        str | None,
        typer.Option(help="DINO: crop, the middle of an image, or squash, all of it. Default: crop."),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp16 or fp32; bf16 on CPUs that compute it. Default: the backend's."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="GPU generation to build for, ahead of time: sm89. Once for each of several."),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of real images to certify on.")] = None,
    keep_fp32: Annotated[
        str | None, typer.Option(help="Modules to keep in FP32 in an FP16 graph, with commas between.")
    ] = None,
    no_search: Annotated[
        bool,
        typer.Option("--no-search", help="Where FP16 fails, don't look for the modules that have to stay FP32."),
    ] = False,
    name: Annotated[str | None, typer.Option(help="The engine's name; default: the weights file's.")] = None,
    trust_checkpoint: Annotated[
        bool,
        typer.Option("--trust-checkpoint", help="Load a pickle that may RUN anything; only if you trust it."),
    ] = False,
) -> None:
    """Compile a checkpoint into an engine certified against PyTorch. Exit code 1 if any certificate failed."""
    from visionfast import render
    from visionfast.artifacts import find_model
    from visionfast.build import Built, build, build_all
    from visionfast.certify import images_in

    if precision not in (None, "fp32", "fp16", "bf16"):
        raise OptionError(f"--precision {precision}: expected fp32, fp16 or bf16")
    if resize not in (None, *RESIZES):
        raise OptionError(f"--resize {resize}: expected {' or '.join(RESIZES)}")
    weights = find_model(model)
    with render.stages() as progress:
        options: dict[str, Any] = {
            "backend": backend,
            "size_hw": size_hw(imgsz),
            "batch": batch,
            "resize": None if resize is None else RESIZES[resize],
            "precision": precision,
            "images": None if images is None else images_in(images),
            "keep_fp32": listed(keep_fp32) or (),
            "search": not no_search,
            "trust_checkpoint": trust_checkpoint,
            "name": name,
            "progress": progress,
        }
        built: tuple[Built, ...]
        if gpu is not None and len(gpu) > 1:
            built = build_all(weights, gpus=gpu, **options)
        else:
            folder, manifest = build(weights, gpu=gpu[0] if gpu else None, **options)
            built = (Built(manifest.device, folder, manifest),)
    complaints = []
    for one in built:
        if one.manifest is None:
            complaints.append(f"{one.device}: {one.error}")
            continue
        render.certificate(one.manifest)
        print(one.folder)
        if one.manifest.certificate.status == "failed":
            complaints.append("the certificate failed: the engine is written, but it does not agree with PyTorch")
    for complaint in complaints:
        _complain(complaint)
    if complaints:
        raise typer.Exit(1)


@app.command("certify")
def certify_verb(
    engine: EngineArgument,
    model: Annotated[
        str | None,
        typer.Option(help="The weights that it was built from; default: found under models/ by their sha256."),
    ] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of real images to certify on.")] = None,
    trust_checkpoint: Annotated[
        bool,
        typer.Option("--trust-checkpoint", help="Load a pickle that may RUN anything; only if you trust it."),
    ] = False,
) -> None:
    """Certify on this device an engine that was built before. Recorded in engine.json; exit code 1 if it failed."""
    from visionfast import render
    from visionfast.artifacts import find_engine, find_model
    from visionfast.certify import certify_engine, images_in
    from visionfast.pipeline import runs_here

    folder = find_engine(engine, usable=runs_here)
    with render.stages() as progress:
        manifest = certify_engine(
            folder,
            model=None if model is None else find_model(model),
            images=None if images is None else images_in(images),
            trust_checkpoint=trust_checkpoint,
            progress=progress,
        )
    render.certificate(manifest)
    print(folder)
    if manifest.certificate.status == "failed":
        _fail("the certificate failed, and engine.json says so: the engine does not agree with PyTorch here", 1)


app.command("predict")(predict_verb)
app.command("embed")(embed_verb)
app.command("search")(search_verb)
app.command("deploy")(deploy_verb)
app.command("rollback")(rollback_verb)
app.command("client")(client_verb)
app.command("serve")(serve_verb)
app.command("top")(top_verb)
app.command("verify")(verify_verb)
app.command("bench")(bench_verb)


@app.command("list")
def list_verb() -> None:
    """Models, engines and pipelines that are here. Of an engine also whether it can run on this machine."""
    from visionfast import render

    render.inventory()


@app.command("show")
def show_verb(engine: EngineArgument) -> None:
    """An engine's manifest and certificate."""
    from visionfast import render
    from visionfast.artifacts import find_engine, read_manifest
    from visionfast.pipeline import runs_here

    folder = find_engine(engine, usable=runs_here)
    render.manifest(folder, read_manifest(folder, verify=True))


@app.command("doctor")
def doctor_verb() -> None:
    """What this machine has, which backends work, and what to install."""
    from visionfast import render

    render.doctor()


if __name__ == "__main__":
    main()
