"""What is asked of TensorRT when an engine runs, on a double of the package: it needs a driver to load a plan.

The double's members are checked against the real package where that is installed, so that it cannot drift from it.
"""

from __future__ import annotations

import enum
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recording import RecordingDevice
from small_prompts import DECODER

from visionfast.backends.device_runner import DeviceRunner
from visionfast.backends.tensorrt_engine import TensorRtEngine
from visionfast.errors import BackendError, IncompatibleEngineError, ShapeError
from visionfast.types import GraphSpec, TensorSpec

GRAPH = GraphSpec(
    "model",
    (TensorSpec("images", (1, 3, 4, 6), "float16", "NCHW"),),
    (TensorSpec("predictions", (1, 5, 7), "float32"),),
)


class TensorIOMode(enum.Enum):
    INPUT = 0
    OUTPUT = 1


class RecordingTensorRt:
    """`tensorrt_rtx`, as far as `TensorRtEngine` uses it; `rtx=False` is `tensorrt`."""

    __name__ = "tensorrt_rtx"
    TensorIOMode = TensorIOMode

    def __init__(self, *, rtx: bool = True, graph: GraphSpec = GRAPH) -> None:
        self.rtx = rtx
        self.log: list[Any] = []
        self.plan: bytes | None = None
        self.deserialises = self.makes_context = self.runs = self.takes_addresses = self.takes_cache = True
        self.takes_shapes = self.capturable = True
        self.cache = b"compiled kernels"
        self.tensors = {spec.name: (TensorIOMode.INPUT, spec) for spec in graph.inputs}
        self.tensors |= {spec.name: (TensorIOMode.OUTPUT, spec) for spec in graph.outputs}

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        return SimpleNamespace(deserialize_cuda_engine=self._deserialise)

    def _deserialise(self, plan: bytes) -> Any:
        self.plan = plan
        if not self.deserialises:
            return None
        names = list(self.tensors)
        kinds = {"float16": "HALF", "float32": "FLOAT", "uint8": "UINT8"}
        engine = SimpleNamespace(
            num_io_tensors=len(names),
            get_tensor_name=names.__getitem__,
            get_tensor_mode=lambda name: self.tensors[name][0],
            get_tensor_shape=lambda name: _as_built(self.tensors[name][1]),
            get_tensor_dtype=lambda name: SimpleNamespace(name=kinds[self.tensors[name][1].dtype]),
            create_execution_context=self._context,
        )
        if self.rtx:
            engine.create_runtime_config = self._config
        return engine

    def _config(self) -> Any:
        cache = SimpleNamespace(deserialize=self._read_cache, serialize=lambda: self.cache)
        return SimpleNamespace(
            create_runtime_cache=lambda: cache, set_runtime_cache=lambda c: self.log.append("set cache")
        )

    def _read_cache(self, blob: bytes) -> bool:
        self.log.append(("read cache", blob))
        return self.takes_cache

    def _context(self, config: Any = None) -> Any:
        self.log.append("context" if config is None else "context with config")
        if not self.makes_context:
            return None
        context = SimpleNamespace(
            set_tensor_address=self._address, set_input_shape=self._shape, execute_async_v3=self._execute
        )
        if self.rtx:
            context.is_stream_capturable = lambda stream: self.log.append(("capturable?", stream)) or self.capturable
        return context

    def _address(self, name: str, address: int) -> bool:
        self.log.append((name, address))
        return self.takes_addresses

    def _shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.log.append((name, shape))
        return self.takes_shapes

    def _execute(self, stream: int) -> bool:
        self.log.append(("execute", stream))
        return self.runs


def _as_built(spec: TensorSpec) -> list[int]:
    """What an engine says of a tensor's shape: -1 for a side that varies."""
    return [-1 if axis else side for side, axis in zip(spec.shape, spec.axes or ("",) * 9, strict=False)]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "model.engine"
    path.write_bytes(b"the plan")
    return path


def _open(trt: RecordingTensorRt, plan: Path, *, graph: GraphSpec = GRAPH, cache: bool = True) -> TensorRtEngine:
    device: Any = RecordingDevice()
    logger = SimpleNamespace(errors=["an old error"])
    file = plan.with_suffix(".runtime-cache") if cache else None
    return TensorRtEngine(trt, logger, plan, graph, device, cache=file)


def _tensors(graph: GraphSpec = GRAPH, **sizes: int) -> dict[str, torch.Tensor]:
    specs = (*graph.inputs, *graph.outputs)
    return {spec.name: torch.zeros(spec.sized(sizes), dtype=getattr(torch, spec.dtype)) for spec in specs}


def test_addresses_are_fixed_once_and_runs_go_to_the_device_stream(plan: Path) -> None:
    trt = RecordingTensorRt()
    engine = _open(trt, plan)
    tensors = _tensors()
    engine.bind(tensors)
    engine.enqueue()
    engine.enqueue()
    assert engine.can_be_captured()
    assert trt.plan == b"the plan"
    assert trt.log == [
        "set cache",
        "context with config",
        ("images", tensors["images"].data_ptr()),
        ("predictions", tensors["predictions"].data_ptr()),
        ("execute", 0xF00D),
        ("execute", 0xF00D),
        ("capturable?", 0xF00D),
    ]


