"""DINO: which checkpoint is which, in whose layout, what is refused, and what is loaded."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded_dino import Layout, meta_layout, meta_shapes, save_checkpoint, seeded, unseeded_model

from visionfast.checkpoint import Checkpoint, open_checkpoint
from visionfast.errors import CheckpointError, OptionError, UnsupportedModelError
from visionfast.families import LoadedModel, identify
from visionfast.families.dino import Dino
from visionfast.families.dino_published import PUBLISHED

KINDS = tuple(architecture.name for architecture in PUBLISHED)
SATELLITE = {"local_cls_norm.weight": (1024,), "local_cls_norm.bias": (1024,)}


def checkpoint_of(weights: Mapping[str, Any], name: str = "weights.pth") -> Checkpoint:
    return Checkpoint(Path(name), "0" * 64, dict(weights), {})


def unloaded(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors that have shapes and no memory, but for vectors, which are looked at and put together in loading."""
    return {
        name: torch.zeros(shape) if len(shape) == 1 else torch.empty(shape, device="meta")
        for name, shape in shapes.items()
    }


def shapes_of(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


@functools.cache
def published_shapes(kind: str, layout: Layout, *, in_memory: bool = False) -> dict[str, tuple[int, ...]]:
    """What the publisher's own class of that size has; Hugging Face's by the names of its files, or `in_memory`."""
    if layout == "meta":
        return meta_shapes(kind)
    with torch.device("meta"):
        model = unseeded_model(kind, layout)
    if layout == "hugging-face" and not in_memory:
        from transformers.core_model_loading import revert_weight_conversion

        return shapes_of(revert_weight_conversion(model, model.state_dict()))
    return shapes_of(model.state_dict())


def load(weights: Mapping[str, Any], **options: Any) -> LoadedModel:
    checkpoint = checkpoint_of(weights)
    family = identify(checkpoint)
    assert isinstance(family, Dino)
    return family.load(checkpoint, name="weights", **options)


# ---- which it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (kind, layout)
        for kind in KINDS
        for layout in ("meta", "hugging-face", "hugging-face in memory", "timm", "timm-plain")
        if layout != "timm-plain" or kind.startswith("dinov3")
    ],
)
def test_every_published_size_is_told_and_loads_in_every_layout(kind: str, layout: str) -> None:
    whose: Any = layout.removesuffix(" in memory")
    side = 518 if kind.startswith("dinov2") else 224
    loaded = load(unloaded(published_shapes(kind, whose, in_memory=layout.endswith("memory"))), size_hw=(side, side))
    architecture = next(architecture for architecture in PUBLISHED if architecture.name == kind)
    assert loaded.spec.architecture == kind
    assert loaded.spec.license == ("Apache-2.0" if kind.startswith("dinov2") else "DINOv3 License (Meta)")
    side //= architecture.patch
    cls, patches = loaded.spec.graphs[0].outputs
    assert (cls.name, cls.shape) == ("cls", (1, architecture.width))
    assert (patches.name, patches.shape) == ("patches", (1, side, side, architecture.width))


@pytest.mark.parametrize("layout", ["meta", "hugging-face", "timm"])
@pytest.mark.parametrize("before", ["module.", "backbone.", "dinov2.", "teacher.backbone.", "model.", "a.b.c."])
def test_what_stands_before_every_key_is_left_out(layout: Layout, before: str) -> None:
    shapes = published_shapes("dinov2_vits14_reg", layout)
    wrapped = unloaded({f"{before}{name}": shape for name, shape in shapes.items()})
    assert load(wrapped, size_hw=(518, 518)).spec.architecture == "dinov2_vits14_reg"


@pytest.mark.parametrize("kind", ["dinov2_vits14", "dinov3_vits16"])
@pytest.mark.parametrize(("layout", "token"), [("meta", "mask_token"), ("hugging-face", "embeddings.mask_token")])
def test_the_token_for_hidden_patches_may_be_absent(kind: str, layout: Layout, token: str) -> None:
    shapes = dict(published_shapes(kind, layout))
    del shapes[token]
    assert load(unloaded(shapes)).spec.architecture == kind


def test_statistics_of_satellite_images_go_with_metas_satellite_weights() -> None:
    satellite = load(unloaded(meta_shapes("dinov3_vitl16") | SATELLITE)).spec
    assert satellite.architecture == "dinov3_vitl16"
    assert (satellite.preprocess.mean, satellite.preprocess.std) == ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143))
    assert load(unloaded(meta_shapes("dinov3_vitl16"))).spec.preprocess.mean == (0.485, 0.456, 0.406)


# ---- what it is not ---------------------------------------------------------------------------------------


