"""What the command line shows: tables and progress, by rich. Results go to stdout, progress to stderr."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from visionfast import artifacts, machine
from visionfast.backends import BACKENDS, get_backend
from visionfast.errors import BackendError, VisionfastError
from visionfast.fetch import Published
from visionfast.types import EngineManifest, ModelSpec, PreprocessSpec

__all__ = ["certificate", "doctor", "download", "inventory", "manifest", "published", "stages"]

_out = Console(highlight=False, soft_wrap=True)
if not _out.is_terminal:
    _out.width = 200  # a pipe or a file has no edge to wrap at
_err = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """A spinner with the stage's name; a line a stage where nobody watches."""
    if not _err.is_terminal:
        yield lambda stage: _err.print(escape(stage))
        return
    with _err.status("starting") as status:
        yield lambda stage: status.update(escape(stage))


@contextlib.contextmanager
def download(name: str) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=_err, transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def published(models: Mapping[str, Published]) -> None:
    table = Table("name", "what it is", "licence", box=None)
    for name, source in models.items():
        table.add_row(name, source.about, source.license)
    _out.print(table)


def certificate(manifest: EngineManifest) -> None:
    """The certificate as a small table: measured, allowed, verdict."""
    proof = manifest.certificate
    if proof.status not in ("passed", "failed"):
        where = escape(f"this machine cannot run {manifest.backend} for {manifest.device}")
        _out.print(f"certificate: {proof.status} ({where}; `visionfast certify` on one that can)")
        return
    colour = "green" if proof.status == "passed" else "red"
    images = len([entry for entry in proof.images if "error" not in entry])
    _out.print(f"certificate: [{colour}]{proof.status}[/] on {images} images, against {escape(proof.reference)}")
    table = Table("measure", "measured", "allowed", box=None)
    for name, value in proof.measures.items():
        if name in ("images", "views"):  # how many there were is said above
            continue
        bound = proof.tolerances.get(name)
        allowed = "" if bound is None else f"{'≥' if name.startswith('min') else '≤'} {bound:g}"
        table.add_row(escape(name.replace("_", " ")), _measured(name, value), allowed)
    _out.print(table)
    for path, reason in proof.kept.items():
        _out.print(f"kept in FP32: {escape(path)}: {escape(reason)}")
    if proof.search:
        _out.print(f"search for modules to keep in FP32: {escape(proof.search)}")
    for entry in proof.images:
        if "error" in entry:
            _out.print(f"left out: {escape(str(entry.get('file')))}: {escape(str(entry['error']))}")


def _measured(name: str, value: float) -> str:
    """Five digits; of a cosine that is all but 1, by how much it is not."""
    if name.endswith("cosine") and 0.999 < value < 1:
        return f"1 - {1 - value:.1e}"
    return f"{value:.5g}"


def manifest(folder: Path, engine: EngineManifest) -> None:
    spec = engine.spec
    table = Table(box=None, show_header=False)
    names = ", ".join(spec.class_names[:8]) + (f", … ({len(spec.class_names)})" if len(spec.class_names) > 8 else "")
    rows = {
        "engine": str(folder),
        "model": f"{spec.architecture} ({spec.task}), weights sha256 {engine.weights_sha256[:16]}…",
        "licence": _licence(engine),
        **({"classes": names} if names else {}),
        **_tensors(spec),
        **({"images": _looked_at(spec.preprocess)} if spec.task == "embed" else {}),
        "backend": f"{engine.backend} {engine.runtime_version}, {engine.precision}, for {engine.device}"
        + (f", on {engine.platform}" if engine.platform else ""),
        **({"kept in FP32": ", ".join(engine.keep_fp32)} if engine.keep_fp32 else {}),
        **(
            {"layers": ", ".join(f"{count} give {dtype}" for dtype, count in engine.layers.items())}
            if engine.layers
            else {}
        ),
        "files": ", ".join(f"{name} ({(folder / name).stat().st_size / 1e6:.1f} MB)" for name in engine.sha256),
        "built": f"{engine.created} by visionfast {engine.visionfast_version}",
        "runs here": _runs_here(engine) or "yes",
    }
    for key, value in rows.items():
        table.add_row(key, escape(value))
    _out.print(table)
    certificate(engine)


def _tensors(spec: ModelSpec) -> dict[str, str]:
    """What goes into each graph and what comes out; the graphs are named where there are several."""
    h, w = spec.preprocess.size_hw
    rows = {}
    for graph in spec.graphs:
        of_graph = f"{graph.name} " if len(spec.graphs) > 1 else ""
        images = f"{spec.batch} × {h}×{w}, " if graph is spec.graphs[0] else ""
        rows[f"{of_graph}input"] = images + ", ".join(f"{t.name} {t.shown} {t.dtype}" for t in graph.inputs)
        rows[f"{of_graph}output"] = ", ".join(f"{t.name} {t.shown} {t.dtype}" for t in graph.outputs)
    return rows


def _looked_at(pre: PreprocessSpec) -> str:
    """What an embedder sees of an image."""
    h, w = pre.size_hw
    if pre.cover_hw is None:
        return f"Resize(({h}, {w}), bicubic, antialias), all of it squashed; Normalize({_statistics(pre)})"
    cover_h, cover_w = pre.cover_hw
    cover = str(cover_h) if cover_h == cover_w else f"to cover {cover_h}×{cover_w}"
    crop = str(h) if h == w else f"({h}, {w})"
    return f"Resize({cover}, bicubic, antialias), CenterCrop({crop}), Normalize({_statistics(pre)})"


