"""What a build needs to know, decided before anything is written; and the steps from there to an engine."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from visionfast import artifacts, machine
from visionfast._version import __version__
from visionfast.backends import BACKENDS, Backend, CompileRequest, get_backend
from visionfast.certify import certify_files, default_images
from visionfast.checkpoint import open_checkpoint
from visionfast.errors import BackendError, BackendUnavailableError, OptionError
from visionfast.export import export_onnx
from visionfast.families import LoadedModel, identify
from visionfast.islands import with_islands
from visionfast.types import Certificate, EngineManifest, GraphSpec, Precision

__all__ = ["MAX_BUILDS", "Exported", "Plan", "best_backend"]

MAX_BUILDS = 24
"""Of engines, in the search for modules that have to stay FP32."""


def best_backend() -> Backend:
    """The fastest runtime that can both build and run here.

    Raises:
        BackendUnavailableError: none can.
    """
    # PyTorch on a GPU is faster than anything on a CPU, where everything else is faster than PyTorch.
    for name, wants_gpu in (
        ("tensorrt", True),
        ("tensorrt-rtx", True),
        ("torch", True),
        ("openvino", False),
        ("torch", False),
    ):
        backend = get_backend(name)
        state = backend.availability()
        if not (state.can_build and state.can_run):
            continue
        with contextlib.suppress(OptionError):  # it does not know the GPU that is here: TensorRT-RTX and Hopper
            if (backend.resolve_device(None) != "cpu") == wants_gpu:
                return backend
    raise BackendUnavailableError(
        f"none of {', '.join(BACKENDS)} can build and run here; `visionfast doctor` says what to install"
    )


@dataclass(frozen=True, slots=True)
class Exported:
    """One graph as ONNX: its tensors as written, and the modules that stay FP32 in it."""

    graph: GraphSpec
    path: Path
    islands: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is built, for which devices, decided and checked before anything is written.

    Attributes:
        backend: the runtime.
        runtime_version: of its package.
        devices: to compile for.
        model: the checkpoint, opened.
        weights_sha256: of the checkpoint.
        precision: of the engines.
        keep_fp32: modules that the caller wants in FP32.
        images: to certify on.
        max_builds: in the search for modules that drift; 0: no search.
        progress: is told each stage as it begins.
    """

    backend: Backend
    runtime_version: str
    devices: tuple[str, ...]
    model: LoadedModel
    weights_sha256: str
    precision: Precision
    keep_fp32: tuple[str, ...]
    images: tuple[Path, ...]
    max_builds: int
    progress: Callable[[str], None]

    @classmethod
    def make(
        cls,
        model: Path,
        gpus: Sequence[str | None],
        *,
        backend: str | None = None,
        size_hw: tuple[int, int] | None = None,
        batch: int = 1,
        precision: Precision | None = None,
        images: Sequence[Path] | None = None,
        keep_fp32: Sequence[str] = (),
        trust_checkpoint: bool = False,
        name: str | None = None,
        search: bool = True,
        max_builds: int = MAX_BUILDS,
        progress: Callable[[str], None] = lambda stage: None,
    ) -> Plan:
        """Decides what was left open, and reads the checkpoint; arguments and errors as for `build.build`."""
        if missing := machine.missing_packages("torch", "onnx", "ultralytics"):
            raise BackendUnavailableError(f"building needs {', '.join(missing)}; `pip install 'visionfast[build]'`")
        if not gpus:
            raise OptionError("gpus: expected at least one GPU generation, such as sm89, got none")
        if name is not None and _plain_name(Path(f"{name}.pt")) != name:
            raise OptionError(f"name {name!r}: expected letters, digits, '.', '_' and '-', not a '.' first")
        chosen = get_backend(backend or "tensorrt-rtx") if backend or gpus[0] is not None else best_backend()
        state = chosen.availability()
        if not state.can_build:
            raise BackendUnavailableError(f"{chosen.name}: cannot build here: {state.reason}")
        devices = tuple(dict.fromkeys(chosen.resolve_device(gpu) for gpu in gpus))
        precision = precision or chosen.default_precision(devices[0])
        if precision not in state.precisions:
            raise OptionError(
                f"precision {precision}: {chosen.name} builds {', '.join(state.precisions)} on this machine"
            )
        if keep_fp32 and precision != "fp32" and not chosen.typed_graphs:
            raise OptionError(
                f"keep_fp32: {chosen.name} chooses each layer's precision itself; use tensorrt-rtx or torch, "
                "or leave it out"
            )
        if keep_fp32 and precision != "fp16":
            raise OptionError(
                f"keep_fp32 {', '.join(keep_fp32)}: expected an FP16 graph to keep them in, got {precision} with "
                f"{chosen.name}; leave it out"
            )
        progress("reading the checkpoint")
        checkpoint = open_checkpoint(model, trust=trust_checkpoint)
        loaded = identify(checkpoint).load(checkpoint, name=name or _plain_name(model), size_hw=size_hw, batch=batch)
        return cls(
            backend=chosen,
            runtime_version=state.version,
            devices=devices,
            model=loaded,
            weights_sha256=checkpoint.sha256,
            precision=precision,
            keep_fp32=tuple(keep_fp32),
            images=tuple(images) if images is not None else tuple(default_images()),
            max_builds=max_builds if search else 0,
            progress=progress,
        )

    @property
    def graph_precision(self) -> Precision:
        """What is written into the graphs."""
        return self.precision if self.backend.typed_graphs else "fp32"

    def islands(self, graph: str) -> tuple[str, ...]:
        """Modules of a graph that stay FP32 in any case: the family's, and the caller's."""
        return (*self.model.fp32_islands.get(graph, ()), *self.keep_fp32)

    def export(self, folder: Path, keep_fp32: Sequence[str] = ()) -> tuple[Exported, ...]:
        """Every graph of the model as ONNX; the same for every device."""
        exported = []
        for graph in self.model.spec.graphs:
            self.progress(f"exporting {graph.name}")
            path = folder / f"{graph.name}.onnx"
            islands = (*self.islands(graph.name), *keep_fp32)
            module = self.model.modules[graph.name]
            written = export_onnx(module, graph, path, precision=self.graph_precision, keep_fp32=islands)
            exported.append(Exported(written, path, islands))
        return tuple(exported)

    def compile(self, device: str, exported: Sequence[Exported], folder: Path) -> EngineManifest:
        """The graphs as the backend's own files in `folder`, with an engine.json that has no certificate yet."""
        graphs: list[GraphSpec] = []
        files: dict[str, str] = {}
        hashes: dict[str, str] = {}
        layers: Counter[str] = Counter()
        for item in exported:
            self.progress(f"compiling {item.graph.name} with {self.backend.name}{self._for(device)}")
            request = CompileRequest(
                graph=item.graph,
                onnx_path=item.path,
                module=self.model.modules[item.graph.name],
                preprocess=self.model.spec.preprocess,
                precision=self.precision,
                keep_fp32=item.islands,
                device=device,
                folder=folder,
            )
            compiled = self.backend.compile(request)
            graphs.append(compiled.graph)
            files[item.graph.name] = compiled.file
            layers.update(compiled.layers)
            hashes |= {name: artifacts.sha256_file(folder / name) for name in compiled.files}
        kept = [path for item in exported for path in item.islands] if self.graph_precision == "fp16" else []
        manifest = EngineManifest(
            spec=replace(self.model.spec, graphs=tuple(graphs)),
            backend=self.backend.name,
            precision=self.precision,
            device=device,
            runtime_version=self.runtime_version,
            files=files,
            sha256=hashes,
            onnx_sha256={item.graph.name: artifacts.sha256_file(item.path) for item in exported},
            weights_sha256=self.weights_sha256,
            keep_fp32=tuple(dict.fromkeys(kept)),
            certificate=Certificate("not yet run on a device"),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            visionfast_version=__version__,
            platform=machine.platform_name(),
            layers=dict(layers),
        )
        artifacts.write_manifest(folder, manifest)
        return manifest

    def certified(self, manifest: EngineManifest, folder: Path) -> EngineManifest:
        """With its certificate where this machine can run it."""
        try:
            self.backend.check_runnable(manifest)
        except BackendError:
            return manifest
        self.progress(f"certifying{self._for(manifest.device)}")
        return replace(manifest, certificate=certify_files(self.model, folder, manifest, self.images))

    def build(self, device: str, exported: Sequence[Exported]) -> tuple[Path, EngineManifest]:
        """One engine, whole or not at all."""
        spec = self.model.spec
        h, w = spec.preprocess.size_hw
        variant = f"{self.backend.name}-{self.precision}-{device}-{h}x{w}-b{spec.batch}"
        target = artifacts.engines_home() / spec.name / variant
        with artifacts.atomic_folder(target) as folder:
            manifest = self.certified(self.compile(device, exported, folder), folder)
            searches = self.max_builds > 0 and self.graph_precision == "fp16"
            if manifest.certificate.status == "failed" and searches:
                manifest = self._with_islands(manifest, folder)
            artifacts.write_manifest(folder, manifest)
        return target, manifest

    def _with_islands(self, failed: EngineManifest, folder: Path) -> EngineManifest:
        def make(keep_fp32: tuple[str, ...], trial: Path) -> EngineManifest:
            with tempfile.TemporaryDirectory(prefix="visionfast-") as scratch:
                exported = self.export(Path(scratch), keep_fp32)
                return self.certified(self.compile(failed.device, exported, trial), trial)

        return with_islands(
            self.model,
            self.images,
            failed,
            folder,
            make=make,
            keep_fp32=self.islands(self.model.spec.graphs[0].name),
            max_builds=self.max_builds,
            progress=self.progress,
        )

    def _for(self, device: str) -> str:
        return f" for {device}" if len(self.devices) > 1 else ""


def _plain_name(model: Path) -> str:
    """A weights file's name as a folder's name; `best.pt` says nothing, so its folder's name stands for it."""
    stem = model.resolve().parent.name if model.stem in ("best", "last", "model") else model.stem
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).lstrip(".") or "model"
