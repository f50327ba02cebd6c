"""Runtimes. Each knows how to compile a graph and how to run what it compiled, and nothing about models.

`BACKENDS` maps a name to the module and class that serve it; nothing is imported until it is asked for.
A new runtime is one module here and one line in the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from visionfast.errors import OptionError, ShapeError
from visionfast.types import EngineManifest, GraphSpec, Precision, PreprocessSpec, Runner, TensorSpec

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from visionfast.cuda import Device

__all__ = [
    "BACKENDS",
    "Availability",
    "Backend",
    "CompileRequest",
    "Compiled",
    "DeviceEngine",
    "GraphRunner",
    "check_bound",
    "check_feeds",
    "get_backend",
]

BACKENDS: dict[str, str] = {
    "openvino": "visionfast.backends.openvino:OpenVinoBackend",
    "tensorrt": "visionfast.backends.tensorrt:TensorRtBackend",
    "tensorrt-rtx": "visionfast.backends.tensorrt:TensorRtRtxBackend",
    "torch": "visionfast.backends.torch:TorchBackend",
}


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can build and run on this machine.

    Attributes:
        version: of the runtime's package, or empty where it is not installed.
        can_build, can_run: on this machine, now.
        reason: why not, and what would be needed; empty when both can.
        precisions: that it can build.
    """

    version: str
    can_build: bool
    can_run: bool
    reason: str
    precisions: tuple[Precision, ...]


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """One graph to compile.

    Attributes:
        graph: tensors of the ONNX.
        onnx_path: with its shapes and its precision written into it.
        module: the eager FP32 `torch.nn.Module` that the ONNX was made from, for runtimes that take it.
        preprocess: lets a runtime take normalisation into the engine.
        precision: asked for.
        keep_fp32: modules that stay FP32 in an FP16 graph, the family's own islands among them.
        device: `cpu`, `cuda`, or the GPU generation, e.g. `sm89`.
        folder: where the engine's files go.
    """

    graph: GraphSpec
    onnx_path: Path
    module: Any
    preprocess: PreprocessSpec
    precision: Precision
    keep_fp32: tuple[str, ...]
    device: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came out.

    Attributes:
        graph: the compiled graph's tensors.
        file: its main file's name.
        files: all its files' names.
        layers: how many of its layers give each dtype, `{"float16": 106, "float32": 3}`, where the compiler says so.
    """

    graph: GraphSpec
    file: str
    files: tuple[str, ...]
    layers: Mapping[str, int] = field(default_factory=dict)


class Backend(Protocol):
    """A runtime.

    Attributes:
        name: key in `BACKENDS`.
        typed_graphs: it computes in the precision that is written into the graph; else it reads an FP32 graph, and
            the precision is its own doing.
    """

    name: str
    typed_graphs: bool

    def availability(self) -> Availability: ...

    def resolve_device(self, gpu: str | None) -> str:
        """The device to compile for: `cpu`, or the named or present GPU generation.

        Raises:
            OptionError: the name is not one that this backend can compile for.
            BackendUnavailableError: none was named and none is here.
        """
        ...

    def default_precision(self, device: str) -> Precision:
        """What it builds for `device` when no precision is asked for."""
        ...

    def compile(self, request: CompileRequest) -> Compiled:
        """Raises `BuildError` when the compiler refuses, `BackendUnavailableError` when it is not here."""
        ...

    def check_runnable(self, manifest: EngineManifest, *, device_index: int | None = None) -> int | None:
        """Raises `BackendUnavailableError` or `IncompatibleEngineError` unless this machine can run the engine.

        Args:
            manifest: the engine's.
            device_index: the GPU to run on; default: the first that fits.

        Returns:
            The GPU to run on, `None` for an engine for the CPU.
        """
        ...

    def load(self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, threads: int | None = None) -> Runner:
        """Loads one graph of an engine for arrays on the host; `check_runnable` first."""
        ...

    def load_streams(
        self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, streams: int, threads: int | None = None
    ) -> Sequence[Runner]:
        """Loads one graph, without axes, for `streams` threads that call at the same time, each a runner of its own;
        on the host they share the weights in memory, and `threads` among them. `check_runnable` first."""
        ...

    def load_on(self, device: Device, folder: Path, manifest: EngineManifest, graph: GraphSpec) -> DeviceEngine:
        """Loads one graph of an engine for tensors on `device`; `check_runnable` first.

        Raises:
            IncompatibleEngineError: it was compiled for the host, or for another kind of device.
        """
        ...


@runtime_checkable
class DeviceEngine(Protocol):
    """One loaded graph on a device's stream. It reads and writes tensors of the caller's, where they stand.

    Attributes:
        device: whose stream and memory it uses.
    """

    device: Device

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fixes every input's and output's memory, before the first `enqueue`.

        A graph with axes takes the sizes of these tensors, and can be bound again to others of any that it allows, or
        to the same memory cut differently. What is on the stream already keeps what it was enqueued with; a CUDA graph
        that was captured is of the binding at that time.

        Raises:
            ShapeError: a tensor's shape or dtype is not as declared, it is not contiguous, or two differ in an axis.
            BackendError: the runtime refuses.
        """
        ...

    def enqueue(self) -> None:
        """Puts one run on the device's stream and returns at once.

        Raises:
            BackendError: the runtime refuses.
        """
        ...

    def can_be_captured(self) -> bool:
        """Whether `enqueue` may be recorded in a CUDA graph; asked after one run of the sizes that are bound."""
        ...

    def close(self) -> None:
        """Frees what the runtime holds; closing twice is harmless."""
        ...


