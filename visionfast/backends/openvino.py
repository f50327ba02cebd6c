"""OpenVINO on the CPU: normalisation inside the engine, one stream or several, a compiled blob kept for fast starts."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

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
from visionfast.types import EngineManifest, GraphSpec, Precision, PreprocessSpec, TensorSpec

__all__ = ["OpenVinoBackend", "OpenVinoRunner", "kept_core"]

_HINTS: dict[Precision, str] = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
_CACHE = "cache"
_MOST_SHAPES = 8  # of one graph with axes, compiled; 70 MB each for SAM's decoder
_WORTH_IT = 3  # times that a shape is asked for before one is compiled for it
_Sizes: TypeAlias = tuple[tuple[str, int], ...]


def _import_openvino() -> Any:
    # openvino's own telemetry package reaches for the network; it has nothing to tell about an engine.
    os.environ.setdefault("OPENVINO_TELEMETRY_DISABLED", "1")
    try:
        import openvino
    except ImportError as error:
        raise BackendUnavailableError(
            f"openvino: expected the package, but {error}; `pip install 'visionfast[openvino]'`"
        ) from error
    return openvino


_ONE_AT_A_TIME = threading.Lock()


def kept_core() -> Any:
    """`openvino.Core`, the one that this process keeps to its end. Raises `BackendUnavailableError`."""
    with _ONE_AT_A_TIME:  # a cache alone lets two threads in
        return _made_core(_import_openvino())


@functools.cache
def _made_core(openvino: Any) -> Any:
    """Made once, and kept.

    The CPU plugin gives the thread that loads it a larger stack for signals, and takes it back when it is unloaded
    (OpenVINO 2026.4). Unloaded by another thread, it leaves the first one a stack that is gone, and the next signal,
    Ctrl-C say, ends the process by SIGSEGV. So it is not unloaded.

    What its binding does with the first array it is given has to be over before threads give it theirs: it takes a
    lock of its own and then Python's, and a second thread that has the latter waits for the former, for ever.
    """
    openvino.Tensor(np.zeros(1, np.uint8))
    return openvino.Core()


def _cpu_precisions(core: Any) -> tuple[Precision, ...]:
    """Those that this processor computes in; OpenVINO would fall back to FP32 for the others without a word."""
    able = set(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    reduced: tuple[tuple[Precision, str], ...] = (("bf16", "BF16"), ("fp16", "FP16"))
    return ("fp32", *(name for name, capability in reduced if capability in able))


class OpenVinoBackend:
    """Compiles to OpenVINO IR for the CPU."""

    name = "openvino"
    typed_graphs = False

    def availability(self) -> Availability:
        try:
            version = importlib.metadata.version("openvino")
            precisions = _cpu_precisions(kept_core())
        except (importlib.metadata.PackageNotFoundError, BackendError):
            return Availability("", False, False, "not installed: pip install 'visionfast[openvino]'", ())
        return Availability(version, True, True, "", precisions)

    def resolve_device(self, gpu: str | None) -> str:
        if gpu is not None:
            raise OptionError(f"--gpu {gpu}: backend openvino compiles for the CPU; leave --gpu out")
        return "cpu"

    def default_precision(self, device: str) -> Precision:
        return "fp32"

    def compile(self, request: CompileRequest) -> Compiled:
        """Reads the ONNX, takes `u8 NHWC` images in and normalises inside, and saves `<graph>.xml` and `.bin`."""
        ov = _import_openvino()
        core = kept_core()
        if request.precision not in (able := _cpu_precisions(core)):
            raise BuildError(f"precision {request.precision}: this CPU computes {', '.join(able)}; choose one of them")
        try:
            model = core.read_model(request.onnx_path)
            graph = _embed_normalisation(ov, model, request.graph, request.preprocess)
            file = f"{request.graph.name}.xml"
            ov.save_model(graph[0], request.folder / file, compress_to_fp16=False)
        except RuntimeError as error:
            # OpenVINO calls a full disk an iostream error.
            full = shutil.disk_usage(request.folder).free < 1 << 20
            reason = "the disk is full" if full else _first_line(error)
            raise BuildError(f"openvino: {reason}; nothing half-written was left") from error
        return Compiled(graph[1], file, (file, f"{request.graph.name}.bin"))

    def check_runnable(self, manifest: EngineManifest, *, device_index: int | None = None) -> None:
        core = kept_core()
        if manifest.device != "cpu":
            raise IncompatibleEngineError(f"device {manifest.device}: expected an engine for the cpu; build it again")
        if manifest.precision not in (able := _cpu_precisions(core)):
            raise IncompatibleEngineError(
                f"precision {manifest.precision}: this CPU computes {', '.join(able)}; build again with one of them"
            )
        built, here = manifest.runtime_version, importlib.metadata.version("openvino")
        if _version(here) < _version(built):
            raise IncompatibleEngineError(
                f"openvino {here}: the engine was built with {built}, and an older runtime may not read it; "
                f"install openvino>={built} or build again"
            )

    def load(
        self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, threads: int | None = None
    ) -> OpenVinoRunner:
        self.check_runnable(manifest)
        path, identity = folder / manifest.files[graph.name], _identity(manifest)
        return OpenVinoRunner(path, graph, manifest.precision, threads=threads, identity=identity)

    def load_streams(
        self, folder: Path, manifest: EngineManifest, graph: GraphSpec, *, streams: int, threads: int | None = None
    ) -> list[OpenVinoRunner]:
        self.check_runnable(manifest)
        path, identity = folder / manifest.files[graph.name], _identity(manifest)
        first = OpenVinoRunner(path, graph, manifest.precision, threads=threads, streams=streams, identity=identity)
        return [first, *(first.beside() for _ in range(streams - 1))]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _first_line(error: Exception) -> str:
    """OpenVINO's messages begin with its own source lines; the last line with text is the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _embed_normalisation(ov: Any, model: Any, graph: GraphSpec, preprocess: PreprocessSpec) -> tuple[Any, GraphSpec]:
    """Image inputs become `u8 NHWC`: a quarter of the bytes to hand over, at no cost in latency (FP32 arithmetic).

    Not where the padding is 0 after normalisation: it is no level that could be normalised.
    """
    steps = ov.preprocess.PrePostProcessor(model)
    inputs: list[TensorSpec] = []
    for spec in graph.inputs:
        if spec.layout != "NCHW" or preprocess.pad_value is None:
            inputs.append(spec)
            continue
        n, c, h, w = spec.shape
        image = steps.input(spec.name)
        image.tensor().set_element_type(ov.Type.u8).set_layout(ov.Layout("NHWC"))
        image.model().set_layout(ov.Layout("NCHW"))
        mean = [255.0 * value for value in preprocess.mean]
        scale = [255.0 * value for value in preprocess.std]
        image.preprocess().convert_element_type(ov.Type.f32).mean(mean).scale(scale)
        inputs.append(dataclasses.replace(spec, shape=(n, h, w, c), dtype="uint8", layout="NHWC"))
    return steps.build(), dataclasses.replace(graph, inputs=tuple(inputs))


class OpenVinoRunner(GraphRunner):
    """One graph with one infer request, on `threads` processors (default: all that may be used).

    With `streams`, the processors are shared out among so many requests that run at the same time: this runner's, and
    those of the runners `beside` it.

    A graph with axes has requests for single shapes, and one for every shape. A model of a fixed shape answers in two
    thirds of the time that one of dynamic shape takes, and is compiled in a third of a second (SAM's decoder, 34 to 50
    ms on 2 cores). So the usual shape has one from the beginning, another has one once it was asked for a few times,
    and what is new is answered by the model of dynamic shape. Of those, the eight that are asked for most are kept.
    """

    def __init__(
        self,
        path: Path,
        graph: GraphSpec,
        precision: Precision,
        *,
        threads: int | None = None,
        streams: int = 1,
        identity: str = "",  # of the files, for the cache of compiled blobs
    ) -> None:
        ov = _import_openvino()
        super().__init__(graph)
        threads = threads or machine.usable_cpus()
        # Threads bound to a processor wait there for whatever else runs on it, and every process begins with the same
        # one: two engines of one thread each, in two processes, answered 13 images a second, and unbound 32 (YOLOv8n,
        # 2 cores). Only one that has all processors for one image is steadier when bound.
        pinned = streams == 1 and threads >= machine.usable_cpus()
        hint = "latency" if streams == 1 else f"throughput-{streams}s"
        self._path = path
        self._config = {
            "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
            "INFERENCE_PRECISION_HINT": _HINTS[precision],
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": streams,
            "ENABLE_CPU_PINNING": pinned,
        }
        self._cache = _cache_folder(
            path.parent, identity, f"{precision}-{hint}-{threads}t{'' if pinned else '-free'}", ov.__version__
        )
        self._process = os.getpid()
        self._requests: dict[_Sizes, Any] = {}
        self._asked: Counter[_Sizes] = Counter()
        self._any_shape: Any = None
        self._lent: Mapping[str, npt.NDArray[Any]] = {}
        self._model: Any = None  # with axes: read once, and given one fixed shape after the other
        self._usual = _key(graph.usual)
        self._requests[self._usual] = self._new_request(graph.usual)

    def infer(self, feeds: Mapping[str, npt.NDArray[Any]], *, copy: bool = True) -> dict[str, npt.NDArray[Any]]:
        if os.getpid() != self._process:  # its threads are the parent's: an answer would be waited for for ever
            raise BackendError("openvino: this engine was opened before a fork; open it in the child process")
        request = self._request_of(check_feeds(self.inputs, feeds))
        self._lent = feeds  # the request points into them until it is given others
        shared = {name: _writable(array) for name, array in feeds.items()}
        try:
            results = request.infer(shared, share_inputs=True, share_outputs=True)
        except RuntimeError as error:
            raise BackendError(f"openvino: {_first_line(error)}") from error
        # The memory of another shape's outputs is another: a view would not outlive the next call, not even to be
        # overwritten.
        copy = copy or request is self._any_shape
        return {
            spec.name: np.array(array) if copy else array
            for spec, array in zip(self.outputs, results.values(), strict=True)
        }

    def beside(self) -> OpenVinoRunner:
        """A runner of the same compiled model, for another thread; each is closed by itself."""
        assert not self._usual, "a graph with axes is compiled for one shape after the other, by one thread"
        runner = copy.copy(self)
        runner._lent, runner._asked = {}, Counter()
        runner._requests = {self._usual: self._requests[self._usual].get_compiled_model().create_infer_request()}
        return runner

    def close(self) -> None:
        self._requests.clear()
        self._lent = {}
        self._any_shape = self._model = None

    def _request_of(self, sizes: Mapping[str, int]) -> Any:
        """A request that takes these sizes of the axes."""
        key = _key(sizes)
        self._asked[key] += 1
        if key not in self._requests and self._has_room_for(key):
            self._requests[key] = self._new_request(sizes)
        if (request := self._requests.get(key)) is not None:
            return request
        if self._any_shape is None:
            self._any_shape = self._new_request(None)
        return self._any_shape

    def _has_room_for(self, key: _Sizes) -> bool:
        """Whether a shape is worth a request of its own; makes room for it where there is none."""
        if self._asked[key] < _WORTH_IT:
            return False
        if len(self._requests) >= _MOST_SHAPES:
            least = min((kept for kept in self._requests if kept != self._usual), key=self._asked.__getitem__)
            # More often, not as often: many shapes in turns would otherwise put each other out at every call.
            if self._asked[key] <= 2 * self._asked[least]:
                return False
            del self._requests[least]
        return True

    def _new_request(self, sizes: Mapping[str, int] | None) -> Any:
        try:
            return self._compiled(sizes).create_infer_request()
        except RuntimeError as error:
            raise BackendError(
                f"{self._path}: openvino cannot load it ({_first_line(error)}); build it again"
            ) from error

    def _compiled(self, sizes: Mapping[str, int] | None) -> Any:
        """The model for these sizes; `None`: for all."""
        core = kept_core()
        model: Any = self._path  # OpenVINO looks into the cache before it reads the file
        if sizes:
            if self._model is None:
                self._model = core.read_model(self._path)
            model = self._model
            model.reshape({spec.name: list(spec.sized(sizes)) for spec in self.inputs})
        # A blob is as large as the weights: only those that every start may need have one.
        kept = not sizes or sizes == self._graph.usual
        cached = {"CACHE_DIR": str(self._cache)} if self._cache and kept else {}
        try:
            compiled = core.compile_model(model, "CPU", self._config | cached)
        except RuntimeError:
            if not cached:
                raise
            # A blob cut short by a full disk or a killed process must not make the engine unusable.
            shutil.rmtree(cached["CACHE_DIR"], ignore_errors=True)
            compiled = core.compile_model(model, "CPU", self._config)
        if sizes is not None:
            self._check(compiled, sizes)
        return compiled

    def _check(self, compiled: Any, sizes: Mapping[str, int]) -> None:
        """What engine.json says of the graph is what buffers are made for: it has to be what the graph is."""
        for specs, ports in ((self.inputs, compiled.inputs), (self.outputs, compiled.outputs)):
            expected = [f"{spec.name} {spec.sized(sizes)} {spec.dtype}" for spec in specs]
            got = [f"{port.any_name} {tuple(port.shape)} {port.element_type.to_dtype().name}" for port in ports]
            if expected != got:
                raise IncompatibleEngineError(
                    f"{self._path}: expected {', '.join(expected)}, as engine.json says, got {', '.join(got)}; "
                    "build the engine again"
                )


def _key(sizes: Mapping[str, int]) -> _Sizes:
    return tuple(sorted(sizes.items()))


def _identity(manifest: EngineManifest) -> str:
    """Of an engine's files: other weights in the same network are another engine."""
    return hashlib.sha256(json.dumps(sorted(manifest.sha256.items())).encode()).hexdigest()[:16]


def _cache_folder(engine: Path, identity: str, configuration: str, version: str) -> Path | None:
    """Where compiled blobs are kept. OpenVINO's own key is the network's file: it ignores all of this, the weights
    among it, so the path has it. What is there of an engine that stood in this folder before goes."""
    folder = engine / _CACHE / identity / f"{version.split('-')[0]}-{configuration}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [path for path in (engine / _CACHE).iterdir() if identity and path.name != identity]
    except OSError:
        return None
    for path in others:
        shutil.rmtree(path, ignore_errors=True)
    return folder if os.access(folder, os.W_OK) else None


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory, to look at, of an array that may not be written to.

    OpenVINO only reads its inputs, but takes a copy of such an array: 2 to 6 ms for the cached features of an image.
    """
    if array.flags.writeable or not array.flags.c_contiguous:
        return array
    memory = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memoryview(memory), array.dtype).reshape(array.shape)
