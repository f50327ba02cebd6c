"""A pipeline as data: its models, the tensors between them, and how requests wait. Everything written is made from it.

    fused      image ─→ NAME ─→ objects
    ensemble   image ─→ NAME_preprocess ─→ NAME_engine ─→ NAME_postprocess ─→ objects, bound together as NAME

Nothing is lost on the ensemble's way: the post-processing computes again from `image_hw` where the image lies in the
canvas, so both layouts give the same answers to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from visionfast.errors import OptionError
from visionfast.serving.wire import WireTensor, inputs_of, outputs_of
from visionfast.types import ModelSpec, Task

__all__ = ["Layout", "Link", "Pipeline", "QueueLimits", "Role", "Scheduling", "Stage", "pipeline_of"]

Layout: TypeAlias = Literal["fused", "ensemble"]
Role: TypeAlias = Literal["fused", "preprocess", "engine", "postprocess"]

SERVED: tuple[Task, ...] = ("detect", "segment")


@dataclass(frozen=True, slots=True)
class Stage:
    """One model that the server runs.

    Attributes:
        name: of the model.
        role: which of `serving.stages` it is.
        inputs, outputs: its tensors.
    """

    name: str
    role: Role
    inputs: tuple[WireTensor, ...]
    outputs: tuple[WireTensor, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor's way from one stage to another, by their roles; `None` is the client. It keeps its name."""

    tensor: str
    source: Role | None
    target: Role | None


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What is served under one name.

    Attributes:
        name: that clients ask for.
        layout: `fused`: the one stage has the pipeline's name; `ensemble`: a model of that name binds the stages.
        stages: in the order of an image's way.
        links: every tensor's way.
        inputs, outputs: what the client gives and gets.
    """

    name: str
    layout: Layout
    stages: tuple[Stage, ...]
    links: tuple[Link, ...]
    inputs: tuple[WireTensor, ...]
    outputs: tuple[WireTensor, ...]

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all models, the one that clients ask for first."""
        return tuple(dict.fromkeys((self.name, *(stage.name for stage in self.stages))))


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What the requests of one priority may cost while they wait.

    Attributes:
        requests: that wait in a model's queue at most; the next one is refused at once.
        timeout_ms: that a request waits at most, unless it brings its own deadline; it is refused then.
    """

    requests: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How requests wait and are put together.

    Attributes:
        max_batch: images that a model is given at once, at most.
        queue_delay_us: that the first model waits for more of them, microseconds. The later ones of an ensemble don't.
        instances: processes of each stage; the processors are shared out among them.
        online, offline: limits of priority 1, which is every request's own unless it says so, and 2.
        cache: answers are kept by the server and given again for the same image.
    """

    max_batch: int = 8
    queue_delay_us: int = 1000
    instances: int = 1
    online: QueueLimits = QueueLimits(requests=256, timeout_ms=10_000)
    offline: QueueLimits = QueueLimits(requests=1024, timeout_ms=60_000)
    cache: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_batch", self.max_batch, 1),
            ("queue_delay_us", self.queue_delay_us, 0),
            ("instances", self.instances, 1),
            ("online: requests", self.online.requests, 1),
            ("online: timeout_ms", self.online.timeout_ms, 1),
            ("offline: requests", self.offline.requests, 1),
            ("offline: timeout_ms", self.offline.timeout_ms, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
                raise OptionError(f"{name}: expected a whole number, at least {least}, got {value!r}")


def pipeline_of(name: str, spec: ModelSpec, layout: Layout, *, target: str = "cpu") -> Pipeline:
    """The DAG of a model.

    Args:
        name: that clients will ask for.
        spec: the model; its graph's tensors are those of the compiled engine.
        layout: see above.
        target: `cpu`.

    Raises:
        OptionError: a layout, target or task that is not served.
    """
    if layout not in get_args(Layout):
        raise OptionError(f"layout {layout!r}: expected {' or '.join(get_args(Layout))}")
    if target != "cpu":
        raise OptionError(f"target {target!r}: expected cpu; NVIDIA's container is not served by this release")
    if spec.task not in SERVED:
        raise OptionError(
            f"{spec.name}: a model for {spec.task}, and {' and '.join(SERVED)} are served by this release; "
            "`visionfast predict` and the Python API answer it"
        )
    given, gotten = inputs_of(spec.task), outputs_of(spec.task)
    stages = (Stage(name, "fused", given, gotten),) if layout == "fused" else _steps(name, spec)
    return Pipeline(name, layout, stages, _links(stages, given, gotten), given, gotten)


def _steps(name: str, spec: ModelSpec) -> tuple[Stage, ...]:
    """`image_hw` and `problem` go to the client from where they are made; 0 × 0 tells the later stages to pass on."""
    h, w = spec.preprocess.size_hw
    canvas = WireTensor("canvas", "uint8", (h, w, 3))
    intake_ns = WireTensor("intake_ns", "int64", (2,))  # decode, preprocess
    engine_ns = WireTensor("engine_ns", "int64", (1,))
    raw = tuple(WireTensor(tensor.name, tensor.dtype, tensor.shape[1:]) for tensor in spec.graphs[0].outputs)
    early = tuple(tensor for tensor in outputs_of(spec.task) if tensor.name in ("image_hw", "problem"))
    late = tuple(tensor for tensor in outputs_of(spec.task) if tensor not in early)
    image_hw, options = early[0], inputs_of(spec.task)[-1]
    return (
        Stage(f"{name}_preprocess", "preprocess", inputs_of(spec.task), (canvas, *early, intake_ns)),
        Stage(f"{name}_engine", "engine", (canvas, image_hw), (*raw, engine_ns)),
        Stage(f"{name}_postprocess", "postprocess", (*raw, image_hw, options, intake_ns, engine_ns), late),
    )


def _links(
    stages: tuple[Stage, ...], given: tuple[WireTensor, ...], gotten: tuple[WireTensor, ...]
) -> tuple[Link, ...]:
    """A tensor has one source; whoever names it as an input is a target."""
    source: dict[str, Role | None] = {tensor.name: None for tensor in given}
    links = []
    for stage in stages:
        links += [Link(tensor.name, source[tensor.name], stage.role) for tensor in stage.inputs]
        source |= {tensor.name: stage.role for tensor in stage.outputs}
    return (*links, *(Link(tensor.name, source[tensor.name], None) for tensor in gotten))
