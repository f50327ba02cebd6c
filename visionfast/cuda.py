"""One CUDA stream and its device's memory, in torch's words. The only place that asks torch for either.

A session owns one `Device`. DALI, TensorRT and the kernels all work on its stream, so nothing between them has to
wait: what was put on the stream first is done first.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from visionfast.errors import BackendError, BackendUnavailableError, OptionError

if TYPE_CHECKING:
    import torch

__all__ = ["CudaDevice", "Device", "gpu_index"]

_CUDA = re.compile(r"cuda(?::(\d{1,4}))?", re.ASCII)
_STREAMS = 32  # of torch's pool for a device, `c10/cuda/CUDAStream.h`; it hands them out in turns, over and over

_TAKEN: weakref.WeakValueDictionary[tuple[int, int], object] = weakref.WeakValueDictionary()
_TAKING = threading.Lock()
# A capture does not survive that another thread waits for the whole device, and beginning one does just that.
_CAPTURING = threading.Lock()


class Device(Protocol):
    """What a session needs of a device: memory, one stream, and graphs of what was put on it."""

    @property
    def where(self) -> torch.device:
        """The device of its tensors."""
        ...

    @property
    def stream(self) -> Any:
        """The stream, as torch and DALI take it."""
        ...

    @property
    def stream_handle(self) -> int:
        """The stream, as TensorRT takes it: `cudaStream_t` as an integer."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Device memory, not initialised; `dtype` is NumPy's name."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Page-locked host memory, zeros: the only kind that is copied without waiting."""
        ...

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Inside, what torch and Triton launch goes onto the stream."""
        ...

    def follow(self) -> None:
        """Makes the stream wait, on the device, for what the caller's current torch stream holds by now."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Puts a copy on the stream and returns at once; both must stay as they are until `synchronize`."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Records what `work` puts on the stream, without running it, and returns the function that replays it."""
        ...

    def synchronize(self) -> None:
        """Waits until everything that was put on the stream is done."""
        ...


class CudaDevice:
    """A stream of its own on one CUDA device.

    Args:
        index: as CUDA counts the devices that this process may see.

    Raises:
        BackendUnavailableError: torch, or its CUDA, is not here.
        OptionError: there is no such device.
        BackendError: all of its streams are in use.
    """

    def __init__(self, index: int = 0) -> None:
        if importlib.util.find_spec("torch") is None:
            raise BackendUnavailableError("cuda: running on a GPU needs torch; `pip install 'visionfast[gpu]'`")
        import torch

        if not torch.cuda.is_available():
            raise BackendUnavailableError(
                f"cuda: torch {torch.__version__} sees no CUDA device (built for CUDA {torch.version.cuda or 'none'}); "
                "`visionfast doctor` shows the driver"
            )
        if not 0 <= index < torch.cuda.device_count():
            raise OptionError(f"cuda:{index}: expected a device from 0 to {torch.cuda.device_count() - 1}")
        self._torch = torch
        self._where = torch.device("cuda", index)
        self._stream: torch.cuda.Stream = _own_stream(
            self,
            index,
            lambda: torch.cuda.Stream(self._where),  # type: ignore[no-untyped-call]
        )

    @property
    def where(self) -> torch.device:
        return self._where

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream

    @property
    def stream_handle(self) -> int:
        return int(self._stream.cuda_stream)

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=self._where)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return self._torch.zeros(shape, dtype=getattr(self._torch, dtype), pin_memory=True)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with self._torch.cuda.stream(self._stream):
            yield

    def follow(self) -> None:
        self._stream.wait_stream(self._torch.cuda.current_stream(self._where))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = self._torch.cuda.CUDAGraph()
        # thread_local: another session's thread may allocate while this one captures.
        with _CAPTURING, self._torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def synchronize(self) -> None:
        self._stream.synchronize()


def _own_stream(owner: object, index: int, draw: Callable[[], Any]) -> Any:
    """A stream that no other living `owner` on device `index` has: on a shared one, a session would capture another's
    work into its graph."""
    with _TAKING:
        for attempt in range(4 * _STREAMS):  # others draw from the pool too
            if attempt == 2 * _STREAMS:
                gc.collect()  # owners in cycles are dead and not gone
            stream = draw()
            if _TAKEN.setdefault((index, int(stream.cuda_stream)), owner) is owner:
                return stream
    raise BackendError(
        f"cuda:{index}: expected a stream that no session has, all {_STREAMS} are taken; close sessions, or open more "
        "in another process"
    )


def gpu_index(asked: str | None) -> int | None:
    """The number in `cuda:1`; `None` for `cuda` and for nothing: the first that fits.

    Raises:
        OptionError: it is not written so.
    """
    if asked is None:
        return None
    if not isinstance(asked, str) or (match := _CUDA.fullmatch(asked)) is None:
        raise OptionError(f"device {asked!r}: expected cuda or cuda:N for an engine that was built for a GPU")
    return int(match[1]) if match[1] else None