def test_the_runtime_cache_is_kept_beside_the_engine(plan: Path) -> None:
    file = plan.with_suffix(".runtime-cache")
    first = RecordingTensorRt()
    _open(first, plan).close()
    assert file.read_bytes() == b"compiled kernels"

    second = RecordingTensorRt()
    engine = _open(second, plan)
    assert ("read cache", b"compiled kernels") in second.log
    written = file.stat().st_mtime_ns
    engine.close()
    engine.close()
    assert file.stat().st_mtime_ns == written  # nothing new in it

    third = RecordingTensorRt()  # of another driver: refused, and made anew
    third.takes_cache, third.cache = False, b"newer"
    _open(third, plan).close()
    assert file.read_bytes() == b"newer"


def test_an_unwritable_folder_only_costs_time(tmp_path: Path, plan: Path) -> None:
    trt = RecordingTensorRt()
    device: Any = RecordingDevice()
    cache = plan / "below a file"
    TensorRtEngine(trt, SimpleNamespace(errors=[]), plan, GRAPH, device, cache=cache).close()
    assert list(tmp_path.iterdir()) == [plan]


def test_tensorrt_has_no_cache_and_can_always_be_captured(plan: Path) -> None:
    trt = RecordingTensorRt(rtx=False)
    engine = _open(trt, plan, cache=False)
    engine.bind(_tensors())
    assert engine.can_be_captured()
    engine.close()
    assert trt.log[0] == "context"
    assert not plan.with_suffix(".runtime-cache").exists()


def test_an_engine_that_still_compiles_says_so(plan: Path) -> None:
    trt = RecordingTensorRt()
    trt.capturable = False
    assert not _open(trt, plan).can_be_captured()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("deserialises", "tensorrt_rtx cannot load it .it gave no reason.; build it again"),
        ("makes_context", "no execution context"),
        ("takes_addresses", "tensor images does not take its address"),
        ("runs", "the run was refused"),
    ],
)
def test_refusals_are_errors_of_one_line(plan: Path, fault: str, message: str) -> None:
    trt = RecordingTensorRt()
    setattr(trt, fault, False)

    def use() -> None:
        engine = _open(trt, plan)
        engine.bind(_tensors())
        engine.enqueue()

    with pytest.raises(BackendError, match=message) as caught:
        use()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "other",
    [
        GraphSpec("model", GRAPH.inputs, (TensorSpec("predictions", (1, 5, 8), "float32"),)),
        GraphSpec("model", GRAPH.inputs, (TensorSpec("predictions", (1, 5, 7), "float16"),)),
        GraphSpec("model", GRAPH.inputs, (TensorSpec("boxes", (1, 5, 7), "float32"),)),
        GraphSpec("model", (), (*GRAPH.inputs, *GRAPH.outputs)),
        GraphSpec("model", GRAPH.inputs, (*GRAPH.outputs, TensorSpec("more", (1,), "float32"))),
    ],
)
def test_the_engine_is_checked_against_the_manifest(plan: Path, other: GraphSpec) -> None:
    with pytest.raises(IncompatibleEngineError, match="build it again"):
        _open(RecordingTensorRt(graph=other), plan)


def test_memory_that_does_not_fit_is_refused(plan: Path) -> None:
    engine = _open(RecordingTensorRt(), plan)
    for wrong in (torch.zeros(1, 5, 6), torch.zeros(1, 5, 7).half(), torch.zeros(1, 7, 5).transpose(1, 2)):
        with pytest.raises(ShapeError, match=r"predictions: expected \(1, 5, 7\) float32"):
            engine.bind(_tensors() | {"predictions": wrong})


def test_a_graph_with_axes_is_bound_to_any_sizes(plan: Path) -> None:
    """Shapes first, of the inputs that have axes; then every address, for the run that follows."""
    trt = RecordingTensorRt(graph=DECODER)
    engine = _open(trt, plan, graph=DECODER)
    varying = ["points", "labels", "has_mask"]
    for prompts, points in ((1, 2), (5, 6), (1, 2)):
        del trt.log[:]
        tensors = _tensors(DECODER, prompts=prompts, points=points)
        engine.bind(tensors)
        engine.enqueue()
        assert trt.log == [
            *[(name, tuple(tensors[name].shape)) for name in varying],
            *[(spec.name, tensors[spec.name].data_ptr()) for spec in (*DECODER.inputs, *DECODER.outputs)],
            ("execute", 0xF00D),
        ]
    fits = _tensors(DECODER, prompts=2, points=3)
    for name, wrong, says in (
        ("masks", torch.zeros(3, 4, 16, 16), "masks: expected 2 prompts, as in the tensors before it, got 3"),
        (
            "points",
            torch.zeros(2, 7, 2),
            r"points: expected \(prompts 1\.\.5, points 1\.\.6, 2\) float32, got \(2, 7, 2\)",
        ),
        ("labels", torch.zeros(2, 0), r"labels: expected .*, got \(2, 0\)"),
    ):
        del trt.log[:]
        with pytest.raises(ShapeError, match=says):
            engine.bind(fits | {name: wrong})
        assert trt.log == [], "nothing is bound where something does not fit"
    trt.takes_shapes = False
    with pytest.raises(BackendError, match=r"points does not take the shape \(2, 3, 2\) \(it gave no reason\)"):
        engine.bind(fits)


