"""Which pipeline serves a model: by its task, the layout and the machine that it is for."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from visionfast.errors import OptionError
from visionfast.serving.ensemble import Layout, Pipeline
from visionfast.serving.topology_cpu import cpu_pipeline
from visionfast.serving.topology_nvidia import nvidia_pipeline
from visionfast.serving.topology_openvino import openvino_pipeline
from visionfast.types import ModelSpec

__all__ = ["EngineBackend", "Target", "pipeline_of"]

Target: TypeAlias = Literal["cpu", "nvidia"]
EngineBackend: TypeAlias = Literal["python", "openvino"]


def pipeline_of(
    name: str, spec: ModelSpec, layout: Layout, *, target: str = "cpu", engine_backend: str = "python"
) -> Pipeline:
    """The DAG of a model.

    Args:
        name: that clients will ask for.
        spec: the model; its graph's tensors are those of the compiled engine.
        layout: see `ensemble`.
        target: `cpu`, or `nvidia` for NVIDIA's container on a GPU.
        engine_backend: the server's, that runs the engine of an ensemble on the CPU: `python`, or `openvino`, which
            only NVIDIA's container has.

    Raises:
        OptionError: a layout, target or task that is not served.
    """
    for option, value, known in (
        ("layout", layout, get_args(Layout)),
        ("target", target, get_args(Target)),
        ("engine-backend", engine_backend, get_args(EngineBackend)),
    ):
        if value not in known:
            raise OptionError(f"{option} {value!r}: expected {' or '.join(known)}")
    if engine_backend != "python":
        if (target, layout) != ("cpu", "ensemble"):
            raise OptionError(
                f"engine-backend {engine_backend}: expected an ensemble for the cpu, got {layout} for {target}; "
                "only there is the engine a model of its own"
            )
        return openvino_pipeline(name, spec)
    return nvidia_pipeline(name, spec, layout) if target == "nvidia" else cpu_pipeline(name, spec, layout)
