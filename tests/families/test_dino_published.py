"""DINO against transformers and timm, each with weights that it named itself, and against Meta's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from seeded_dino import Layout, library_model, meta_layout, save_checkpoint, seeded

from visionfast.checkpoint import Checkpoint
from visionfast.families.dino import Dino
from visionfast.families.dino_layouts import LAYOUTS, network_weights
from visionfast.families.dino_layouts import Layout as FileLayout
from visionfast.families.dino_modules import VisionTransformer, interpolated_positions
from visionfast.families.dino_published import Architecture
from visionfast.families.weights import load_weights

# Of values that reach about 4. Where both sides do the same in the same order, nothing differs at all; transformers
# multiplies queries, keys and values apart, and turns by frequencies where this turns by periods.
TOLERANCE = 2e-5


@pytest.fixture(scope="module", autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def images(size_hw: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 3, *size_hw, generator=torch.Generator().manual_seed(seed))


def ours(weights: dict[str, torch.Tensor], size_hw: tuple[int, int]) -> torch.nn.Module:
    checkpoint = Checkpoint(Path("weights"), "0" * 64, weights, {})
    assert Dino().recognises(checkpoint)
    return Dino().load(checkpoint, name="weights", size_hw=size_hw).modules["model"]


def tokens(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """(B, 1 + R + h·w, D), behind the last norm, of either library's model."""
    found = model.forward_features(pixels) if hasattr(model, "forward_features") else model(pixels).last_hidden_state
    assert isinstance(found, torch.Tensor)
    return found


def difference(found: tuple[torch.Tensor, torch.Tensor], expected: torch.Tensor) -> tuple[float, float]:
    """Largest, of the class token and of the patches."""
    cls, patches = found
    flat = patches.flatten(1, 2)
    return float((cls - expected[:, 0]).abs().max()), float((flat - expected[:, -flat.shape[1] :]).abs().max())


# ---- the libraries' own layouts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout", "size_hw"),
    [
        ("dinov2_vits14", "hugging-face", (518, 518)),
        pytest.param("dinov2_vits14", "timm", (518, 518), marks=pytest.mark.slow),
        pytest.param("dinov2_vits14_reg", "hugging-face", (518, 518), marks=pytest.mark.slow),
        pytest.param("dinov2_vits14_reg", "hugging-face", (224, 224), marks=pytest.mark.slow),
        ("dinov2_vits14_reg", "hugging-face", (224, 336)),
        ("dinov2_vits14_reg", "timm", (224, 224)),
        pytest.param("dinov3_vits16", "hugging-face", (224, 224), marks=pytest.mark.slow),
        ("dinov3_vits16", "hugging-face", (224, 336)),
        pytest.param("dinov3_vits16", "timm", (336, 224), marks=pytest.mark.slow),
        ("dinov3_vits16", "timm-plain", (224, 224)),
        ("dinov3_vits16plus", "hugging-face", (224, 224)),
        pytest.param("dinov3_vits16plus", "timm", (224, 336), marks=pytest.mark.slow),
    ],
)
def test_a_librarys_model_and_its_weights_here_agree(kind: str, layout: Layout, size_hw: tuple[int, int]) -> None:
    model = library_model(kind, layout)
    pixels = images(size_hw)
    expected = tokens(model, pixels)
    assert float(expected.abs().max()) > 1
    assert max(difference(ours(model.state_dict(), size_hw)(pixels), expected)) < TOLERANCE


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("dinov2_vits14", marks=pytest.mark.slow),
        "dinov2_vits14_reg",
        "dinov3_vits16",
        pytest.param("dinov3_vits16plus", marks=pytest.mark.slow),
    ],
)
def test_metas_files_give_what_timm_makes_of_them(tmp_path: Path, kind: str) -> None:
    """timm reads the publisher's files by rules of its own."""
    import timm

    name, side = {
        "dinov2_vits14": ("vit_small_patch14_dinov2", 518),
        "dinov2_vits14_reg": ("vit_small_patch14_reg4_dinov2", 224),
        "dinov3_vits16": ("vit_small_patch16_dinov3_qkvb", 224),
        "dinov3_vits16plus": ("vit_small_plus_patch16_dinov3_qkvb", 224),
    }[kind]
    path = save_checkpoint(kind, tmp_path / "meta.pth")
    size = {"img_size": side} if kind.startswith("dinov2") else {}
    model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": str(path)}, **size).eval()
    if kind.startswith("dinov3"):
        # It makes the periods anew, the files have them rounded: its model cards say how to do the same.
        model.rope.periods.copy_(model.rope.periods.bfloat16().float())
    pixels = images((side, side))
    assert max(difference(ours(meta_layout(kind), (side, side))(pixels), tokens(model, pixels))) < TOLERANCE


def test_rounded_periods_are_not_the_same() -> None:
    """So that nobody makes DINOv3's periods anew where the file has them."""
    weights = meta_layout("dinov3_vits16")
    pixels = images((224, 224))
    cls, patches = ours(weights, (224, 224))(pixels)
    weights["rope_embed.periods"] = 100 ** (torch.arange(16) / 16)
    other, others = ours(weights, (224, 224))(pixels)
    assert float((cls - other).abs().max()) > 10 * TOLERANCE
    assert float((patches - others).abs().max()) > 10 * TOLERANCE


# ---- a gated perceptron in DINOv2, whose one published size has 4.5 GB ------------------------------------

SMALL = Architecture("small", 2, 128, 2, 344, True, registers=0, patch=14, grid=5)


def small_hugging_face() -> Any:
    from transformers import Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 70}
    return Dinov2Model(Dinov2Config(**sizes, patch_size=14, use_swiglu_ffn=True))


