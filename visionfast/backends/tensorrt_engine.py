"""A TensorRT or TensorRT-RTX engine on a device's stream.

What it calls of the two packages is the same, except that TensorRT-RTX compiles its kernels for the card when the
engine is first run, and keeps them in a runtime cache: that is stored beside the engine, for the next start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visionfast.artifacts import atomic_write
from visionfast.backends import check_bound
from visionfast.cuda import Device
from visionfast.errors import ArtifactError, BackendError, IncompatibleEngineError
from visionfast.types import GraphSpec, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["TensorRtEngine"]


class TensorRtEngine:
    """One execution context with its engine.

    Args:
        trt: the package, `tensorrt` or `tensorrt_rtx`.
        logger: its logger, which keeps errors in `errors`.
        plan: the engine's file.
        graph: what the manifest says of its tensors; the engine is checked against it.
        device: whose stream it is enqueued on.
        cache: the runtime cache's file, for TensorRT-RTX; it need not be there yet.

    Raises:
        BackendError: the runtime cannot load the plan.
        IncompatibleEngineError: the engine's tensors are not the manifest's.
    """

    def __init__(
        self, trt: Any, logger: Any, plan: Path, graph: GraphSpec, device: Device, *, cache: Path | None = None
    ) -> None:
        self.device = device
        self._graph = graph
        self._logger = logger
        self._plan = plan
        self._cache_file = cache
        self._cache: Any = None
        self._cached = b""
        logger.errors.clear()
        with device.current():  # the context that everything is loaded into
            # Kept, and let go of last: the engine needs its runtime, the context its engine.
            self._runtime: Any = trt.Runtime(logger)
            self._engine: Any = self._runtime.deserialize_cuda_engine(plan.read_bytes())
            if self._engine is None:
                raise BackendError(f"{plan}: {trt.__name__} cannot load it ({self._reason()}); build it again")
            self._check_tensors(trt)
            self._context: Any = self._new_context()
        if self._context is None:
            raise BackendError(f"{plan}: no execution context ({self._reason()}); is the GPU's memory full?")

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._graph.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._graph.outputs

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        specs = (*self.inputs, *self.outputs)
        check_bound(specs, tensors)
        for spec in self.inputs:
            shape = tuple(tensors[spec.name].shape)
            if spec.axes and not self._context.set_input_shape(spec.name, shape):
                raise BackendError(f"{self._plan}: {spec.name} does not take the shape {shape} ({self._reason()})")
        for spec in specs:
            if not self._context.set_tensor_address(spec.name, tensors[spec.name].data_ptr()):
                raise BackendError(f"{self._plan}: tensor {spec.name} does not take its address ({self._reason()})")

    def enqueue(self) -> None:
        if not self._context.execute_async_v3(self.device.stream_handle):
            raise BackendError(f"{self._plan}: the run was refused ({self._reason()})")

    def can_be_captured(self) -> bool:
        # Only TensorRT-RTX has the question: it may still be compiling.
        asked = getattr(self._context, "is_stream_capturable", None)
        return True if asked is None else bool(asked(self.device.stream_handle))

    def close(self) -> None:
        if self._engine is None:
            return
        self._store_cache()
        self._context = self._cache = None
        self._engine = None
        self._runtime = None

    def _reason(self) -> str:
        first = " ".join(self._logger.errors[0].split()) if self._logger.errors else ""
        return first[:_LONGEST_REASON] or "it gave no reason"

    def _check_tensors(self, trt: Any) -> None:
        engine = self._engine
        found = {}
        for i in range(engine.num_io_tensors):
            name = engine.get_tensor_name(i)
            kind = "input" if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else "output"
            dtype = _DTYPES.get(engine.get_tensor_dtype(name).name, engine.get_tensor_dtype(name).name)
            found[name] = (kind, tuple(engine.get_tensor_shape(name)), dtype)
        for kind, specs in (("input", self.inputs), ("output", self.outputs)):
            for spec in specs:
                expected = (kind, spec.sized(dict.fromkeys(spec.axes, -1)), spec.dtype)
                if found.pop(spec.name, None) != expected:
                    raise IncompatibleEngineError(
                        f"{self._plan}: expected the {kind} {spec.name} {spec.shown} {spec.dtype}, as engine.json "
                        "says; the file is another engine's: build it again"
                    )
        if found:
            raise IncompatibleEngineError(
                f"{self._plan}: it has a tensor {next(iter(found))} that engine.json does not name; build it again"
            )

    def _new_context(self) -> Any:
        configure = getattr(self._engine, "create_runtime_config", None)
        if self._cache_file is None or configure is None:
            return self._engine.create_execution_context()
        config = configure()
        self._cache = config.create_runtime_cache()
        with contextlib.suppress(OSError):  # none yet
            self._cached = self._cache_file.read_bytes()
        # A cache of another driver, card or release is refused, and made anew.
        if self._cached and not self._cache.deserialize(self._cached):
            self._cached = b""
        config.set_runtime_cache(self._cache)
        return self._engine.create_execution_context(config)

    def _store_cache(self) -> None:
        if self._cache is None or self._cache_file is None:
            return
        made = self._cache.serialize()
        content = b"" if made is None else bytes(memoryview(made))
        if content and content != self._cached:
            # It only saves time: an engine in a folder that is not ours to write to works without.
            with contextlib.suppress(ArtifactError):
                atomic_write(self._cache_file, content)


_LONGEST_REASON = 240  # characters: TensorRT's own words go on into its source files
_DTYPES = {"FLOAT": "float32", "HALF": "float16", "UINT8": "uint8", "INT32": "int32", "INT64": "int64", "BOOL": "bool"}
