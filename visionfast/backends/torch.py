"""Eager PyTorch: the certificate's reference and the baseline, and a backend for machines with nothing else."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast import machine
from visionfast.backends import Availability, Compiled, CompileRequest, GraphRunner, check_feeds
from visionfast.errors import (
    BackendError,
    BackendUnavailableError,
    BuildError,
    IncompatibleEngineError,
    OptionError,
)
from visionfast.types import EngineManifest, GraphSpec, Precision

__all__ = ["TorchBackend", "TorchRunner"]


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise BackendUnavailableError(
            f"torch: expected the package, but {error}; `pip install 'visionfast[build]'`"
        ) from error
    return torch


class TorchBackend:
    """Keeps the graph as a `torch.export` program; running it needs torch and nothing of the model's own code."""

    name = "torch"
    default_precision: Precision = "fp32"
    typed_graphs = True

    def availability(self) -> Availability:
        if importlib.util.find_spec("torch") is None:
            return Availability("", False, False, "not installed: pip install 'visionfast[build]'", ())
        return Availability(importlib.metadata.version("torch"), True, True, "", ("fp32",))

    def resolve_device(self, gpu: str | None) -> str:
        if gpu is not None:
            raise OptionError(f"--gpu {gpu}: backend torch builds for the CPU; leave --gpu out")
        return "cpu"

    def compile(self, request: CompileRequest) -> Compiled:
        torch = _import_torch()
        if request.precision != "fp32":
            raise BuildError(f"precision {request.precision}: backend torch builds fp32; leave --precision out")
        example = tuple(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in request.graph.inputs)
        file = f"{request.graph.name}.pt2"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about torch's own internals
                program = torch.export.export(request.module, example, strict=False)
                torch.export.save(program, request.folder / file)
        except Exception as error:  # torch.export raises whatever the traced code or its own passes do
            raise BuildError(f"torch.export: {str(error).splitlines()[0]}") from error
        return Compiled(request.graph, file, (file,))

    def check_runnable(self, manifest: EngineManifest) -> None:
        _import_torch()
        if manifest.device != "cpu":
            raise IncompatibleEngineError(f"device {manifest.device}: expected an engine for the cpu; build it again")

    def load(
        self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, threads: int | None = None
    ) -> TorchRunner:
        self.check_runnable(manifest)
        torch = _import_torch()
        path = folder / manifest.files[graph.name]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about torch's own internals
                module = torch.export.load(path).module()
        except Exception as error:  # a damaged archive fails in many ways
            raise BackendError(
                f"{path}: torch cannot load it ({str(error).splitlines()[0]}); build it again"
            ) from error
        return TorchRunner(module, graph, threads=threads)


class TorchRunner(GraphRunner):
    """A module on the CPU behind the runner's interface."""

    def __init__(self, module: Any, graph: GraphSpec, *, threads: int | None = None) -> None:
        self._torch = _import_torch()
        self._torch.set_num_threads(threads or machine.usable_cpus())
        self._module = module
        super().__init__(graph)

    def infer(self, feeds: Mapping[str, npt.NDArray[Any]], *, copy: bool = True) -> dict[str, npt.NDArray[Any]]:
        check_feeds(self.inputs, feeds)
        torch = self._torch
        with torch.inference_mode():
            results = self._module(*(torch.from_numpy(np.ascontiguousarray(feeds[spec.name])) for spec in self.inputs))
        results = results if isinstance(results, (tuple, list)) else (results,)
        # eager PyTorch allocates its outputs anew each time: they are the caller's already
        return {spec.name: result.numpy() for spec, result in zip(self.outputs, results, strict=True)}

    def close(self) -> None:
        self._module = None
