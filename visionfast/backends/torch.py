"""PyTorch: the certificate's reference and the baseline, and a backend for machines with nothing else.

On a CPU it computes in FP32. On a CUDA device it computes what the other GPU backends do: the FP16 graph with its
FP32 islands, channels last, in buffers that stay where they are, so that it goes through the same session, kernels
and CUDA graph as TensorRT.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visionfast import machine
from visionfast.backends import Availability, Compiled, CompileRequest, GraphRunner, check_bound, check_feeds
from visionfast.backends.compatibility import check_engine, machine_facts
from visionfast.backends.device_runner import DeviceRunner
from visionfast.cuda import CudaDevice, Device
from visionfast.errors import (
    BackendError,
    BackendUnavailableError,
    BuildError,
    IncompatibleEngineError,
    OptionError,
)
from visionfast.export import example_inputs, half_precision
from visionfast.types import EngineManifest, GraphSpec, Precision, Runner

if TYPE_CHECKING:
    import torch

__all__ = ["TorchBackend", "TorchEngine", "TorchRunner"]

_ANY_CUDA = "cuda"


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
    typed_graphs = True

    def availability(self) -> Availability:
        if importlib.util.find_spec("torch") is None:
            return Availability("", False, False, "not installed: pip install 'visionfast[build]'", ())
        return Availability(importlib.metadata.version("torch"), True, True, "", ("fp32", "fp16"))

    def resolve_device(self, gpu: str | None) -> str:
        if gpu is None:
            return _ANY_CUDA if machine.gpus() and _import_torch().cuda.is_available() else "cpu"
        if not re.fullmatch(r"cuda|sm\d{2,3}", gpu, re.ASCII):
            raise OptionError(f"--gpu {gpu}: expected cuda; a torch engine runs on every CUDA device")
        return _ANY_CUDA

    def default_precision(self, device: str) -> Precision:
        return "fp32" if device == "cpu" else "fp16"

    def compile(self, request: CompileRequest) -> Compiled:
        torch = _import_torch()
        module = request.module
        if request.precision == "fp16":
            if request.device == "cpu":
                raise BuildError(
                    "precision fp16: backend torch builds fp32 for the CPU; leave --precision out, or add `--gpu cuda`"
                )
            module = half_precision(module, request.keep_fp32)
        example = example_inputs(request.graph)
        file = f"{request.graph.name}.pt2"
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # about torch's own internals
                program = torch.export.export(
                    module, example, dynamic_shapes=_dynamic_shapes(torch, request.graph, example), strict=False
                )
                torch.export.save(program, request.folder / file)
        except Exception as error:  # torch.export raises whatever the traced code or its own passes do
            raise BuildError(f"torch.export: {str(error).splitlines()[0]}") from error
        return Compiled(request.graph, file, (file,))

    def check_runnable(self, manifest: EngineManifest, *, device_index: int | None = None) -> int | None:
        torch = _import_torch()
        if manifest.device not in ("cpu", _ANY_CUDA):
            raise IncompatibleEngineError(f"device {manifest.device}: expected cpu or cuda; build it again")
        index = check_engine(manifest, here=machine_facts(torch.__version__), device_index=device_index)
        if index is not None and not torch.cuda.is_available():
            raise BackendUnavailableError(f"torch {torch.__version__}: it sees no CUDA device; `visionfast doctor`")
        return index

    def load(self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, threads: int | None = None) -> Runner:
        if (index := self.check_runnable(manifest)) is not None:
            return DeviceRunner(self.load_on(CudaDevice(index), folder, manifest, graph))
        return TorchRunner(self._program(folder, manifest, graph).module(), graph, threads=threads)

    def load_streams(
        self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, streams: int, threads: int | None = None
    ) -> list[Runner]:
        if self.check_runnable(manifest) is not None:
            return [self.load(folder, manifest, graph) for _ in range(streams)]
        module = self._program(folder, manifest, graph).module()
        each = max(1, (threads or machine.usable_cpus()) // streams)  # torch's threads are those of one caller
        return [TorchRunner(module, graph, threads=each) for _ in range(streams)]

    def load_on(self, device: Device, folder: Path, manifest: EngineManifest, graph: GraphSpec) -> TorchEngine:
        if manifest.device == "cpu":
            raise IncompatibleEngineError(
                "device: the engine is for the cpu; build it with `--backend torch --gpu cuda`"
            )
        from torch.export.passes import move_to_device_pass

        with device.current(), _LOADING:
            module = move_to_device_pass(self._program(folder, manifest, graph), device.where).module()
        return TorchEngine(module, graph, device)

    def _program(self, folder: Path, manifest: EngineManifest, graph: GraphSpec) -> Any:
        torch = _import_torch()
        path = folder / manifest.files[graph.name]
        try:
            with _LOADING, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about torch's own internals
                return torch.export.load(path)
        except Exception as error:  # a damaged archive fails in many ways
            raise BackendError(
                f"{path}: torch cannot load it ({str(error).splitlines()[0]}); build it again"
            ) from error


def _dynamic_shapes(torch: Any, graph: GraphSpec, example: tuple[torch.Tensor, ...]) -> Any:
    """Which dimensions of the examples vary, from 1 up, as `torch.export.export` takes it."""
    varying = {
        axis: torch.export.Dim(axis, min=1, max=most)
        for spec in graph.inputs
        for axis, most in zip(spec.axes, spec.shape, strict=False)
        if axis
    }
    shapes = torch.export.ShapesCollection()  # told by tensor, whatever the signature of `forward` is
    for spec, tensor in zip(graph.inputs, example, strict=True):
        if spec.axes:
            shapes[tensor] = [varying.get(axis) for axis in spec.axes]
    return shapes if varying else None


class TorchEngine:
    """A module on a device's stream, with inputs and outputs that stay where they are.

    Args:
        module: on `device`, in the graph's precision.
        graph: its tensors.
        device: whose stream it is enqueued on.
    """

    def __init__(self, module: torch.nn.Module, graph: GraphSpec, device: Device) -> None:
        self._torch = _import_torch()
        self.device = device
        self._graph = graph
        with device.current():
            self._module: Any = module.to(memory_format=self._torch.channels_last)
        self._inputs: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self._graph.inputs

    @property
    def outputs(self) -> tuple[Any, ...]:
        return self._graph.outputs

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        check_bound((*self.inputs, *self.outputs), tensors)
        self._inputs = [tensors[spec.name] for spec in self.inputs]
        self._targets = [tensors[spec.name] for spec in self.outputs]

    def enqueue(self) -> None:
        torch = self._torch
        with self.device.current(), torch.inference_mode(), _ieee_convolutions(torch):
            # Convolutions in FP16 take the tensor cores' own layout; the copy is one pass over the input.
            feeds = (
                t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t  # (B, 3, h, w)
                for t in self._inputs
            )
            results = self._module(*feeds)
            results = results if isinstance(results, (tuple, list)) else (results,)
            for result, target in zip(results, self._targets, strict=True):
                target.copy_(result, non_blocking=True)

    def can_be_captured(self) -> bool:
        return True

    def close(self) -> None:
        self._module = None
        self._inputs, self._targets = [], []


@contextlib.contextmanager
def _ieee_convolutions(torch: Any) -> Iterator[None]:
    """FP32 convolutions in FP32: cuDNN otherwise rounds their inputs to 10 bits, which moves boxes by 0.2 px.

    It is a setting of the whole process, so sessions in other threads take turns at asking for it. It matters while
    work is put on the stream, not while it runs: a captured graph keeps what it was captured with.
    """
    cudnn = torch.backends.cudnn
    # Since 2.9 each operation has its own. The older switch is then no more than a default: it does not overrule
    # `torch.backends.fp32_precision`, and it cannot be read where the operations differ.
    where, name, exact = (
        (cudnn.conv, "fp32_precision", "ieee") if hasattr(cudnn, "conv") else (cudnn, "allow_tf32", False)
    )
    with _TF32:
        before = getattr(where, name)
        setattr(where, name, exact)
        try:
            yield
        finally:
            setattr(where, name, before)


_TF32 = threading.RLock()
# `torch.export.load` keeps what it is at in a variable of the process, and refuses a second thread; `catch_warnings`
# would restore another thread's filters.
_LOADING = threading.RLock()


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
            # What may not be written to, as cached features, torch takes a copy of only.
            arrays = (np.require(feeds[spec.name], requirements=["C", "W"]) for spec in self.inputs)
            results = self._module(*map(torch.from_numpy, arrays))
        results = results if isinstance(results, (tuple, list)) else (results,)
        # eager PyTorch allocates its outputs anew each time: they are the caller's already
        return {spec.name: result.numpy() for spec, result in zip(self.outputs, results, strict=True)}

    def close(self) -> None:
        self._module = None