@functools.cache
def relatives() -> dict[str, dict[str, tuple[int, ...]]]:
    import timm
    from transformers import (
        Dinov2Config,
        Dinov2ForImageClassification,
        DINOv3ConvNextConfig,
        DINOv3ConvNextModel,
        DINOv3ViTConfig,
        DINOv3ViTModel,
    )

    seven = {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "intermediate_size": 8192}
    with torch.device("meta"):
        models = {
            "vit": timm.create_model("vit_base_patch16_224"),
            "deit": timm.create_model("deit_small_patch16_224"),
            "deit3": timm.create_model("deit3_small_patch16_224"),
            "first": timm.create_model("vit_small_patch16_224.dino", num_classes=0),
            "seven, timm": timm.create_model("vit_7b_patch16_dinov3"),
            "seven, hugging-face": DINOv3ViTModel(DINOv3ViTConfig(**seven, num_register_tokens=4, use_gated_mlp=True)),
            "convnext": DINOv3ConvNextModel(DINOv3ConvNextConfig()),
            "classifier": Dinov2ForImageClassification(
                Dinov2Config(
                    hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518, patch_size=14
                )
            ),
        }
    found = {name: shapes_of(model.state_dict()) for name, model in models.items()}
    small = meta_shapes("dinov2_vits14")
    heads = {"dino_head.last_layer.weight": (8, 8), "ibot_head.last_layer.weight": (8, 8)}
    return found | {
        "convnext, meta": {"stages.0.0.gamma": (96,), "norm.weight": (768,), "norms.3.weight": (768,)},
        "convnext, file": {"stages.0.layers.0.gamma": (96,), "layer_norm.weight": (768,)},
        "training": {f"backbone.{name}": shape for name, shape in small.items()} | heads,
        "chunks": {name.replace("blocks.", "blocks.0."): shape for name, shape in small.items()},
        "two": {f"{who}.{name}": shape for who in ("student", "teacher") for name, shape in small.items()},
        "shallow": {name: shape for name, shape in small.items() if ".11." not in name},
        "other": {"conv.weight": (8, 8)},
    }


@pytest.mark.parametrize(
    ("name", "looks"),
    [
        ("vit", "a vision transformer without layer scales (the first DINO, MAE, DeiT, a classifier)"),
        ("deit", "a vision transformer without layer scales (the first DINO, MAE, DeiT, a classifier)"),
        ("first", "a vision transformer without layer scales (the first DINO, MAE, DeiT, a classifier)"),
        ("deit3", "a vision transformer of 12 blocks, 384 wide, that is none of DINO's published ones"),
        ("shallow", "a vision transformer of 11 blocks, 384 wide, that is none of DINO's published ones"),
        ("chunks", "a vision transformer of 12 blocks, 384 wide, that is none of DINO's published ones"),
        ("seven, timm", "DINOv3 7B"),
        ("seven, hugging-face", "DINOv3 7B"),
        ("convnext", "DINOv3 ConvNeXt"),
        ("convnext, meta", "DINOv3 ConvNeXt"),
        ("convnext, file", "DINOv3 ConvNeXt"),
        ("classifier", "dinov2_vits14 with classifier beside it (save what is under dinov2. by itself)"),
        ("training", "dinov2_vits14 with dino_head, ibot_head beside it (save what is under backbone. by itself)"),
        ("two", "no known model family"),
        ("other", "no known model family"),
    ],
)
def test_a_relative_is_no_dino_and_is_called_what_it_is(name: str, looks: str) -> None:
    checkpoint = checkpoint_of(unloaded(relatives()[name]))
    assert not Dino().recognises(checkpoint)
    with pytest.raises(UnsupportedModelError) as error:
        identify(checkpoint)
    assert f"it looks like {looks}, which is not handled" in str(error.value)
    assert "\n" not in str(error.value)


@given(
    st.dictionaries(
        st.sampled_from(
            ["cls_token", "pos_embed", "x.cls_token", "patch_embed.proj.weight", "blocks.0.ls1.gamma", "a", ""]
        )
        | st.text(max_size=5),
        st.sampled_from(
            [
                None,
                3,
                "text",
                [1, 1, 384],
                {"shape": (1, 1, 384)},
                np.zeros((1, 1, 384)),
                torch.zeros(()),
                torch.zeros(0),
                torch.zeros(1, 1, 384),
                torch.zeros(384, 3, 14, 14, dtype=torch.int8),
                torch.zeros(1, 1, 384).to_sparse(),
            ]
        ),
        max_size=6,
    )
)
def test_garbage_is_no_dino_and_raises_nothing(weights: dict[str, Any]) -> None:
    assert not Dino().recognises(checkpoint_of(weights))
    assert isinstance(Dino().describe(checkpoint_of(weights)), str)


