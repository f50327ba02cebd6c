"""TensorRT, and TensorRT-RTX ahead of time. Their Python APIs agree in what is used here, so the module is a parameter.

Networks are strongly typed: precision is in the ONNX, and no builder flag changes it. TensorRT compiles on a GPU
of the kind that will run the engine; TensorRT-RTX compiles for a named compute capability with no GPU at all.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from visionfast import machine
from visionfast.backends import Availability, Compiled, CompileRequest
from visionfast.backends.compatibility import check_engine, cuda_major, machine_facts
from visionfast.backends.device_runner import DeviceRunner
from visionfast.backends.tensorrt_engine import TensorRtEngine
from visionfast.backends.tensorrt_layers import parse_layers, precision_counts
from visionfast.cuda import CudaDevice, Device
from visionfast.errors import BackendUnavailableError, BuildError, IncompatibleEngineError, OptionError
from visionfast.types import EngineManifest, GraphSpec, Precision, Runner

__all__ = ["TensorRtBackend", "TensorRtRtxBackend"]

# TensorRT keeps the first logger that a process makes and ignores the later ones, so there is one for each module.
_LOGGERS: dict[str, Any] = {}
_LOCK = threading.Lock()


class TensorRtBackend:
    """TensorRT: builds and runs on the GPU that is here."""

    name: str = "tensorrt"
    typed_graphs = True
    module_name: ClassVar[str] = "tensorrt"
    packages: ClassVar[tuple[str, ...]] = ("tensorrt-cu13", "tensorrt-cu12", "tensorrt")
    extra: ClassVar[str] = "tensorrt"

    def availability(self) -> Availability:
        version = self._version()
        if not version:
            return Availability("", False, False, f"not installed: pip install 'visionfast[{self.extra}]'", ())
        reason = "" if machine.gpus() else "no NVIDIA GPU with its driver on this machine"
        return Availability(version, not reason or self._ahead_of_time(), not reason, reason, ("fp16", "fp32"))

    def resolve_device(self, gpu: str | None) -> str:
        here = machine.gpus()
        if not here:
            raise BackendUnavailableError(
                f"{self.name}: expected an NVIDIA GPU and its driver, found none; TensorRT builds on the GPU that "
                "runs the engine (`--backend tensorrt-rtx --gpu sm89` builds ahead of time)"
            )
        if gpu is not None and gpu != here[0].sm:
            raise OptionError(f"--gpu {gpu}: TensorRT builds for the GPU that is here, {here[0].sm} ({here[0].name})")
        return here[0].sm

    def default_precision(self, device: str) -> Precision:
        return "fp16"

    def compile(self, request: CompileRequest) -> Compiled:
        trt = self._import()
        logger = _logger(trt, self.module_name)
        logger.errors.clear()
        builder = trt.Builder(logger)
        typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        network = builder.create_network(0 if typed is None else 1 << int(typed))
        parser = trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(request.onnx_path)):
            refused = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
            raise BuildError(f"{self.name}: the ONNX parser refuses the graph: {_one_line(refused)}")
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        # On by default, it would round what must stay FP32 to 10 bits: a quarter of a pixel in the box decode.
        config.clear_flag(trt.BuilderFlag.TF32)
        self._target(trt, config, request.device)
        if any(spec.axes for spec in request.graph.inputs):
            _add_profile(builder, config, request.graph)
        with logger.listening() as lines, _interruptible() as interrupted:
            config.progress_monitor = monitor = _monitor(trt, interrupted)
            plan = builder.build_serialized_network(network, config)
            del monitor  # the configuration holds no reference of its own
        # The builder answers None, and raises nothing, for whatever it cannot do.
        if plan is None:
            raise BuildError(f"{self.name}: no engine for {request.device}: {_one_line('; '.join(logger.errors))}")
        file = f"{request.graph.name}.engine"
        (request.folder / file).write_bytes(memoryview(plan))
        return Compiled(request.graph, file, (file,), precision_counts(parse_layers("\n".join(lines))))

    def check_runnable(self, manifest: EngineManifest, *, device_index: int | None = None) -> int | None:
        if re.fullmatch(r"sm\d{2,3}", manifest.device, re.ASCII) is None:
            raise IncompatibleEngineError(
                f"device {manifest.device}: expected a GPU generation such as sm89 for {self.name}; build it again"
            )
        package = self._package()
        here = machine_facts(self._version(), cuda_major(package))
        return check_engine(manifest, here=here, device_index=device_index)

    def load(self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, threads: int | None = None) -> Runner:
        device = CudaDevice(self.check_runnable(manifest) or 0)
        return DeviceRunner(self.load_on(device, folder, manifest, graph))

    def load_streams(
        self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, streams: int, threads: int | None = None
    ) -> list[Runner]:
        return [self.load(folder, manifest, graph) for _ in range(streams)]

    def load_on(self, device: Device, folder: Path, manifest: EngineManifest, graph: GraphSpec) -> TensorRtEngine:
        trt = self._import()
        plan = folder / manifest.files[graph.name]
        return TensorRtEngine(trt, _logger(trt, self.module_name), plan, graph, device, cache=self._cache_file(plan))

    def _cache_file(self, plan: Path) -> Path | None:
        """Where kernels that are compiled on this machine are kept; TensorRT has none."""
        return None

    def _ahead_of_time(self) -> bool:
        return False

    def _target(self, trt: Any, config: Any, device: str) -> None:
        """Sets what the engine is compiled for; TensorRT takes the GPU that is current."""

    def _package(self) -> str:
        """The installed one of this backend's packages; empty where none is."""
        for package in self.packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                importlib.metadata.version(package)
                return package
        return ""

    def _version(self) -> str:
        package = self._package()
        return importlib.metadata.version(package) if package else ""

    def _import(self) -> Any:
        try:
            return importlib.import_module(self.module_name)
        except (ImportError, OSError) as error:
            raise BackendUnavailableError(
                f"{self.name}: expected the package, but {_one_line(str(error))}; "
                f"`pip install 'visionfast[{self.extra}]'`"
            ) from error


