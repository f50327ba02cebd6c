"""Softmax in FP32 wherever a half-precision network has one: in eager PyTorch, in ONNX, in `torch.export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_prompts import SmallDecoder, small_prompt_segmenter
from torch import nn
from torch.nn import functional

from visionfast.export import example_inputs, export_onnx, half_precision
from visionfast.functions import FixedNorms, SoftmaxInFp32
from visionfast.types import GraphSpec, TensorSpec

HALF, FULL = torch.float16, torch.float32


def _scores(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).half()


# ---- softmax ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.softmax(-1),
        lambda x: x.softmax(dim=-1),
        lambda x: torch.softmax(x, -1),
        lambda x: torch.softmax(input=x, dim=-1),
        lambda x: functional.softmax(x, -1),
        lambda x: functional.softmax(x, dim=-1),
        lambda x: nn.Softmax(-1)(x),
    ],
)
def test_every_way_to_call_it(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = _scores(3, 5000, scale=4)
    seen: list[torch.dtype] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._softmax.default:
                seen.append(args[0].dtype)
            return func(*args, **kwargs or {})

    with SoftmaxInFp32(), Watch():
        got = call(x)
    assert seen == [FULL]
    assert got.dtype == HALF
    assert torch.equal(got, x.float().softmax(-1).half())
    with SoftmaxInFp32():
        assert torch.equal(call(x.float()), x.float().softmax(-1))


@pytest.mark.parametrize("asked", [FULL, HALF])
def test_a_dtype_that_is_asked_for_comes_out(asked: torch.dtype) -> None:
    x = _scores(2, 9)
    with SoftmaxInFp32():
        got = (functional.softmax(x, -1, dtype=asked), x.softmax(-1, asked), torch.softmax(x, -1, dtype=asked))
    for found in got:
        assert found.dtype == asked
        assert torch.equal(found, x.float().softmax(-1).to(asked))


def test_awkward_rows() -> None:
    inf = float("inf")
    rows = torch.tensor([[0, 0, -inf], [65504, 65504, -65504], [-inf, -inf, 0], [float("nan"), 0, 0]]).half()
    with SoftmaxInFp32():
        got = rows.softmax(-1)
        assert torch.zeros(0, 4).half().softmax(-1).shape == (0, 4)
        assert torch.ones(2, 1).half().softmax(-1).tolist() == [[1], [1]]
    assert got[:3].tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]
    assert got[3].isnan().all()


# ---- attention --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    batch=st.sampled_from([(), (1,), (2, 3)]),
    queries=st.integers(1, 5),
    keys=st.integers(1, 40),
    width=st.sampled_from([1, 3, 16, 64]),
    out=st.sampled_from([1, 8]),
    mask=st.sampled_from(["none", "bool", "float"]),
    scale=st.sampled_from([None, 0.5, 1.0]),
    seed=st.integers(0, 9),
)
def test_attention_is_as_documented(
    batch: tuple[int, ...], queries: int, keys: int, width: int, out: int, mask: str, scale: float | None, seed: int
) -> None:
    q, k, v = (_scores(*batch, *s, seed=seed + i) for i, s in enumerate([(queries, width), (keys, width), (keys, out)]))
    masks = {"none": None, "bool": _scores(queries, keys, seed=7) > -1, "float": _scores(queries, keys, seed=8)}
    given_mask = masks[mask]
    if given_mask is not None and given_mask.dtype == torch.bool:
        given_mask[:, 0] = True  # a row without any key has no answer
    with SoftmaxInFp32():
        got = functional.scaled_dot_product_attention(q, k, v, given_mask, scale=scale)
    full_mask = given_mask.float() if mask == "float" and given_mask is not None else given_mask
    expected = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), full_mask, scale=scale)
    assert got.dtype == HALF
    assert got.shape == expected.shape
    assert float((got.float() - expected).abs().max()) < 0.03


@pytest.mark.parametrize("options", [{"is_causal": True}, {"enable_gqa": True}])
def test_attention_of_other_sorts_is_fp32_as_a_whole(options: dict[str, Any]) -> None:
    q, k, v = _scores(1, 4, 3, 8), _scores(1, 2, 3, 8, seed=1), _scores(1, 2, 3, 8, seed=2)
    if "is_causal" in options:
        k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    with SoftmaxInFp32():
        got = functional.scaled_dot_product_attention(q, k, v, **options)
    expected = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options)
    assert torch.equal(got, expected.half())


def test_what_is_fp32_is_left_alone() -> None:
    q, k, v = (_scores(1, 2, 5, 8, seed=i).float() for i in range(3))
    with SoftmaxInFp32():
        assert torch.equal(
            functional.scaled_dot_product_attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v.half())
    assert mixed.dtype == FULL


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a @ b,
        torch.matmul,
        lambda a, b: a.matmul(b),
        torch.bmm,
        lambda a, b: a.bmm(b),
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        lambda a, b: torch.einsum("bij,bjk->bik", [a, b]),
    ],
)
def test_products_of_both_precisions(product: Callable[..., torch.Tensor]) -> None:
    a, b = _scores(2, 3, 4), _scores(2, 4, 5, seed=1)
    with SoftmaxInFp32():
        assert torch.equal(product(a, b.float()), a.float() @ b.float())
        assert torch.equal(product(a.float(), b), a.float() @ b.float())
        assert product(a, b).dtype == HALF
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        product(a, b.float())


def test_layer_norm_over_a_shape_that_is_read_off_a_tensor(tmp_path: Path) -> None:
    class OverChannels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.layer_norm(x.permute(0, 2, 1), x.shape[1:2], self.weight).permute(0, 2, 1)

    axes = ("many", "", "")
    graph = GraphSpec(
        "g", (TensorSpec("x", (9, 3, 4), "float32", axes=axes),), (TensorSpec("y", (9, 3, 4), "float32", axes=axes),),
        {"many": 1},
    )  # fmt: skip
    export_onnx(OverChannels().eval(), graph, tmp_path / "a.onnx", precision="fp32")
    assert "LayerNormalization" in {node.op_type for node in onnx.load(tmp_path / "a.onnx").graph.node}
    x = torch.randn(2, 5, 3)
    with FixedNorms():
        assert torch.equal(functional.layer_norm(x, [3]), functional.layer_norm(x, normalized_shape=(3,)))


# ---- through a network ------------------------------------------------------------------------------------


def test_the_rule_holds_in_every_form_of_a_network(tmp_path: Path) -> None:
    """Both attentions, as functions: the ONNX' softmax reads FP32, and `torch.export` keeps what eager PyTorch does."""
    model = small_prompt_segmenter()
    for graph in model.spec.graphs:
        module, keep = model.modules[graph.name], model.fp32_islands[graph.name]
        inputs = model.fp32_inputs.get(graph.name, ())
        path = tmp_path / f"{graph.name}.onnx"
        written = export_onnx(module, graph, path, precision="fp16", keep_fp32=keep, fp32_inputs=inputs)
        assert _softmax_inputs(path) == [onnx.TensorProto.FLOAT]

        half = half_precision(module, keep)
        feeds = tuple(
            torch.randn(t.shape, generator=torch.Generator().manual_seed(1)).to(t.dtype)
            for t in example_inputs(written)
        )
        with torch.no_grad():
            eager, full = half(*feeds), module(*(t.float() for t in feeds))
            program = torch.export.export(half, feeds, strict=False)
            again = program.module()(*feeds)
        softmaxes = [n for n in program.graph.nodes if "softmax" in str(n.target)]
        assert [n.args[0].meta["val"].dtype for n in softmaxes] == [FULL]
        assert not [n for n in program.graph.nodes if "scaled_dot_product" in str(n.target)]
        for found, same, expected in zip(eager, again, full, strict=True):
            assert torch.equal(found, same)
            assert float((found.float() - expected).abs().max()) < 0.02


def test_the_callers_own_code_is_not_affected() -> None:
    half_precision(SmallDecoder().eval())
    q = _scores(1, 3, 8)
    assert torch.equal(q.softmax(-1), torch.softmax(q, -1))
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        q @ q.float().transpose(1, 2)


def _softmax_inputs(path: Path) -> list[int]:
    """ONNX' number of the dtype of each Softmax' input."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True, strict_mode=True, data_prop=True)
    types = {v.name: v.type.tensor_type.elem_type for v in model.graph.value_info}
    return [types[node.input[0]] for node in model.graph.node if node.op_type == "Softmax"]
