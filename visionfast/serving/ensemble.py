"""A pipeline as data: its models and the tensors between them. Everything written is made from it.

    fused      image ─→ NAME ─→ objects
    ensemble   image ─→ NAME_preprocess ─→ NAME_engine ─→ NAME_postprocess ─→ objects, bound together as NAME

For NVIDIA's container an ensemble begins with one more, `NAME_intake`. Nothing is lost on the ensemble's way: the
post-processing computes again from `image_hw` where the image lies in the canvas, so both layouts give the same answers
to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from visionfast.serving.wire import WireTensor

__all__ = ["Backend", "Layout", "Link", "Pipeline", "Role", "Stage", "behind_a_cache", "links_of"]

Layout: TypeAlias = Literal["fused", "ensemble"]
Role: TypeAlias = Literal["fused", "intake", "preprocess", "engine", "postprocess"]
Backend: TypeAlias = Literal["python", "dali", "tensorrt", "openvino"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One model that the server runs.

    Attributes:
        name: of the model.
        role: what it does.
        inputs, outputs: its tensors, by the pipeline's names.
        backend: the server's, that runs it.
        module: of `serving.stages`, for the Python backend; default: the role's.
        on_gpu: it runs on a GPU, and gets tensors where they are; else it gets them on the CPU.
        batched: the server puts requests together for it. `False`: it takes exactly one image, and says so in its
            shapes: an engine for a batch of one.
        in_line: its requests wait in a line of ours, `serving.waiting`, and not in the server's.
        instances: of it; `None`: as many as the deployment says.
        own_names: the pipeline's name of a tensor → the model's, where that differs.
        options: what its backend is told, for backends other than Python's.
        samples: tensor → the bytes that stand for it in the request that such a backend is warmed up with; without
            them it is zeros.
    """

    name: str
    role: Role
    inputs: tuple[WireTensor, ...]
    outputs: tuple[WireTensor, ...]
    backend: Backend = "python"
    module: str = ""
    on_gpu: bool = False
    batched: bool = True
    in_line: bool = False
    instances: int | None = None
    own_names: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, bytes] = field(default_factory=dict)

    def own_name(self, tensor: str) -> str:
        """The model's name of one of the pipeline's tensors."""
        return self.own_names.get(tensor, tensor)


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
        layout: `fused`: the one stage has the pipeline's name, unless it is `behind_a_cache`; `ensemble`: a model of
            that name binds the stages.
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
    def is_bound(self) -> bool:
        """A model of the pipeline's name binds the stages; otherwise the one stage is it."""
        return all(stage.name != self.name for stage in self.stages)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all models, the one that clients ask for first."""
        return tuple(dict.fromkeys((self.name, *(stage.name for stage in self.stages))))


def behind_a_cache(pipeline: Pipeline) -> Pipeline:
    """The pipeline whose answers the server can keep: an ensemble, be it of one step.

    Of a model by itself the server (Triton 2.51) also keeps that a request was refused, and gives it to the next one
    that is the same, as an answer with nothing in it. Of an ensemble it keeps answers only.
    """
    if pipeline.is_bound:
        return pipeline
    stages = tuple(replace(stage, name=f"{stage.name}_{stage.role}") for stage in pipeline.stages)
    return replace(pipeline, stages=stages)


def links_of(
    stages: tuple[Stage, ...], given: tuple[WireTensor, ...], gotten: tuple[WireTensor, ...]
) -> tuple[Link, ...]:
    """Every tensor's way through the stages: it has one source, and whoever names it as an input is a target."""
    source: dict[str, Role | None] = {tensor.name: None for tensor in given}
    links = []
    for stage in stages:
        links += [Link(tensor.name, source[tensor.name], stage.role) for tensor in stage.inputs]
        source |= {tensor.name: stage.role for tensor in stage.outputs}
    return (*links, *(Link(tensor.name, source[tensor.name], None) for tensor in gotten))
