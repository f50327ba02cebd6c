"""Where Triton's kernels run: on a CUDA device, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton

from visionfast.errors import BackendUnavailableError, ShapeError

__all__ = ["check_tensor", "kernel_device", "launching_on"]

_INTERPRETER = "set TRITON_INTERPRET=1 before Triton is imported to run them there, slowly"


def kernel_device(device: torch.device | str, kernel: Any, *, what: str, instead: str = _INTERPRETER) -> torch.device:
    """The device with its index, as tensors have it.

    Args:
        device: a CUDA device, or the CPU.
        kernel: one of those that are to run there; it tells whether Triton's interpreter was asked for.
        what: the message's subject.
        instead: what to do where the device is a CPU.

    Raises:
        BackendUnavailableError: no such CUDA device here, or a CPU without the interpreter.
    """
    device = torch.device(device)
    if device.type == "cpu":
        if isinstance(kernel, triton.JITFunction):
            raise BackendUnavailableError(f"{what}: expected a CUDA device, got cpu: {instead}")
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendUnavailableError(f"{what}: expected a CUDA device, got {device}, which is not here")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Raises `ShapeError` unless a kernel may be given this tensor: it would read and write past any other's end."""
    fits = tuple(tensor.shape) == shape and tensor.dtype in dtypes and tensor.device == device
    if fits and tensor.is_contiguous():
        return
    kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    raise ShapeError(
        f"{name}: expected {shape} {kinds} on {device}, contiguous, got "
        f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}{layout}"
    )


@contextlib.contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """Triton launches on the current device, which need not be the tensors'."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield
