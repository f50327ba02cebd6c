"""An engine on a device behind the host's interface: arrays in, arrays out, for certifying and for looking at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from visionfast.backends import DeviceEngine, GraphRunner, check_feeds
from visionfast.types import GraphSpec

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceRunner"]


class DeviceRunner(GraphRunner):
    """Copies the feeds to the device, runs, copies the outputs back, and waits: simple, not fast.

    Memory is allocated once, for the most that the graph's axes allow; fewer lie at the front of it.

    Args:
        engine: closed with the runner.
    """

    def __init__(self, engine: DeviceEngine) -> None:
        super().__init__(GraphSpec("", engine.inputs, engine.outputs))
        self._engine = engine
        device = engine.device
        tensors = (*engine.inputs, *engine.outputs)
        with device.current():
            self._device_memory = {spec.name: device.empty(spec.shape, spec.dtype) for spec in tensors}
        self._host_memory = {spec.name: device.pinned(spec.shape, spec.dtype) for spec in tensors}
        self._bind({axis: most for spec in tensors for axis, most in zip(spec.axes, spec.shape, strict=False) if axis})

    def infer(self, feeds: Mapping[str, npt.NDArray[Any]], *, copy: bool = True) -> dict[str, npt.NDArray[Any]]:
        if (sizes := check_feeds(self.inputs, feeds)) != self._sizes:
            self._bind(sizes)
        device = self._engine.device
        with device.current():
            for spec in self.inputs:
                self._on_host[spec.name].numpy()[...] = feeds[spec.name]
                device.copy(self._on_host[spec.name], self._on_device[spec.name])
            self._engine.enqueue()
            for spec in self.outputs:
                device.copy(self._on_device[spec.name], self._on_host[spec.name])
        device.synchronize()
        outputs = {spec.name: self._on_host[spec.name].numpy() for spec in self.outputs}
        return {name: array.copy() for name, array in outputs.items()} if copy else outputs

    def close(self) -> None:
        self._engine.close()

    def _bind(self, sizes: dict[str, int]) -> None:
        shapes = {spec.name: spec.sized(sizes) for spec in (*self.inputs, *self.outputs)}
        self._on_device = {name: _front(self._device_memory[name], shape) for name, shape in shapes.items()}
        self._on_host = {name: _front(self._host_memory[name], shape) for name, shape in shapes.items()}
        self._engine.bind(self._on_device)
        self._sizes = sizes


def _front(memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The first elements of a tensor's memory, as a contiguous tensor of this shape."""
    return memory.view(-1)[: math.prod(shape)].view(shape)
