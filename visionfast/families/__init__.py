"""Model families. Each knows how its checkpoints become eager modules, and nothing about runtimes.

`FAMILIES` maps a name to the module that serves it; nothing is imported until a checkpoint is identified. A new
family is one module here, with a `recognises` and a `load`, and one line in the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from visionfast.checkpoint import Checkpoint
from visionfast.errors import UnsupportedModelError
from visionfast.types import ModelSpec

__all__ = ["FAMILIES", "Family", "LoadedModel", "identify"]

FAMILIES: dict[str, str] = {"yolov8": "visionfast.families.yolov8"}


@dataclass(frozen=True)
class LoadedModel:
    """A model rebuilt from its checkpoint.

    Attributes:
        spec: graphs and preprocessing for one input size and batch.
        graphs: graph name → eager FP32 `torch.nn.Module` in eval mode, with the spec's inputs and outputs.
        fp32_tail: graph name → submodules at the graph's end that stay FP32 in every precision.
    """

    spec: ModelSpec
    graphs: Mapping[str, Any]
    fp32_tail: Mapping[str, tuple[str, ...]]


class Family(Protocol):
    """What a module in this folder provides."""

    def recognises(self, checkpoint: Checkpoint) -> bool: ...

    def load(
        self, checkpoint: Checkpoint, *, name: str, size_hw: tuple[int, int] | None = None, batch: int = 1
    ) -> LoadedModel:
        """Raises `UnsupportedModelError` for a task that is not handled, `OptionError` for an impossible size."""
        ...


def identify(checkpoint: Checkpoint) -> Family:
    """The family that a checkpoint belongs to, told from its content.

    Raises:
        UnsupportedModelError: none of them.
    """
    for module in FAMILIES.values():
        family = cast(Family, importlib.import_module(module))
        if family.recognises(checkpoint):
            return family
    looks = checkpoint.metadata.get("class") or f"a state dict that begins with {next(iter(checkpoint.state_dict))!r}"
    raise UnsupportedModelError(
        f"{checkpoint.path}: expected a checkpoint of one of the families {', '.join(FAMILIES)}, got {looks}"
    )
