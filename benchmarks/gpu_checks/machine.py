"""The words that the checks use of a machine, and devices that look on while a session works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from gpu_checks.rows import Deadline
from visionfast.backends import DeviceEngine
from visionfast.cuda import Device

if TYPE_CHECKING:
    import torch

__all__ = ["Calls", "Machine", "MarkedDevice", "MarkedEngine"]


@dataclass(frozen=True, slots=True)
class Calls:
    """What some requests asked of the driver, all together.

    Attributes:
        requests: how many there were.
        synchronisations: waits for the device, blocking copies among them.
        allocations: of device or page-locked memory, and what gives it back.
        names: call → how often, for whoever wants to see.
    """

    requests: int
    synchronisations: int
    allocations: int
    names: Mapping[str, int] = field(default_factory=dict)


class Machine(Protocol):
    """A CUDA device, or the stand-in for one."""

    @property
    def is_rehearsal(self) -> bool: ...

    @property
    def name(self) -> str: ...

    def device(self) -> Device:
        """A new stream."""
        ...

    def facts(self) -> dict[str, str]:
        """Card, driver, clocks, versions; read only."""
        ...

    def is_alive(self) -> bool:
        """Whether the device still answers; after an illegal access it does not, until the process ends."""
        ...

    def time(self, device: Device, work: Callable[[], None], *, repeats: int, until: Deadline) -> list[int]:
        """Nanoseconds that `work` takes on the device: captured once, replayed with a cold L2 cache each time."""
        ...

    def mark(self, device: Device) -> Any:
        """A point on the device's stream, now."""
        ...

    def between_ns(self, first: Any, second: Any) -> int:
        """Of two marks that the stream has passed."""
        ...

    def calls(self, device: Device, request: Callable[[], Any], *, repeats: int) -> Calls | None:
        """What `repeats` requests ask of the driver, as the profiler sees it; `None` where it sees nothing."""
        ...

    def allocations(self) -> int | None:
        """How often torch's allocators, of the device and of page-locked memory, were asked so far."""
        ...

    def kernels_ns(self, device: Device, work: Callable[[], None], *, repeats: int) -> dict[str, list[int]]:
        """What each kernel of `work` took by itself; empty where the profiler sees none."""
        ...


class MarkedDevice:
    """A device that leaves a mark before and after every copy, and counts what it is asked to wait for.

    Attributes:
        marks: (`copy` or `engine`, before, after), in the order of the stream, since they were last cleared.
    """

    def __init__(self, device: Device, machine: Machine) -> None:
        self._device = device
        self._machine = machine
        self.marks: list[tuple[str, Any, Any]] = []

    @property
    def where(self) -> torch.device:
        return self._device.where

    @property
    def stream(self) -> Any:
        return self._device.stream

    @property
    def stream_handle(self) -> int:
        return self._device.stream_handle

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return self._device.empty(shape, dtype)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return self._device.pinned(shape, dtype)

    def current(self) -> contextlib.AbstractContextManager[None]:
        return self._device.current()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.around("copy", lambda: self._device.copy(source, target))

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._device.capture(work)

    def follow(self) -> None:
        self._device.follow()

    def synchronize(self) -> None:
        self._device.synchronize()

    def around(self, kind: str, work: Callable[[], None]) -> None:
        """`work` between two marks."""
        before = self._machine.mark(self._device)
        work()
        self.marks.append((kind, before, self._machine.mark(self._device)))


class MarkedEngine:
    """An engine whose runs lie between two marks of its device."""

    def __init__(self, engine: DeviceEngine, device: MarkedDevice) -> None:
        self._engine = engine
        self.device: Device = device
        self._marks = device

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self._engine.inputs

    @property
    def outputs(self) -> tuple[Any, ...]:
        return self._engine.outputs

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._engine.bind(tensors)

    def enqueue(self) -> None:
        self._marks.around("engine", self._engine.enqueue)

    def can_be_captured(self) -> bool:
        return False

    def close(self) -> None:
        self._engine.close()