class GraphRunner:
    """What the runners share: their graph's tensors, and closing at the end of a `with` block."""

    def __init__(self, graph: GraphSpec) -> None:
        self._graph = graph

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._graph.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._graph.outputs

    def infer(self, feeds: Mapping[str, npt.NDArray[Any]], *, copy: bool = True) -> dict[str, npt.NDArray[Any]]:
        """As `Runner.infer`."""
        raise AssertionError("every runner has its own")

    def close(self) -> None:
        """Frees what the runtime holds; closing twice is harmless."""

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def get_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        OptionError: there is none; the message lists those there are.
    """
    if name not in BACKENDS:
        raise OptionError(f"backend {name!r}: expected one of {', '.join(BACKENDS)}")
    module, attribute = BACKENDS[name].split(":")
    made: Backend = getattr(importlib.import_module(module), attribute)()
    return made


def check_feeds(inputs: tuple[TensorSpec, ...], feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, int]:
    """Raises `ShapeError` unless `feeds` has exactly the declared names, shapes and dtypes.

    Returns:
        the size of every axis that varies, by name.
    """
    expected, got = [spec.name for spec in inputs], list(feeds)
    if set(expected) != set(got):
        raise ShapeError(f"feeds: expected the inputs {', '.join(expected)}, got {', '.join(got) or 'none'}")
    sizes: dict[str, int] = {}
    for spec in inputs:
        array = feeds[spec.name]
        spec.check(array)
        _take_sizes(spec, array.shape, sizes)
    return sizes


def check_bound(specs: tuple[TensorSpec, ...], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Raises `ShapeError` unless every tensor is contiguous and has its declared dtype and an allowed shape.

    A runtime takes any address: what does not fit would be read and written past its end.

    Returns:
        the size of every axis that varies, by name.
    """
    sizes: dict[str, int] = {}
    for spec in specs:
        tensor = tensors[spec.name]
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if not spec.allows(shape) or dtype != spec.dtype or not tensor.is_contiguous():
            strided = "" if tensor.is_contiguous() else ", not contiguous"
            raise ShapeError(f"{spec.name}: expected {spec.shown} {spec.dtype}, got {shape} {dtype}{strided}")
        _take_sizes(spec, shape, sizes)
    return sizes


def _take_sizes(spec: TensorSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    for axis, size in zip(spec.axes, shape, strict=False):
        if axis and sizes.setdefault(axis, size) != size:
            raise ShapeError(f"{spec.name}: expected {sizes[axis]} {axis}, as in the tensors before it, got {size}")