# ---- strictly ---------------------------------------------------------------------------------------------

GATE = "layer.0.mlp.gate_proj.weight"
# Of DINOv2 in most layouts those without registers: one with them, but for their key, is one of those.
STRICT = [
    ("dinov2_vits14", "meta", False),
    ("dinov2_vits14", "hugging-face", False),
    ("dinov2_vits14", "hugging-face", True),
    ("dinov2_vits14_reg", "timm", False),
    ("dinov3_vits16", "meta", False),
    ("dinov3_vits16plus", "hugging-face", False),
    ("dinov3_vits16plus", "timm", False),
    ("dinov3_vits16", "timm-plain", False),
]


def refused(weights: Mapping[str, Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        load(weights)
    assert "\n" not in str(error.value)
    return str(error.value)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(STRICT), st.data())
def test_a_missing_key_is_an_error(which: tuple[str, Layout, bool], data: st.DataObject) -> None:
    shapes = published_shapes(which[0], which[1], in_memory=which[2])
    key = data.draw(st.sampled_from([name for name in shapes if "mask_token" not in name]))
    message = refused(unloaded({name: shape for name, shape in shapes.items() if name != key}))
    # Without what it is told by, it is none, or another, which it does not fit.
    assert "looks like" in message or f"{key} missing" in message or key in ("reg_token", GATE)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(STRICT), st.sampled_from(["head.weight", "blocks.3.attn.extra.bias", "layer.0.norm1.weight"]))
def test_a_key_too_many_is_an_error(which: tuple[str, Layout, bool], key: str) -> None:
    shapes = dict(published_shapes(which[0], which[1], in_memory=which[2]))
    if key not in shapes:
        assert f"{key} unexpected" in refused(unloaded(shapes | {key: (384,)}))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(STRICT), st.data())
def test_another_shape_is_an_error(which: tuple[str, Layout, bool], data: st.DataObject) -> None:
    shapes = dict(published_shapes(which[0], which[1], in_memory=which[2]))
    key = data.draw(st.sampled_from([name for name in shapes if "mask_token" not in name]))
    *rest, last = shapes[key]
    other = data.draw(st.sampled_from([(*rest, last + 1), (*rest, last, 1), tuple(rest), (*rest, 0)]))
    message = refused(unloaded(shapes | {key: other}))
    assert "looks like" in message or f"{key}: expected the published shape {shapes[key]}, got {other}" in message


def test_whole_numbers_are_no_weights() -> None:
    weights = unloaded(meta_shapes("dinov2_vits14"))
    weights["norm.weight"] = weights["norm.weight"].int()
    assert "norm.weight: expected torch.float32 or the like, got torch.int32" in refused(weights)


def test_an_error_says_whose_layout_it_was_held_to() -> None:
    shapes = published_shapes("dinov3_vits16", "hugging-face")
    assert refused(unloaded(shapes | {"layer.0.attention.k_proj.bias": (384,)})) == (
        "weights.pth, in Hugging Face's layout: expected exactly the published keys, got layer.0.attention.k_proj.bias "
        "unexpected; a fine-tune that adds or drops layers is not handled"
    )


def test_a_model_that_was_never_initialised_is_refused() -> None:
    weights = unloaded(meta_shapes("dinov3_vits16"))
    weights["blocks.7.attn.qkv.bias_mask"] = torch.full((1152,), torch.nan)
    assert "blocks.7.attn.qkv.bias_mask: expected 0 and 1, got NaN" in refused(weights)


# ---- what is loaded ---------------------------------------------------------------------------------------


def test_metas_mask_is_multiplied_into_the_bias_and_its_periods_are_the_files() -> None:
    weights = meta_layout("dinov3_vits16")
    weights["rope_embed.periods"] = weights["rope_embed.periods"] * 1.5
    state = load(weights).modules["model"].state_dict()
    bias = weights["blocks.2.attn.qkv.bias"].clone()
    bias[384:768] = 0
    assert torch.equal(state["blocks.2.attn.qkv.bias"], bias)
    assert torch.equal(state["rope_embed.periods"], weights["rope_embed.periods"].float())