class TensorRtRtxBackend(TensorRtBackend):
    """TensorRT-RTX: builds for a named GPU generation, ahead of time, on any x86-64 Linux machine."""

    name = "tensorrt-rtx"
    module_name = "tensorrt_rtx"
    packages = ("tensorrt-rtx-cu13",)
    extra = "tensorrt-rtx"

    def resolve_device(self, gpu: str | None) -> str:
        if gpu is None:
            if not (here := machine.gpus()):
                raise BackendUnavailableError(
                    "tensorrt-rtx: no GPU here to build for; name one, e.g. `--gpu sm89` (Ada), sm86 (Ampere), sm120"
                )
            gpu = here[0].sm
        known = self._capabilities(self._import())
        if gpu not in known:
            raise OptionError(
                f"--gpu {gpu}: TensorRT-RTX compiles for {', '.join(known)}; "
                "`--backend torch --gpu cuda` builds for every CUDA device"
            )
        return gpu

    def _ahead_of_time(self) -> bool:
        return True

    def _cache_file(self, plan: Path) -> Path | None:
        return plan.with_suffix(".runtime-cache")

    def _capabilities(self, trt: Any) -> list[str]:
        names = (name for name in dir(trt.ComputeCapability) if name.startswith("SM"))
        return sorted((name.lower() for name in names), key=lambda name: int(name[2:]))

    def _target(self, trt: Any, config: Any, device: str) -> None:
        # All memory is had when the context is made: without this, a run cannot be captured in a CUDA graph.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        config.num_compute_capabilities = 1
        if not config.set_compute_capability(getattr(trt.ComputeCapability, device.upper()), 0):
            raise BuildError(f"tensorrt-rtx: it does not take {device} as a target")


def _add_profile(builder: Any, config: Any, graph: GraphSpec) -> None:
    """From 1 up to the most in every axis, fastest at the usual sizes."""
    profile = builder.create_optimization_profile()
    for spec in graph.inputs:
        if spec.axes:
            least = spec.sized(dict.fromkeys(spec.axes, 1))
            profile.set_shape(spec.name, least, spec.sized(graph.usual), spec.shape)
    if config.add_optimization_profile(profile) < 0:
        raise BuildError(f"{graph.name}: the builder does not take the sizes {', '.join(graph.usual)} as a profile")


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "it gave no reason"


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a question: did Ctrl-C come meanwhile? If so, it takes effect at the end of the block.

    The compiler calls Python from inside, and drops the KeyboardInterrupt that arises in there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals are the main thread's
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        # None: the handler was not set from Python, and cannot be set back from it.
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _monitor(trt: Any, cancelled: Callable[[], bool]) -> Any:
    """Lets a build be cancelled between its steps."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            pass

        def step_complete(self, name: str, step: int) -> bool:
            return not cancelled()

        def phase_finish(self, name: str) -> None:
            pass

    return Monitor()


def _logger(trt: Any, module_name: str) -> Any:
    """Keeps errors for the exception's message, and prints nothing."""
    with _LOCK:
        if module_name not in _LOGGERS:

            class Logger(trt.ILogger):  # type: ignore[misc]
                def __init__(self) -> None:
                    super().__init__()
                    self.errors: list[str] = []
                    self._lines: list[str] | None = None

                def log(self, severity: Any, message: str) -> None:
                    if severity <= trt.ILogger.ERROR:
                        self.errors.append(message)
                    if self._lines is not None:
                        self._lines.append(message)

                @contextlib.contextmanager
                def listening(self) -> Iterator[list[str]]:
                    """Keeps every line that is said meanwhile, down to the most verbose."""
                    lines: list[str] = []
                    self._lines = lines
                    try:
                        yield lines
                    finally:
                        self._lines = None

            _LOGGERS[module_name] = Logger()
        return _LOGGERS[module_name]
