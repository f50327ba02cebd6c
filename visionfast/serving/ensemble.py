"""A pipeline as data: its models and the tensors between them. Everything written is made from it.

    fused      image ─→ NAME ─→ objects
    ensemble   image ─→ NAME_preprocess ─→ NAME_engine ─→ NAME_postprocess ─→ objects, bound together as NAME

Nothing is lost on the ensemble's way: the post-processing computes again from `image_hw` where the image lies in the
canvas, so both layouts give the same answers to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from visionfast.serving.wire import WireTensor

__all__ = ["Layout", "Link", "Pipeline", "Role", "Stage", "links_of"]

Layout: TypeAlias = Literal["fused", "ensemble"]
Role: TypeAlias = Literal["fused", "preprocess", "engine", "postprocess"]


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
