"""What several threads and many arrays need of one device's stream: turns, and a way up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visionfast.cuda import Device

if TYPE_CHECKING:
    import torch

__all__ = ["Turns", "Upload"]


class Turns:
    """Threads take turns at a stream, and at the buffers that work on it reads and writes.

    Attributes:
        device: whose stream it is.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def take(self) -> Iterator[None]:
        """Waits for whoever is at it. Inside, what torch and Triton launch goes onto the stream; whoever takes a turn
        synchronises before its end."""
        with self._lock, self.device.current():
            try:
                yield
            except BaseException:
                # What is still on the stream reads buffers that the next turn writes.
                with contextlib.suppress(Exception):
                    self.device.synchronize()
                raise


class Upload:
    """Page-locked memory and as much on the device, for one array at a time; both grow to the largest one.

    Args:
        device: whose memory and stream it uses.
        dtype: of the arrays.
        size: elements that there is room for from the beginning.
    """

    def __init__(self, device: Device, dtype: str, size: int = 0) -> None:
        self._device = device
        self._dtype = dtype
        self._pinned = device.pinned((size,), dtype)
        self._on_device = device.empty((size,), dtype)

    def array(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """What `send` sends, to be written by the caller; the stream has passed what was sent before."""
        size = int(np.prod(shape))
        if self._pinned.numel() < size:
            self._pinned = self._device.pinned((size,), self._dtype)
            self._on_device = self._device.empty((size,), self._dtype)
        array: npt.NDArray[Any] = self._pinned[:size].numpy().reshape(shape)
        return array

    def send(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Puts the copy of `array(shape)` on the stream; gives it as it will be on the device until the next one."""
        size = int(np.prod(shape))
        self._device.copy(self._pinned[:size], self._on_device[:size])
        return self._on_device[:size].view(shape)

    def write(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Copies `values` and sends them."""
        self.array(values.shape)[...] = values
        return self.send(values.shape)
