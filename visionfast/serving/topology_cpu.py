"""The pipelines of a machine without a GPU: every stage is a process of the server's Python backend."""

from __future__ import annotations

from visionfast.errors import OptionError
from visionfast.serving.ensemble import Layout, Pipeline, Stage, links_of
from visionfast.serving.wire import WireTensor, inputs_of, outputs_of
from visionfast.types import ModelSpec, Task

__all__ = ["cpu_pipeline"]

SERVED: tuple[Task, ...] = ("detect", "segment")


def cpu_pipeline(name: str, spec: ModelSpec, layout: Layout) -> Pipeline:
    """See `topology.pipeline_of`.

    Raises:
        OptionError: a task that is not served.
    """
    if spec.task not in SERVED:
        raise OptionError(
            f"{spec.name}: a model for {spec.task}, and {' and '.join(SERVED)} are served by this release; "
            "`visionfast predict` and the Python API answer it"
        )
    given, gotten = inputs_of(spec.task), outputs_of(spec.task)
    stages = (Stage(name, "fused", given, gotten),) if layout == "fused" else _steps(name, spec)
    return Pipeline(name, layout, stages, links_of(stages, given, gotten), given, gotten)


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
