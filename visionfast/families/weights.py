"""A checkpoint's tensors into a network: all of them, in the shapes that it has, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from visionfast.checkpoint.pickled import printable
from visionfast.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["check_finite", "check_weights", "load_weights"]


def load_weights(network: nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Gives the network its weights, float32, without a copy where they are that already; then to eval mode.

    Raises:
        CheckpointError: a key is missing, or is one too many, or a tensor's shape is another, or it has NaN or Inf.
    """
    check_weights(network.state_dict(), weights, source)
    full = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in weights.items()}
    check_finite(full, source)
    network.load_state_dict(full, assign=True)
    network.requires_grad_(False).eval()


def check_weights(expected: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Holds `weights` to exactly the keys, the shapes and the kinds of number of `expected`; raises as above."""
    missing = [key for key in expected if key not in weights]
    unexpected = [key for key in weights if key not in expected]
    if missing or unexpected:
        parts = [f"{_some(keys)} {word}" for keys, word in ((missing, "missing"), (unexpected, "unexpected")) if keys]
        raise CheckpointError(
            f"{source}: expected exactly the published keys, got {' and '.join(parts)}; a fine-tune that adds or drops "
            "layers is not handled"
        )
    for key, tensor in expected.items():
        shape, got = tuple(tensor.shape), tuple(weights[key].shape)
        if got != shape:
            raise CheckpointError(f"{source}: {key}: expected the published shape {shape}, got {got}")
        if weights[key].is_floating_point() != tensor.is_floating_point():
            raise CheckpointError(f"{source}: {key}: expected {tensor.dtype} or the like, got {weights[key].dtype}")


def check_finite(weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Raises `CheckpointError` where a tensor has NaN or Inf: a training that diverged, or a damaged file."""
    for key, tensor in weights.items():
        if tensor.is_meta or not tensor.is_floating_point() or (finite := tensor.isfinite()).all():
            continue
        bad, of = tensor.numel() - int(finite.sum()), tensor.numel()
        raise CheckpointError(
            f"{source}: {printable(key)}: expected numbers, got NaN or Inf in {bad} of {of}; its training diverged, or "
            "the file is damaged: take another"
        )


def _some(keys: list[str]) -> str:
    return f"{printable(keys[0])}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}"
