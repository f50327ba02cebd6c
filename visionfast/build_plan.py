"""What a build needs to know, decided before anything is written; and the steps from there to an engine."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from visionfast import artifacts, machine
from visionfast._version import __version__
from visionfast.backends import BACKENDS, Backend, CompileRequest, get_backend
from visionfast.certify import certify_files, default_images
from visionfast.checkpoint import open_checkpoint
from visionfast.errors import BackendError, BackendUnavailableError, OptionError
from visionfast.export import check_paths, export_onnx
from visionfast.families import LoadedModel, identify
from visionfast.islands import with_islands
from visionfast.onnx_files import sha256_onnx
from visionfast.types import Certificate, EngineManifest, GraphSpec, Precision, Resize
from visionfast.whole_numbers import MAX_BATCH, checked_whole

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
        keep_fp32: modules that the caller wants in FP32; of several graphs, `graph.path`.
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
        resize: Resize | None = None,
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
        batch = checked_whole("batch", batch, MAX_BATCH)
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
        loaded = identify(checkpoint).load(
            checkpoint, name=name or _plain_name(model), size_hw=size_hw, batch=batch, resize=resize
        )
        _check_keep_fp32(loaded, keep_fp32)
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

    def islands(self, graph: str, keep_fp32: Sequence[str] = ()) -> tuple[str, ...]:
        """Paths of a graph's modules that stay FP32: the family's, the caller's, and those in `keep_fp32`, which are
        named as the caller's are."""
        named = (*self.keep_fp32, *keep_fp32)
        return (*self.model.fp32_islands.get(graph, ()), *_of_graph(self.model.spec.graphs, graph, named))

    def export(self, folder: Path, keep_fp32: Sequence[str] = ()) -> tuple[Exported, ...]:
        """Every graph of the model as ONNX; the same for every device.

        What a graph takes from one before it, it takes in the dtype that comes out there.
        """
        exported: list[Exported] = []
        for graph in self.model.spec.graphs:
            self.progress(f"exporting {graph.name}")
            path = folder / f"{graph.name}.onnx"
            islands = self.islands(graph.name, keep_fp32)
            before = {output.name: output.dtype for item in exported for output in item.graph.outputs}
            handed_on = tuple(tensor.name for tensor in graph.inputs if before.get(tensor.name) == "float32")
            written = export_onnx(
                self.model.modules[graph.name],
                graph,
                path,
                precision=self.graph_precision,
                keep_fp32=islands,
                fp32_inputs=(*self.model.fp32_inputs.get(graph.name, ()), *handed_on),
            )
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
        kept = self._named((item.graph.name, path) for item in exported for path in item.islands)
        manifest = EngineManifest(
            spec=replace(self.model.spec, graphs=tuple(graphs)),
            backend=self.backend.name,
            precision=self.precision,
            device=device,
            runtime_version=self.runtime_version,
            files=files,
            sha256=hashes,
            onnx_sha256={item.graph.name: sha256_onnx(item.path) for item in exported},
            weights_sha256=self.weights_sha256,
            keep_fp32=kept if self.graph_precision == "fp16" else (),
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
        # A checkpoint's usual way with images goes without saying.
        squashed = "-squash" if spec.task == "embed" and spec.preprocess.resize == "stretch" else ""
        variant = f"{self.backend.name}-{self.precision}-{device}-{h}x{w}-b{spec.batch}{squashed}"
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
            keep_fp32=self._named((g.name, path) for g in self.model.spec.graphs for path in self.islands(g.name)),
            max_builds=self.max_builds,
            progress=self.progress,
        )

    def _named(self, paths: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Modules of the graphs as people name them, each once."""
        graphs = self.model.spec.graphs
        return tuple(dict.fromkeys(_full_path(graphs, graph, path) for graph, path in paths))

    def _for(self, device: str) -> str:
        return f" for {device}" if len(self.devices) > 1 else ""


def _full_path(graphs: Sequence[GraphSpec], graph: str, path: str) -> str:
    """A module's path as people name it: where there are several graphs, with its graph's name before it."""
    if len(graphs) == 1:
        return path
    return f"{graph}.{path}" if path else graph  # an empty path is the whole graph


def _of_graph(graphs: Sequence[GraphSpec], graph: str, named: Sequence[str]) -> tuple[str, ...]:
    """Of modules as people name them, the paths inside one graph."""
    if len(graphs) == 1:
        return tuple(named)
    split = [name.partition(".") for name in named]
    return tuple(path for first, _, path in split if first == graph)


def _check_keep_fp32(model: LoadedModel, keep_fp32: Sequence[str]) -> None:
    """Raises `OptionError` where a name is no module's."""
    graphs = model.spec.graphs
    for name in keep_fp32:
        if name.endswith("."):
            raise OptionError(f"keep_fp32: expected a module's path, got {name!r}")
        if len(graphs) > 1 and name.partition(".")[0] not in model.modules:
            raise OptionError(
                f"keep_fp32: there is no graph for {name!r}; expected a module's path that begins with "
                f"{' or '.join(f'{graph.name}.' for graph in graphs)}"
            )
    for graph in graphs:
        prefix = f"{graph.name}." if len(graphs) > 1 else ""
        check_paths(model.modules[graph.name], _of_graph(graphs, graph.name, keep_fp32), prefix=prefix)


def _plain_name(model: Path) -> str:
    """A weights file's name as a folder's name; `best.pt` says nothing, so its folder's name stands for it."""
    stem = model.resolve().parent.name if model.stem in ("best", "last", "model") else model.stem
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem).lstrip(".") or "model"
