"""The pipelines of a machine without a GPU: every stage is a process of the server's Python backend."""

from __future__ import annotations

from dataclasses import replace

from visionfast.errors import OptionError
from visionfast.serving.ensemble import Layout, Pipeline, Stage, links_of
from visionfast.serving.wire import WireTensor, inputs_of, outputs_of
from visionfast.types import ModelSpec, Task, TensorSpec

__all__ = ["cpu_pipeline"]

_MODULES: dict[Task, str] = {"detect": "fused", "segment": "fused", "embed": "embed", "prompt-segment": "prompt"}
"""Of `serving.stages`, the one that is a whole pipeline."""

_ONE_PROCESS: dict[Task, str] = {
    "embed": "it has nothing behind the engine, and each step would only copy what the next one takes",
    "prompt-segment": "an encoded image is kept where it was encoded, for the clicks that follow",
}


def cpu_pipeline(name: str, spec: ModelSpec, layout: Layout) -> Pipeline:
    """See `topology.pipeline_of`.

    Raises:
        OptionError: a layout that a task is not served in.
    """
    if layout == "ensemble" and (reason := _ONE_PROCESS.get(spec.task)):
        raise OptionError(f"layout ensemble: expected fused for {spec.task}: {reason}")
    given, gotten = inputs_of(spec.task), outputs_of(spec.task)
    whole = Stage(name, "fused", given, gotten, module=_MODULES[spec.task], in_line=True)
    stages = (whole,) if layout == "fused" else _steps(name, spec)
    return Pipeline(name, layout, stages, links_of(stages, given, gotten), given, gotten)


def _steps(name: str, spec: ModelSpec) -> tuple[Stage, ...]:
    """`image_hw` and `problem` go to the client from where they are made; 0 × 0 tells the later stages to pass on."""
    h, w = spec.preprocess.size_hw
    canvas = WireTensor("canvas", "uint8", (h, w, 3))
    intake_ns = WireTensor("intake_ns", "int64", (2,))  # decode, preprocess
    engine_ns = WireTensor("engine_ns", "int64", (1,))
    deadline_ns = WireTensor("deadline_ns", "int64", (1,))  # one for all steps, by the machine's own clock
    raw = tuple(_raw(tensor) for tensor in spec.graphs[0].outputs)
    early = tuple(tensor for tensor in outputs_of(spec.task) if tensor.name in ("image_hw", "problem"))
    late = tuple(tensor for tensor in outputs_of(spec.task) if tensor not in early)
    image_hw, options = early[0], inputs_of(spec.task)[-1]
    steps = (
        Stage(f"{name}_preprocess", "preprocess", inputs_of(spec.task), (canvas, *early, intake_ns, deadline_ns)),
        Stage(f"{name}_engine", "engine", (canvas, image_hw, options, deadline_ns), (*raw, engine_ns)),
        Stage(f"{name}_postprocess", "postprocess", (*raw, image_hw, options, intake_ns, engine_ns, deadline_ns), late),
    )
    return tuple(replace(step, in_line=True) for step in steps)


def _raw(tensor: TensorSpec) -> WireTensor:
    """An output of the graph on its way to the post-processing; of the predictions those that can become an object."""
    dims = tensor.shape[1:]
    return WireTensor(tensor.name, tensor.dtype, (*dims[:-1], -1) if tensor.name == "predictions" else dims)
