"""Doubles for what only a GPU has: a device whose stream is a list of what was put on it, and an engine on it.

The device's memory is the host's, so everything on it really computes: torch modules, and Triton's kernels in their
interpreter. A copy that nobody waited for is not made before `synchronize`, as on a real device.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from visionfast import machine
from visionfast.backends import check_bound
from visionfast.types import GraphSpec, TensorSpec

__all__ = ["RecordingDevice", "RecordingEngine"]

if machine.gpus() and os.environ.get("TRITON_INTERPRET") != "1":  # see conftest
    pytest.skip("kernels are compiled for the GPU here, and do not run on a double of one", allow_module_level=True)


class RecordingDevice:
    """`visionfast.cuda.Device` on the host.

    Attributes:
        log: what was asked of it, in order.
        allocated: bytes, device and pinned, ever.
    """

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self.stream = object()
        self.stream_handle = 0xF00D
        self.log: list[str] = []
        self.allocated = 0
        self._depth = 0
        self._to_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pinned: set[int] = set()

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        self.log.append("empty")
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.view(torch.uint8).fill_(0x7F) if tensor.numel() and tensor.ndim else None  # nobody may rely on zeros
        self.allocated += tensor.nbytes
        return tensor

    def pinned(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        self.log.append("pinned")
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
        self.allocated += tensor.nbytes
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def follow(self) -> None:
        assert not self._depth, "the session's own stream is current already"
        self.log.append("follow")

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        assert self._depth, "a copy outside the session's stream"
        if target.untyped_storage().data_ptr() in self._pinned:
            self.log.append("copy to host")
            self._to_host.append((source.clone(), target))
        else:
            self.log.append("copy to device")
            target.copy_(source)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.log.append("capture")
        before = len(self._to_host)
        work()  # a real capture only records; what this wrote is written anew by every replay
        del self._to_host[before:]

        def replay() -> None:
            self.log.append("replay")
            allocated = self.allocated
            work()
            assert self.allocated == allocated, "a captured graph cannot allocate"

        return replay

    def synchronize(self) -> None:
        self.log.append("synchronize")
        for source, target in self._to_host:
            target.copy_(source)
        self._to_host.clear()


class RecordingEngine:
    """`visionfast.backends.DeviceEngine`: computes `answer(inputs) -> outputs`, both tensors by name."""

    def __init__(
        self,
        graph: GraphSpec,
        device: RecordingDevice,
        answer: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
        *,
        capturable: bool = True,
    ) -> None:
        self.device: Any = device
        self.closed = 0
        self.failing: Exception | None = None
        self._graph = graph
        self._answer = answer
        self._capturable = capturable
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self._graph.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._graph.outputs

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        varies = any(spec.axes for spec in self.inputs)
        assert varies or not self._tensors, "bound twice, and its sizes are always the same"
        check_bound((*self.inputs, *self.outputs), tensors)
        self.device.log.append("bind")
        self._tensors = dict(tensors)
        self._addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def enqueue(self) -> None:
        self.device.log.append("engine")
        if self.failing is not None:
            raise self.failing
        assert {name: tensor.data_ptr() for name, tensor in self._tensors.items()} == self._addresses
        answer = self._answer({spec.name: self._tensors[spec.name] for spec in self.inputs})
        for spec in self.outputs:
            self._tensors[spec.name].copy_(answer[spec.name])

    def can_be_captured(self) -> bool:
        return self._capturable

    def close(self) -> None:
        self.device.log.append("close")
        self.closed += 1
        self._tensors = {}
