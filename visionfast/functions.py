"""What networks call as functions, done otherwise where a graph needs it: it has no module that could be named.

Each is a mode of PyTorch's, entered round a network's forward, eager or traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["FixedNorms", "SoftmaxInFp32"]

_SOFTMAX = (torch.softmax, torch.Tensor.softmax, functional.softmax)
_PRODUCTS = (
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.bmm,
    torch.Tensor.bmm,
    torch.einsum,
)


class FixedNorms(TorchFunctionMode):
    """`layer_norm` over a shape of plain numbers: read off a tensor that has axes, it varies for the ONNX exporter."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.layer_norm and len(args) > 1:
            args = (args[0], tuple(int(side) for side in args[1]), *args[2:])
        return func(*args, **kwargs or {})


class SoftmaxInFp32(TorchFunctionMode):
    """A half-precision network's softmax in FP32, an attention's above all.

    Its scores reach far beyond what float16 resolves, and its sums run over thousands of weights: every other step of
    an attention stands FP16, this one does not. Compilers fuse the casts around it.

    - A softmax of float16 is computed in float32, and comes out as float16.
    - `scaled_dot_product_attention` of float16 is spelt out: a product, that softmax, a product.
    - A matrix product of float16 with float32, which PyTorch refuses, is one of float32, as its sums and
      differences are: so each module around it can be kept in FP32 alone.

    What is float32 throughout is left as it is.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SOFTMAX:
            return _softmax(func, args, kwargs)
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func in _PRODUCTS and _dtypes(args, kwargs) >= {torch.float16, torch.float32}:
            return func(*_in_fp32(args), **_in_fp32(kwargs))
        return func(*args, **kwargs)


def _softmax(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if _dtypes(args, kwargs) != {torch.float16}:
        return func(*args, **kwargs)
    # A dtype that is asked for is what comes out; ONNX would have its cast behind a softmax of float16.
    asked = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), torch.float16)
    return func(*_in_fp32(args), **_in_fp32(kwargs)).to(asked)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """(…, L, E), (…, S, E), (…, S, F) → (…, L, F), as PyTorch documents `scaled_dot_product_attention`."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    dtypes = {tensor.dtype for tensor in (query, key, value)}
    if dtypes != {torch.float16} or is_causal or enable_gqa or dropout_p:
        whole: Any = _in_fp32((query, key, value, attn_mask))
        options |= {"dropout_p": dropout_p, "is_causal": is_causal}
        found = functional.scaled_dot_product_attention(*whole, **options)
        return found.to(torch.float16) if dtypes == {torch.float16} else found
    # The query is scaled, not the scores: they are the larger ones.
    scores = (query * (float(query.shape[-1]) ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)  # (…, L, S)
    scores = scores.float()
    if attn_mask is not None:
        whether = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if whether else scores + attn_mask
    return scores.softmax(-1).to(query.dtype) @ value


def _dtypes(args: Sequence[Any], kwargs: dict[str, Any]) -> set[torch.dtype]:
    """Of the floating tensors among the arguments, and in a list of them."""
    values = [item for value in (*args, *kwargs.values()) for item in (value if isinstance(value, list) else [value])]
    return {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}


def _in_fp32(value: Any) -> Any:
    """`value` with float32 for float16, in every tensor and for itself, in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.float16 else value
    if isinstance(value, (tuple, list)):
        return type(value)(_in_fp32(item) for item in value)
    if isinstance(value, dict):
        return {key: _in_fp32(item) for key, item in value.items()}
    return torch.float32 if value is torch.float16 else value