def _statistics(pre: PreprocessSpec) -> str:
    if (pre.mean, pre.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)):
        return "ImageNet"
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (pre.mean, pre.std))
    return f"({mean}), ({std})"


def _licence(engine: EngineManifest) -> str:
    """What the checkpoint claims, and what the card that was fetched with it says where that differs."""
    claimed = engine.spec.license
    cards = [_card(path) for path in artifacts.model_files()]
    said = next((str(c.get("license", "")) for c in cards if c.get("sha256") == engine.weights_sha256), "")
    if not said or said == claimed:
        return claimed or "not stated in the checkpoint"
    return f"the checkpoint claims {claimed or 'none'}; its card says {said}"


def _runs_here(engine: EngineManifest) -> str:
    """Why not; empty when it does."""
    try:
        get_backend(engine.backend).check_runnable(engine)
    except VisionfastError as error:
        return f"no: {error}"
    return ""


def inventory() -> None:
    models = artifacts.model_files()
    table = Table("model", "size", "licence", title="models", title_justify="left", box=None)
    for path in models:
        table.add_row(_near(path), f"{path.stat().st_size / 1e6:.1f} MB", escape(_card(path).get("license", "")))
    none = f"no models under {escape(str(artifacts.models_home()))}; `visionfast fetch` brings one"
    _out.print(table if models else none)

    folders = artifacts.engine_folders()
    table = Table(
        "engine", "model", "task", "certificate", "runs here", title="engines", title_justify="left", box=None
    )
    for folder in folders:
        try:
            engine = artifacts.read_manifest(folder)
        except VisionfastError as error:
            table.add_row(_near(folder), "", "", "", escape(f"no: {error}"))
            continue
        runs = _runs_here(engine) or "yes"
        spec = engine.spec
        table.add_row(_near(folder), escape(spec.architecture), spec.task, engine.certificate.status, escape(runs))
    none = f"no engines under {escape(str(artifacts.engines_home()))}; `visionfast build` makes one"
    _out.print(table if folders else none)

    root = artifacts.pipelines_home()
    pipelines = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    table = Table("pipeline", "served", "versions", title="pipelines", title_justify="left", box=None)
    for path in pipelines:
        table.add_row(_near(path), *_versions(path))
    none = f"no pipelines under {escape(str(root))}; `visionfast deploy` writes one"
    _out.print(table if pipelines else none)


def _versions(pipeline: Path) -> tuple[str, str]:
    """The version that is served, and all that there are."""
    from visionfast.serving.repository import versions

    try:
        served, every = versions(pipeline)
    except VisionfastError as error:
        return escape(f"no: {error}"), ""
    return str(served), ", ".join(map(str, every))


def _near(path: Path) -> str:
    return escape(artifacts.near(path))


def _card(path: Path) -> dict[str, str]:
    try:
        card = json.loads((path.parent / "card.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return card if isinstance(card, dict) else {}


def _serving() -> str:
    """The Triton server that `visionfast serve` would start, and what asks it; NVIDIA's, not the language."""
    from visionfast.serving.tritonserver import find_installation

    client = machine.package_version("tritonclient")
    asks = f"tritonclient {client}" if client else "no tritonclient: deploying and asking need visionfast[triton]"
    try:
        installation = find_installation()
    except BackendError as error:
        return f"{error}; {asks}"
    package = machine.package_version("nvidia-pytriton") if installation.python_backend else None
    server = f"tritonserver of nvidia-pytriton {package}" if package else str(installation.binary)
    return f"{server}, {asks}"


def doctor() -> None:
    flags = machine.cpu_flags()
    fast = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_bf16", "amx_int8") if name in flags]
    vectors = " ".join(fast) or "no wide vectors"
    _out.print(f"CPU      {machine.cpu_name()}, {machine.usable_cpus()} usable, {vectors}")
    for gpu in machine.gpus():
        _out.print(f"GPU {gpu.index}    {gpu.name} ({gpu.sm})")
    if not machine.gpus():
        _out.print("GPU      none with an NVIDIA driver")
    if driver := machine.driver_version():
        _out.print(f"driver   serves CUDA up to {machine.cuda_release(driver)}")
    _out.print(f"Python   {platform.python_version()}, {platform.system()} {platform.machine()}")
    torch, triton = machine.package_version("torch"), machine.package_version("triton")
    dali = machine.package_version("nvidia-dali-cuda130", "nvidia-dali-cuda120")
    if torch and machine.gpus():
        cuda = ", built without CUDA: it cannot use the GPU" if "+cpu" in torch else ""
    else:
        cuda = ", on the CPU" if torch else ""
    _out.print(f"PyTorch  {torch or 'not installed: builds need it, and every GPU session'}{cuda}")
    language = f"{triton}, the language of the GPU kernels" if triton else "not installed: a GPU session needs it"
    _out.print(f"Triton   {language}")
    _out.print(f"DALI     {dali or 'not installed: a GPU session decodes on the CPU'}")
    _out.print(f"serving  {escape(_serving())}")
    table = Table("backend", "version", "builds here", "runs here", "precisions", "what is missing", box=None)
    for name in BACKENDS:
        try:
            state = get_backend(name).availability()
        except BackendError as error:
            table.add_row(name, "", "no", "no", "", escape(str(error)))
            continue
        marks = ["yes" if able else "no" for able in (state.can_build, state.can_run)]
        table.add_row(name, state.version or "—", *marks, " ".join(state.precisions), escape(state.reason))
    _out.print(table)
    if "amx_bf16" in flags:
        _out.print("This CPU has AMX: `visionfast build … --precision bf16` is worth a try with YOLO.")
