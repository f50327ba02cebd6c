"""What FP16 does to each module of a network, emulated in eager PyTorch on real images.

Each layer is given the FP32 network's own values, rounded to FP16, with its weights rounded, and its result is
rounded again; in between it computes in FP32, as tensor cores do. So every layer's own share shows, also behind
another one that overflows.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from visionfast.export import mapped
from visionfast.precision import LARGEST_FP16, Drift

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["measure_drift"]


def measure_drift(network: nn.Module, run: Callable[[], object], *, keep_fp32: Sequence[str] = ()) -> tuple[Drift, ...]:
    """The drift of every module that `run` calls, in the order of the first calls, a module before its parts.

    Left out: what is in `keep_fp32` already, what computes nothing, and a module that stands in several places (an
    activation that all blocks share), which cannot be kept FP32 in one of them.

    Args:
        network: FP32, eager; it is as before afterwards.
        run: runs the network on the images.
        keep_fp32: dotted paths of modules that stay FP32.
    """
    with _watching(network, keep_fp32) as meters:
        run()
    return tuple(meter.drift() for meter in meters.values())


@contextlib.contextmanager
def _watching(network: nn.Module, keep_fp32: Sequence[str]) -> Iterator[dict[str, _Meter]]:
    """While inside, every module that is called gets a meter, which sees all its calls."""
    meters: dict[str, _Meter] = {}
    handles = []
    for path, module in _candidates(network, keep_fp32):

        def before(module: nn.Module, _args: Any, path: str = path) -> None:
            for outer, meter in meters.items():
                meter.is_layer &= not path.startswith(f"{outer}.")
            meters.setdefault(path, _Meter(path))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            meters[path].see(module, args, kwargs, output)

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after, with_kwargs=True)]
    try:
        yield meters
    finally:
        for handle in handles:
            handle.remove()


def _candidates(network: nn.Module, keep_fp32: Sequence[str]) -> list[tuple[str, nn.Module]]:
    from torch import nn

    everywhere = list(network.named_modules(remove_duplicate=False))
    places = Counter(id(module) for _, module in everywhere)
    return [
        (path, module)
        for path, module in everywhere
        if path
        and places[id(module)] == 1
        and not isinstance(module, nn.Identity)
        and not any(path == kept or path.startswith(f"{kept}.") for kept in keep_fp32)
    ]


class _Meter:
    """The worst that was seen of one module."""

    def __init__(self, path: str) -> None:
        self.is_layer = True  # until something is called inside
        self._path = path
        self._peak = 0.0
        self._overflows = False
        self._relative_error = 0.0
        self._rounded: nn.Module | None = None

    def see(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        expected = _tensors(output)
        self._peak = max(self._peak, *map(_peak, expected))
        self._overflows |= self._peak > LARGEST_FP16
        if not self.is_layer:
            return
        given = (*_tensors(args), *_tensors(kwargs))
        self._peak = max(self._peak, *map(_peak, given))
        if self._rounded is None:
            self._rounded = _with_rounded_weights(module)
        got = _tensors(mapped(self._rounded(*mapped(args, _round), **mapped(kwargs, _round)), _round))
        for full, half in zip(expected, got, strict=True):
            error = _relative_error(full, half)
            if math.isfinite(error):
                self._relative_error = max(self._relative_error, error)
            elif full.isfinite().all():
                self._overflows = True

    def drift(self) -> Drift:
        return Drift(self._path, self._peak, self._overflows, self._relative_error)


def _peak(tensor: torch.Tensor) -> float:
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return largest if math.isfinite(largest) else 0.0


def _relative_error(full: torch.Tensor, half: torch.Tensor) -> float:
    if not full.numel():
        return 0.0
    # Around the channel's mean: a large constant hides the signal from the norm, and its rounding destroys it.
    around = [axis for axis in range(full.ndim) if axis != 1] if full.ndim > 2 else list(range(full.ndim))
    error = (half - full).square().mean().sqrt()
    signal = full.var(around, correction=0).mean().sqrt() or full.square().mean().sqrt()
    return float(error / signal) if signal else 0.0


def _with_rounded_weights(module: nn.Module) -> nn.Module:
    rounded = copy.deepcopy(module)
    for inner in rounded.modules():
        inner._forward_pre_hooks.clear()
        inner._forward_hooks.clear()
        for tensor in (*inner.parameters(recurse=False), *inner.buffers(recurse=False)):
            tensor.data = _round(tensor.data)
    return rounded


def _round(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().float() if tensor.is_floating_point() else tensor


def _tensors(value: Any) -> list[torch.Tensor]:
    """Every floating tensor in `value`, in order."""
    found: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            found.append(tensor)
        return tensor

    mapped(value, take)
    return found
