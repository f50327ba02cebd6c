"""The stand-in for a machine with a GPU: the host's memory, the wall's clock, and kernels in Triton's interpreter.

Everything is really computed. No figure of it is a measurement.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gpu_checks.machine import Calls
from gpu_checks.rows import Deadline
from visionfast.cuda import Device

__all__ = ["HostDevice", "HostMachine"]

_ONE_DEVICE = threading.RLock()  # streams of several threads share one device, and the interpreter is not for several


class HostDevice:
    """`visionfast.cuda.Device` on the host. What is copied to the host is there after `synchronize`, not before."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.where = torch.device("cpu")
        self.stream: Any = None
        self.stream_handle = 0
        self._counts = counts
        self._pinned: set[int] = set()
        self._to_host: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _count(self, name: str) -> None:
        with _ONE_DEVICE:
            self._counts[name] = self._counts.get(name, 0) + 1

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        self._count("allocate")
        return torch.empty(shape, dtype=getattr(torch, dtype))

    def pinned(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        self._count("allocate")
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with _ONE_DEVICE, np.errstate(all="ignore"):  # a GPU does not warn of NaN
            yield

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if target.untyped_storage().data_ptr() in self._pinned:
            self._to_host.append((source.clone(), target))
        else:
            target.copy_(source)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def follow(self) -> None:
        pass  # there is one order of things here

    def synchronize(self) -> None:
        self._count("synchronize")
        for source, target in self._to_host:
            target.copy_(source)
        self._to_host.clear()


class HostMachine:
    """See `gpu_checks.machine.Machine`."""

    is_rehearsal = True
    name = "rehearsal on the host"

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def device(self) -> Device:
        return HostDevice(self._counts)

    def facts(self) -> dict[str, str]:
        return {"card": self.name, "torch": torch.__version__}

    def is_alive(self) -> bool:
        return True

    def time(self, device: Device, work: Callable[[], None], *, repeats: int, until: Deadline) -> list[int]:
        samples: list[int] = []
        with device.current():
            work()
            while len(samples) < repeats and until.left() > 0:
                before = self.mark(device)
                work()
                samples.append(self.between_ns(before, self.mark(device)))
        device.synchronize()
        return samples

    def mark(self, device: Device) -> int:
        return time.perf_counter_ns()

    def between_ns(self, first: Any, second: Any) -> int:
        return int(second - first)

    def calls(self, device: Device, request: Callable[[], Any], *, repeats: int) -> Calls | None:
        before = dict(self._counts)
        for _ in range(repeats):
            request()
        names = {name: n - before.get(name, 0) for name, n in self._counts.items()}
        return Calls(repeats, names.get("synchronize", 0), names.get("allocate", 0), names)

    def allocations(self) -> int | None:
        return self._counts.get("allocate", 0)

    def kernels_ns(self, device: Device, work: Callable[[], None], *, repeats: int) -> dict[str, list[int]]:
        return {}
