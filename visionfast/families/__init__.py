"""Model families. Each knows how to load its checkpoints as eager modules, and nothing about runtimes.

`FAMILIES` maps a name to the module and class that know it; nothing is imported until it is asked for. A new
family is one module here and one line in the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from visionfast.checkpoint import Checkpoint
from visionfast.errors import UnsupportedModelError
from visionfast.types import ModelSpec, Resize

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FAMILIES", "Family", "LoadedModel", "get_family", "identify"]

FAMILIES: dict[str, str] = {
    "yolov8": "visionfast.families.yolov8:YoloV8",
    "sam": "visionfast.families.sam:Sam",
    "dino": "visionfast.families.dino:Dino",
}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A checkpoint as modules that run.

    Attributes:
        spec: the model; its graphs' tensors are those of the modules, all float32.
        modules: graph name → eager FP32 module in eval mode, on the CPU. It takes the graph's inputs and
            returns its outputs (a tensor, or a tuple in their order).
        fp32_islands: graph name → dotted paths of the submodules that stay FP32 in a half-precision graph.
        fp32_inputs: graph name → inputs that stay float32 in it (coordinates: float16 has half pixels at 1024).
    """

    spec: ModelSpec
    modules: Mapping[str, nn.Module] = field(repr=False)
    fp32_islands: Mapping[str, tuple[str, ...]]
    fp32_inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Family(Protocol):
    """One model family."""

    name: str
    handles: str
    """What it loads, for messages: `YOLOv8 and YOLO11: detect, segment`."""

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether this family loads such a checkpoint. Never raises."""
        ...

    def describe(self, checkpoint: Checkpoint) -> str:
        """What a checkpoint that is not loaded looks like to this family, or empty. Never raises."""
        ...

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        name: str,
        size_hw: tuple[int, int] | None = None,
        batch: int = 1,
        resize: Resize | None = None,
    ) -> LoadedModel:
        """The model, for one fixed input shape.

        Args:
            checkpoint: one that `recognises` accepts.
            name: of the model, for its spec.
            size_hw: the network's input in pixels; `None`: what the checkpoint was trained at.
            batch: images in one call.
            resize: how images are brought to that size; `None`: as the model was published with.

        Raises:
            OptionError: the size, batch or resize is not possible; the message has the nearest that is.
            CheckpointError: the file's parts contradict each other.
            UnsupportedModelError: a variant of the family that is not handled.
        """
        ...


def get_family(name: str) -> Family:
    """The family of that name, a key of `FAMILIES`."""
    module, attribute = FAMILIES[name].split(":")
    family: Family = getattr(importlib.import_module(module), attribute)()
    return family


def identify(checkpoint: Checkpoint) -> Family:
    """The family that loads this checkpoint, told by what is in it, never by its file's name.

    Raises:
        UnsupportedModelError: there is none; the message says what the file looks like and what there is.
    """
    families = [get_family(name) for name in FAMILIES]
    for family in families:
        if family.recognises(checkpoint):
            return family
    looks = next((text for f in families if (text := f.describe(checkpoint))), "") or "no known model family"
    raise UnsupportedModelError(
        f"{checkpoint.path}: it looks like {looks}, which is not handled; expected "
        f"{'; or '.join(family.handles for family in families)}"
    )
