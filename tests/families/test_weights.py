"""A checkpoint's tensors on their way into a network."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from visionfast.errors import CheckpointError
from visionfast.families.weights import load_weights


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


@given(
    st.sampled_from(["0.weight", "0.bias", "1.weight", "1.bias"]),
    st.integers(0, 3),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_weights_are_numbers(key: str, at: int, value: float, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in _network().state_dict().items()}
    load_weights(_network(), weights, "weights.pth")
    weights[key][at] = value
    of = weights[key].numel()
    bad = weights[key][at].numel()
    with pytest.raises(CheckpointError) as error:
        load_weights(_network(), weights, "weights.pth")
    assert str(error.value).startswith(f"weights.pth: {key}: expected numbers, got NaN or Inf in {bad} of {of}; ")


def test_what_float32_cannot_hold_is_none() -> None:
    weights = _network().double().state_dict()
    weights["0.bias"][2] = 1e300
    with pytest.raises(CheckpointError, match=r"0\.bias: expected numbers, got NaN or Inf in 1 of 4"):
        load_weights(_network(), weights, "weights.pth")
