"""An ensemble for NVIDIA's container on a CPU: the server's own OpenVINO backend runs the engine.

    image ─→ NAME_preprocess (Python) ─→ NAME_engine (OpenVINO) ─→ NAME_postprocess (Python) ─→ objects

The server of nvidia-pytriton has no such backend.
"""

from __future__ import annotations

from dataclasses import replace

from visionfast.errors import OptionError
from visionfast.serving.ensemble import Pipeline, Stage, links_of
from visionfast.serving.topology_cpu import cpu_pipeline
from visionfast.serving.topology_nvidia import SERVED, single_image_stage
from visionfast.types import ModelSpec

__all__ = ["openvino_pipeline"]


def openvino_pipeline(name: str, spec: ModelSpec) -> Pipeline:
    """See `topology.pipeline_of`.

    Raises:
        OptionError: the task is not served so, or the engine does not take the canvas as it is, one image at a time.
    """
    if spec.task not in SERVED:
        raise OptionError(
            f"{spec.name}: a model for {spec.task}; engine-backend openvino serves {' and '.join(SERVED)}: deploy it "
            "--engine-backend python"
        )
    image = spec.graphs[0].inputs[0]
    if (image.layout, image.dtype) != ("NHWC", "uint8"):
        raise OptionError(
            f"{spec.name}: engine-backend openvino takes an engine with the normalisation inside, NHWC uint8, got "
            f"{image.layout} {image.dtype}; deploy it --engine-backend python, or build it with `--backend openvino`"
        )
    pipeline = cpu_pipeline(name, spec, "ensemble")
    canvas = next(tensor for stage in pipeline.stages for tensor in stage.outputs if tensor.name == "canvas")
    stages = tuple(_with_openvino(stage, spec, canvas.name) for stage in pipeline.stages)
    links = links_of(stages, pipeline.inputs, pipeline.outputs)
    return Pipeline(name, "ensemble", stages, links, pipeline.inputs, pipeline.outputs)


def _with_openvino(stage: Stage, spec: ModelSpec, canvas: str) -> Stage:
    """The stage, waited for in the server's queue; the engine's by the server's backend, which gives all that the graph
    gives, and tells no time."""
    whole = {tensor.name: tensor.shape[1:] for tensor in spec.graphs[0].outputs}
    inputs = tuple(
        replace(tensor, dims=whole.get(tensor.name, tensor.dims))
        for tensor in stage.inputs
        if tensor.name not in ("engine_ns", "deadline_ns")
    )
    if stage.role != "engine":
        outputs = tuple(tensor for tensor in stage.outputs if tensor.name != "deadline_ns")
        return replace(stage, inputs=inputs, outputs=outputs, in_line=False)
    return single_image_stage(
        spec,
        stage.name,
        next(tensor for tensor in stage.inputs if tensor.name == canvas),
        tuple(replace(tensor, dims=whole[tensor.name]) for tensor in stage.outputs if tensor.name in whole),
        backend="openvino",
        own_names={canvas: spec.graphs[0].inputs[0].name},
        options={"PERFORMANCE_HINT": "LATENCY"},
    )
