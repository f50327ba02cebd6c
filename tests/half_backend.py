"""A backend that computes in FP16 on this machine, for what otherwise needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visionfast.backends import Availability, Compiled, CompileRequest
from visionfast.backends.torch import TorchRunner
from visionfast.export import half_precision
from visionfast.types import EngineManifest, GraphSpec, Runner

__all__ = ["COMPILED", "HalfBackend"]

COMPILED: dict[str, Any] = {}
"""Token in an engine's file → the module that it stands for."""


class HalfBackend:
    """Computes the typed graph in FP16 on the CPU: what the GPU backends do, where there is no GPU."""

    name = "half"
    typed_graphs = True

    def availability(self) -> Availability:
        return Availability("1", True, True, "", ("fp16", "fp32"))

    def resolve_device(self, gpu: str | None) -> str:
        return gpu or "cpu"

    def compile(self, request: CompileRequest) -> Compiled:
        module = request.module
        if request.precision == "fp16":
            module = half_precision(module, request.keep_fp32)
        token = str(len(COMPILED))
        COMPILED[token] = module
        file = f"{request.graph.name}.half"
        (request.folder / file).write_text(token)
        return Compiled(request.graph, file, (file,))

    def default_precision(self, device: str) -> Any:
        return "fp16"

    def check_runnable(self, manifest: EngineManifest, *, device_index: int | None = None) -> None:
        pass

    def load(self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, threads: int | None = None) -> Runner:
        return TorchRunner(COMPILED[(folder / manifest.files[graph.name]).read_text()], graph, threads=1)
