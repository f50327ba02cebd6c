"""Which pipeline serves a model: by its task, the layout and the machine that it is for."""

from __future__ import annotations

from typing import get_args

from visionfast.errors import OptionError
from visionfast.serving.ensemble import Layout, Pipeline
from visionfast.serving.topology_cpu import cpu_pipeline
from visionfast.types import ModelSpec

__all__ = ["pipeline_of"]


def pipeline_of(name: str, spec: ModelSpec, layout: Layout, *, target: str = "cpu") -> Pipeline:
    """The DAG of a model.

    Args:
        name: that clients will ask for.
        spec: the model; its graph's tensors are those of the compiled engine.
        layout: see `ensemble`.
        target: `cpu`.

    Raises:
        OptionError: a layout, target or task that is not served.
    """
    if layout not in get_args(Layout):
        raise OptionError(f"layout {layout!r}: expected {' or '.join(get_args(Layout))}")
    if target != "cpu":
        raise OptionError(f"target {target!r}: expected cpu; NVIDIA's container is not served by this release")
    return cpu_pipeline(name, spec, layout)
