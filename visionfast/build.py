"""A checkpoint → a compiled engine with its certificate."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from visionfast import artifacts
from visionfast._version import __version__
from visionfast.backends import BACKENDS, Backend, CompileRequest, get_backend
from visionfast.certify import certify, default_images
from visionfast.checkpoint import open_checkpoint
from visionfast.errors import BackendError, BackendUnavailableError, OptionError
from visionfast.export import export_onnx
from visionfast.families import LoadedModel, identify
from visionfast.types import Certificate, EngineManifest, GraphSpec, Precision

__all__ = ["best_backend", "build"]

_NEEDED = ("torch", "onnx", "ultralytics")


def best_backend() -> Backend:
    """The fastest runtime that can both build and run here.

    Raises:
        BackendUnavailableError: none can.
    """
    for name in ("tensorrt", "tensorrt-rtx", "openvino", "torch"):
        backend = get_backend(name)
        if (state := backend.availability()).can_build and state.can_run:
            return backend
    raise BackendUnavailableError(
        f"none of {', '.join(BACKENDS)} can build and run here; `visionfast doctor` says what to install"
    )


def build(
    model: Path,
    *,
    backend: str | None = None,
    size_hw: tuple[int, int] | None = None,
    batch: int = 1,
    precision: Precision | None = None,
    gpu: str | None = None,
    images: Sequence[Path] | None = None,
    keep_fp32: Sequence[str] = (),
    trust_checkpoint: bool = False,
    name: str | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[Path, EngineManifest]:
    """Compiles a checkpoint, certifies the engine on this machine where it can run, and writes it under engines/.

    Args:
        model: the weights file.
        backend: key in `BACKENDS`; default: the best of this machine, or TensorRT-RTX when a `gpu` is named.
        size_hw: of the input, pixels; default: what the checkpoint was trained with.
        batch: images a call.
        precision: default: the backend's own (FP16 on GPUs, FP32 on CPUs).
        gpu: the GPU generation to compile for, e.g. `sm89`.
        images: real ones to certify on; default: two photographs.
        keep_fp32: modules that stay FP32 in an FP16 graph.
        trust_checkpoint: load a pickle without the allow-list.
        name: of the engine's folder; default: the weights file's name.
        progress: is told each stage as it begins.

    Returns:
        The engine's folder and its manifest. An engine whose certificate failed is written, and says so.

    Raises:
        CheckpointError, OptionError, BackendError, BuildError, CertificateError, ArtifactError: nothing is written.
    """
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise BackendUnavailableError(f"building needs {', '.join(missing)}; `pip install 'visionfast[build]'`")
    chosen = get_backend(backend or "tensorrt-rtx") if backend or gpu else best_backend()
    state = chosen.availability()
    if not state.can_build:
        raise BackendUnavailableError(f"{chosen.name}: cannot build here: {state.reason}")
    device = chosen.resolve_device(gpu)
    precision = precision or chosen.default_precision
    if precision not in state.precisions:
        raise OptionError(f"precision {precision}: {chosen.name} builds {', '.join(state.precisions)} on this machine")

    progress("reading the checkpoint")
    checkpoint = open_checkpoint(model, trust=trust_checkpoint)
    loaded = identify(checkpoint).load(checkpoint, name=name or _plain_name(model), size_hw=size_hw, batch=batch)
    samples = list(images) if images is not None else default_images()
    target = artifacts.engines_home() / loaded.spec.name / _variant(chosen.name, precision, device, loaded)
    with artifacts.atomic_folder(target) as folder:
        manifest = _compile(chosen, loaded, folder, device, precision, tuple(keep_fp32), checkpoint.sha256, progress)
        manifest = replace(manifest, runtime_version=state.version)
        artifacts.write_manifest(folder, manifest)
        progress("certifying")
        manifest = replace(manifest, certificate=_certificate(chosen, loaded, folder, manifest, samples))
        artifacts.write_manifest(folder, manifest)
    return target, manifest


def _compile(
    backend: Backend,
    model: LoadedModel,
    folder: Path,
    device: str,
    precision: Precision,
    keep_fp32: tuple[str, ...],
    weights_sha256: str,
    progress: Callable[[str], None],
) -> EngineManifest:
    """Every graph of the model through ONNX into the backend's own files."""
    graphs: list[GraphSpec] = []
    files: dict[str, str] = {}
    hashes: dict[str, str] = {}
    onnx_hashes: dict[str, str] = {}
    graph_precision: Precision = precision if backend.typed_graphs else "fp32"
    with tempfile.TemporaryDirectory(prefix="visionfast-") as scratch:
        for graph in model.spec.graphs:
            progress(f"exporting {graph.name}")
            onnx_path = Path(scratch) / f"{graph.name}.onnx"
            module = model.modules[graph.name]
            islands = (*model.fp32_islands.get(graph.name, ()), *keep_fp32)
            exported = export_onnx(module, graph, onnx_path, precision=graph_precision, keep_fp32=islands)
            onnx_hashes[graph.name] = artifacts.sha256_file(onnx_path)
            progress(f"compiling {graph.name} with {backend.name}")
            request = CompileRequest(
                exported, onnx_path, module, model.spec.preprocess, precision, islands, device, folder
            )
            compiled = backend.compile(request)
            graphs.append(compiled.graph)
            files[graph.name] = compiled.file
            hashes |= {name: artifacts.sha256_file(folder / name) for name in compiled.files}
    return EngineManifest(
        spec=replace(model.spec, graphs=tuple(graphs)),
        backend=backend.name,
        precision=precision,
        device=device,
        runtime_version="",
        files=files,
        sha256=hashes,
        onnx_sha256=onnx_hashes,
        weights_sha256=weights_sha256,
        keep_fp32=(*(name for names in model.fp32_islands.values() for name in names), *keep_fp32)
        if graph_precision == "fp16"
        else (),
        certificate=Certificate("not yet run on a device"),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        visionfast_version=__version__,
    )


def _certificate(
    backend: Backend, model: LoadedModel, folder: Path, manifest: EngineManifest, images: Sequence[Path]
) -> Certificate:
    try:
        backend.check_runnable(manifest)
    except BackendError:
        return Certificate("not yet run on a device")
    with backend.load(folder, manifest, manifest.spec.graphs[0]) as runner:
        return certify(model, runner, images, precision=manifest.precision)


def _plain_name(model: Path) -> str:
    """A weights file's name as a folder's name; `best.pt` says nothing, so its folder's name stands for it."""
    stem = model.resolve().parent.name if model.stem in ("best", "last", "model") else model.stem
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).lstrip(".") or "model"


def _variant(backend: str, precision: str, device: str, model: LoadedModel) -> str:
    h, w = model.spec.preprocess.size_hw
    return f"{backend}-{precision}-{device}-{h}x{w}-b{model.spec.batch}"
