"""An engine on a device behind the host's interface: arrays in, arrays out, for certifying and for looking at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from visionfast.backends import DeviceEngine, GraphRunner, check_feeds
from visionfast.types import GraphSpec

__all__ = ["DeviceRunner"]


class DeviceRunner(GraphRunner):
    """Copies the feeds to the device, runs, copies the outputs back, and waits: simple, not fast.

    Args:
        engine: closed with the runner.
    """

    def __init__(self, engine: DeviceEngine) -> None:
        super().__init__(GraphSpec("", engine.inputs, engine.outputs))
        self._engine = engine
        device = engine.device
        tensors = (*engine.inputs, *engine.outputs)
        with device.current():
            self._on_device = {spec.name: device.empty(spec.shape, spec.dtype) for spec in tensors}
        self._on_host = {spec.name: device.pinned(spec.shape, spec.dtype) for spec in tensors}
        engine.bind(self._on_device)

    def infer(self, feeds: Mapping[str, npt.NDArray[Any]], *, copy: bool = True) -> dict[str, npt.NDArray[Any]]:
        check_feeds(self.inputs, feeds)
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