@pytest.mark.parametrize("fixed", ["points", "masks"])
def test_an_engine_without_the_axes_of_the_manifest_is_refused(plan: Path, fixed: str) -> None:
    def without(specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(s.name, s.shape, s.dtype) if s.name == fixed else s for s in specs)

    other = GraphSpec("decoder", without(DECODER.inputs), without(DECODER.outputs), DECODER.usual)
    for engine, manifest in ((other, DECODER), (DECODER, other)):
        with pytest.raises(IncompatibleEngineError, match=f"{fixed} .* as engine.json says; the file is another"):
            _open(RecordingTensorRt(graph=engine), plan, graph=manifest)


def test_behind_the_host_interface_with_axes(plan: Path) -> None:
    """Memory once, for the most; it is bound again only where the sizes change."""
    trt = RecordingTensorRt(graph=DECODER)
    engine = _open(trt, plan, graph=DECODER)
    device: Any = engine.device
    with DeviceRunner(engine) as runner:
        allocated = device.allocated
        most = sum(t.nbytes for t in _tensors(DECODER, prompts=5, points=6).values())
        assert allocated == 2 * most
        for prompts, points, binds in ((5, 6, False), (2, 3, True), (2, 3, False), (1, 1, True)):
            del trt.log[:]
            feeds = {
                spec.name: np.ones(spec.sized({"prompts": prompts, "points": points}), spec.dtype)
                for spec in DECODER.inputs
            }
            answer = runner.infer(feeds)
            assert answer["masks"].shape == (prompts, 4, 16, 16)
            assert answer["scores"].shape == (prompts, 4)
            assert (("points", (prompts, points, 2)) in trt.log) == binds
            assert trt.log[-1] == ("execute", 0xF00D)
        assert device.allocated == allocated


def test_behind_the_host_interface(plan: Path) -> None:
    """`DeviceRunner` copies in, runs, copies out and waits, in that order."""
    trt = RecordingTensorRt()
    engine = _open(trt, plan)
    device: Any = engine.device
    with DeviceRunner(engine) as runner:
        del device.log[:]
        answer = runner.infer({"images": torch.ones(1, 3, 4, 6).half().numpy()})
        assert device.log == ["copy to device", "copy to host", "synchronize"]
        assert answer["predictions"].shape == (1, 5, 7)
        with pytest.raises(ShapeError):
            runner.infer({"images": torch.ones(1, 3, 4, 6).numpy()})
    assert plan.with_suffix(".runtime-cache").exists()


needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed")


@needs_rtx
def test_the_real_package_refuses_what_is_no_engine(plan: Path) -> None:
    import tensorrt_rtx

    from visionfast.backends.tensorrt import _logger

    device: Any = RecordingDevice()
    plan.write_bytes(b"no engine" * 1000)
    with pytest.raises(BackendError, match=r"tensorrt_rtx cannot load it \(.*erializ.*\); build it again") as caught:
        TensorRtEngine(tensorrt_rtx, _logger(tensorrt_rtx, "tensorrt_rtx"), plan, GRAPH, device)
    assert "\n" not in str(caught.value)


@needs_rtx
def test_the_double_has_the_members_of_the_real_package() -> None:
    import tensorrt_rtx as trt

    members = {
        trt.Runtime: ["deserialize_cuda_engine"],
        trt.ICudaEngine: [
            "num_io_tensors", "get_tensor_name", "get_tensor_mode", "get_tensor_shape", "get_tensor_dtype",
            "create_execution_context", "create_runtime_config",
        ],
        trt.IRuntimeConfig: ["create_runtime_cache", "set_runtime_cache"],
        trt.IRuntimeCache: ["serialize", "deserialize"],
        trt.IExecutionContext: [
            "set_tensor_address", "set_input_shape", "execute_async_v3", "is_stream_capturable",
        ],
        trt.Builder: ["create_optimization_profile"],
        trt.IBuilderConfig: ["add_optimization_profile"],
        trt.IOptimizationProfile: ["set_shape"],
        trt.TensorIOMode: ["INPUT", "OUTPUT"],
        trt.BuilderFlag: ["TF32", "REQUIRE_USER_ALLOCATION"],
    }  # fmt: skip
    for kind, names in members.items():
        for name in names:
            assert hasattr(kind, name), f"{kind.__name__}.{name}"
    assert {kind.name for kind in (trt.float32, trt.float16, trt.uint8)} == {"FLOAT", "HALF", "UINT8"}