def small_timm() -> Any:
    from timm.layers import SwiGLUPacked
    from timm.models.vision_transformer import VisionTransformer as Timm

    sizes = {"embed_dim": 128, "depth": 2, "num_heads": 2, "img_size": 70, "mlp_ratio": 688 / 128}
    return Timm(
        **sizes, patch_size=14, num_classes=0, init_values=1e-5, mlp_layer=SwiGLUPacked, act_layer=torch.nn.SiLU
    )


def in_files(model: Any) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    renamed: dict[str, torch.Tensor] = revert_weight_conversion(model, model.state_dict())
    return renamed


@pytest.mark.parametrize("which", ["hugging-face", "hugging-face in memory", "timm"])
def test_both_halves_of_dinov2s_gated_perceptron_are_where_they_belong(which: str) -> None:
    model = small_timm() if which == "timm" else small_hugging_face()
    model.load_state_dict(seeded({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}))
    weights = in_files(model) if which == "hugging-face" else dict(model.state_dict())
    publisher = "timm" if which == "timm" else "Hugging Face"
    layout = next(
        each
        for each in LAYOUTS
        if each.publisher == publisher and each.class_position and each.shape("blocks.1.attn.qkv.weight", weights)
    )
    pixels = images((70, 70))
    assert max(difference(built(SMALL, layout, weights)(pixels), tokens(model.eval(), pixels))) < TOLERANCE


def built(architecture: Architecture, layout: FileLayout, weights: dict[str, torch.Tensor]) -> VisionTransformer:
    side = architecture.grid * architecture.patch
    network = VisionTransformer(architecture, (side, side))
    load_weights(network, network_weights(layout, network.state_dict(), weights, "weights"), "weights")
    network.fold()
    return network


# ---- DINOv2's position embedding at other sizes than it was trained at ------------------------------------


def keys_cubic(distance: npt.NDArray[np.float64], a: float) -> npt.NDArray[np.float64]:
    """Keys, "Cubic convolution interpolation for digital image processing", 1981, eq. 15 with a free `a`."""
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def offset_matrix(length: int, side: int) -> npt.NDArray[np.float64]:
    """(length, side): Meta's for models without registers. `length` samples, as far apart as if there were 0.1 more."""
    matrix = np.zeros((length, side))
    for row in range(length):
        where = (row + 0.5) * side / (length + 0.1) - 0.5
        first = int(np.floor(where)) - 1
        for tap in range(first, first + 4):
            matrix[row, min(max(tap, 0), side - 1)] += keys_cubic(np.array(where - tap), -0.75)
    return matrix


def antialias_matrix(length: int, side: int) -> npt.NDArray[np.float64]:
    """(length, side): Meta's for models with registers. The kernel is as wide as a sample where there are fewer."""
    scale = side / length
    width = max(scale, 1.0)
    middles = (np.arange(length)[:, None] + 0.5) * scale
    matrix = keys_cubic((np.arange(side)[None] + 0.5 - middles) / width, -0.5)
    return np.asarray(matrix / matrix.sum(1, keepdims=True))


def resized(positions: torch.Tensor, grid_hw: tuple[int, int], *, antialias: bool) -> npt.NDArray[np.float64]:
    """(1, M·M, D) → (1, h·w, D)."""
    side, make = round(positions.shape[1] ** 0.5), antialias_matrix if antialias else offset_matrix
    rows, columns = (make(length, side) for length in grid_hw)
    square = positions.double().numpy().reshape(side, side, -1)
    return np.einsum("yi,xj,ijd->yxd", rows, columns, square, optimize=True).reshape(1, -1, positions.shape[2])


@settings(deadline=None)
@given(st.integers(2, 40), st.tuples(st.integers(1, 60), st.integers(1, 60)), st.booleans(), st.integers(0, 2**32 - 1))
@example(37, (16, 16), False, 0)
@example(37, (16, 16), True, 0)
@example(37, (37, 37), False, 0)
@example(37, (37, 16), False, 0)
@example(37, (1, 74), True, 0)
def test_positions_are_resized_by_the_publishers_formula(
    side: int, grid_hw: tuple[int, int], antialias: bool, seed: int
) -> None:
    positions = torch.randn(1, side * side, 2, generator=torch.Generator().manual_seed(seed))
    found = interpolated_positions(positions, grid_hw, antialias=antialias)
    if grid_hw == (side, side):
        assert torch.equal(found, positions)  # as published: not even by the offset
    else:
        np.testing.assert_allclose(found.numpy(), resized(positions, grid_hw, antialias=antialias), atol=2e-4)


def test_dinov2_without_registers_is_metas_at_other_sizes_not_transformers() -> None:
    """transformers resizes without the offset, timm with antialias; the model was evaluated as Meta has it."""
    from transformers import Dinov2Config, Dinov2Model

    theirs = library_model("dinov2_vits14", "hugging-face")
    weights = theirs.state_dict()
    pixels = images((224, 224))
    found = ours(weights, (224, 224))(pixels)
    assert min(difference(found, tokens(theirs, pixels))) > 1000 * TOLERANCE
    # Their network, with the formula's result as if it had been trained at this size.
    positions = weights["embeddings.position_embeddings"]
    made = torch.from_numpy(resized(positions[:, 1:], (16, 16), antialias=False)).float()
    model = Dinov2Model(Dinov2Config(**theirs.config.to_dict() | {"image_size": 224}))
    model.load_state_dict(dict(weights) | {"embeddings.position_embeddings": torch.cat((positions[:, :1], made), 1)})
    assert max(difference(found, tokens(model.eval(), pixels))) < 2 * TOLERANCE