@pytest.mark.parametrize("layout", ["timm", "timm-plain", "hugging-face"])
def test_biases_that_are_not_published_are_zero(layout: Layout) -> None:
    weights = seeded(published_shapes("dinov3_vits16", layout))
    state = load(weights).modules["model"].state_dict()
    query, key, value = state["blocks.5.attn.qkv.bias"].chunk(3)
    assert not key.any()
    assert bool(query.any()) == bool(value.any()) == (layout != "timm-plain")
    assert torch.allclose(state["rope_embed.periods"], 100 ** (torch.arange(16) / 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_computed_in_float32(dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in meta_layout("dinov3_vits16").items()}
    loaded = load(weights).modules["model"]
    assert {tensor.dtype for tensor in (*loaded.parameters(), *loaded.buffers())} == {torch.float32}
    assert torch.equal(loaded.state_dict()["blocks.0.ls1.gamma"], weights["blocks.0.ls1.gamma"].float())


def test_weights_that_are_whole_in_the_file_are_not_copied() -> None:
    weights = meta_layout("dinov2_vits14")
    state = load(weights).modules["model"].state_dict()
    assert state["blocks.0.mlp.fc1.weight"].data_ptr() == weights["blocks.0.mlp.fc1.weight"].data_ptr()


@pytest.mark.parametrize("layout", ["meta", "hugging-face", "timm", "timm-plain"])
def test_a_publishers_file_opens(tmp_path: Path, layout: Layout) -> None:
    path = save_checkpoint("dinov3_vits16", tmp_path / "a.weights", layout=layout)
    checkpoint = open_checkpoint(path)
    loaded = identify(checkpoint).load(checkpoint, name="a", size_hw=(32, 48), batch=2)
    with torch.no_grad():
        cls, patches = loaded.modules["model"](torch.zeros(2, 3, 32, 48))
    assert cls.shape == (2, 384)
    assert patches.shape == (2, 2, 3, 384)
    assert cls.isfinite().all()
    assert patches.isfinite().all()


@pytest.mark.parametrize(
    ("key", "before"), [("model", "module."), ("state_dict", "module.backbone."), ("teacher", "backbone.")]
)
def test_a_training_loops_file_opens(tmp_path: Path, key: str, before: str) -> None:
    path = tmp_path / "a.pt"
    weights = {f"{before}{name}": tensor.half() for name, tensor in meta_layout("dinov3_vits16").items()}
    torch.save({key: weights, "epoch": 3}, path)
    assert isinstance(identify(open_checkpoint(path)), Dino)


# ---- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size_hw", "near"),
    [
        ("dinov2_vits14", (224, 225), "224x224"),
        ("dinov2_vits14", (13, 224), "14x224"),
        ("dinov2_vits14", (512, 512), "518x518"),
        ("dinov3_vits16", (518, 518), "512x512"),
        ("dinov3_vits16", (0, 16), "16x16"),
    ],
)
def test_a_size_is_a_multiple_of_the_patch(kind: str, size_hw: tuple[int, int], near: str) -> None:
    with pytest.raises(OptionError, match=f"expected multiples of the patch of .. pixels; {near} is the nearest"):
        load(unloaded(meta_shapes(kind)), size_hw=size_hw)


@pytest.mark.parametrize(
    ("kind", "size_hw", "near"),
    [
        ("dinov2_vits14", (700000, 700000), "4088x4088"),
        ("dinov2_vits14", (224, 4102), "224x4088"),
        ("dinov3_vits16", (4112, 0), "4096x16"),
    ],
)
def test_a_size_is_one_that_attention_can_be_paid_to(kind: str, size_hw: tuple[int, int], near: str) -> None:
    words = r"pixels, up to 4096 a side \(attention takes the square of the patches' number\); "
    with pytest.raises(OptionError, match=f"{words}{near} is the nearest"):
        load(unloaded(meta_shapes(kind)), size_hw=size_hw)


@pytest.mark.parametrize("batch", [0, -1, 1025, True, "2", 1.5])
def test_a_batch_is_a_whole_number(batch: Any) -> None:
    with pytest.raises(OptionError, match=f"batch: expected a whole number from 1 to 1024, got {batch!r}"):
        load(unloaded(meta_shapes("dinov2_vits14")), batch=batch)


@pytest.mark.parametrize("key", ["norm.weight", "blocks.7.attn.qkv.bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_whose_training_diverged_is_refused(key: str, value: float) -> None:
    weights = unloaded(meta_shapes("dinov2_vits14"))
    weights[key][5] = value
    message = f"{key}: expected numbers, got NaN or Inf in 1 of {len(weights[key])}; its training diverged"
    assert message in refused(weights)


def test_an_image_is_cropped_or_squashed() -> None:
    weights = unloaded(meta_shapes("dinov2_vits14"))
    cropped, squashed = load(weights).spec.preprocess, load(weights, resize="stretch").spec.preprocess
    assert (cropped.size_hw, cropped.resize, cropped.cover_hw) == ((224, 224), "centre-crop", (256, 256))
    assert (squashed.size_hw, squashed.resize, squashed.cover_hw) == ((224, 224), "stretch", None)
    with pytest.raises(OptionError, match="letterbox"):
        load(weights, resize="letterbox")
