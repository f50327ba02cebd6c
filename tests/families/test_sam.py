"""Segment Anything: which checkpoint is which, what is refused, and what is loaded."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from visionfast.checkpoint import Checkpoint, open_checkpoint
from visionfast.errors import CheckpointError, OptionError, UnsupportedModelError
from visionfast.families import LoadedModel, get_family, identify
from visionfast.families.sam import Sam
from visionfast.families.sam_modules import build_network, layer_norms

SAM2_SIZES = ("tiny", "small", "base_plus", "large")
ARCHITECTURES = (
    *("sam_vit_b", "sam_vit_l", "sam_vit_h", "mobile_sam"),
    *(f"sam2_hiera_{size}" for size in SAM2_SIZES),
    *(f"sam2.1_hiera_{size}" for size in SAM2_SIZES),
)
LOADED = ("mobile_sam", "sam2.1_hiera_tiny")


def unloaded(weights: Mapping[str, Any], name: str = "weights.pt") -> Checkpoint:
    """A checkpoint whose tensors have shapes and no memory."""
    return Checkpoint(Path(name), "0" * 64, dict(weights), {})


def keys(*names: str) -> dict[str, Any]:
    """Tensors of some shape under these names."""
    return {name: torch.empty(8, 8, device="meta") for name in names}


@pytest.fixture(scope="module")
def published() -> dict[str, dict[str, Any]]:
    """Each architecture's keys, with tensors that have shapes and no memory."""
    return {name: dict(build_network(name).state_dict()) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def loaded(sam_checkpoint: Callable[[str], Path]) -> dict[str, LoadedModel]:
    return {kind: Sam().load(open_checkpoint(sam_checkpoint(kind)), name=kind) for kind in LOADED}


# ---- which it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_architecture_is_told_by_keys_and_shapes(published: dict[str, dict[str, Any]], architecture: str) -> None:
    from visionfast.families.sam import _architecture

    # The file's name says another thing.
    checkpoint = unloaded(published[architecture], "sam2.1_t.pt")
    assert isinstance(identify(checkpoint), Sam)
    assert _architecture(checkpoint.state_dict) == architecture
    assert get_family("sam").describe(checkpoint) == ""
    assert not get_family("yolov8").recognises(checkpoint)


@pytest.mark.parametrize("prefix", ["module.", "sam.", "model.", "module.sam.", "sam.module."])
def test_a_training_wrappers_prefix_is_taken_off(published: dict[str, dict[str, Any]], prefix: str) -> None:
    wrapped = {f"{prefix}{key}": tensor for key, tensor in published["mobile_sam"].items()}
    assert Sam().recognises(unloaded(wrapped))


def test_a_prefix_that_only_some_keys_have_stays(published: dict[str, dict[str, Any]]) -> None:
    mixed = {f"module.{k}" if k.startswith("image") else k: t for k, t in published["mobile_sam"].items()}
    assert not Sam().recognises(unloaded(mixed))


def variant(published: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Relatives of Segment Anything, by the keys that their own code gives them."""
    vit, tiny = published["sam_vit_b"], published["mobile_sam"]
    heads = {k: t for k, t in vit.items() if not k.startswith("image_encoder.")}
    first_block = "image_encoder.layers.0.blocks.0.conv3.c.weight"
    return {
        "SAM 3": keys("detector.backbone.vision_backbone.trunk.pos_embed", "tracker.sam_mask_decoder.iou_token.weight"),
        "SAM 3 in transformers": keys("detector_model.vision_encoder.x", "tracker_model.mask_decoder.x"),
        "SAM-HQ": vit | keys("mask_decoder.hf_token.weight", "mask_decoder.hf_mlp.layers.0.weight"),
        "SAM 2 HQ": published["sam2.1_hiera_tiny"] | keys("sam_mask_decoder.hf_token.weight"),
        "LoRA": vit | keys("image_encoder.blocks.0.attn.qkv.linear_a_q.weight"),
        "PEFT": vit | keys("image_encoder.blocks.0.attn.qkv.lora_A.default.weight"),
        "EfficientSAM": heads
        | {f"image_encoder.blocks.{i}.norm1.weight": torch.empty(192, device="meta") for i in range(12)}
        | {"image_encoder.patch_embed.proj.weight": torch.empty(192, 3, 16, 16, device="meta")},
        "EdgeSAM": heads | keys("image_encoder.features.0.0.c.weight"),
        "EfficientViT-SAM": heads | keys("image_encoder.backbone.input_stem.op_list.0.conv.weight"),
        "another encoder": heads | keys("image_encoder.something.weight"),
        "no encoder": heads,
        "a larger TinyViT": tiny | {first_block: torch.empty(96, 384, 1, 1, device="meta")},
        "transformers": keys(
            *("shared_image_embedding.positional_embedding", "vision_encoder.layers.0.layer_norm1.weight"),
            *("prompt_encoder.no_mask_embed.weight", "mask_decoder.iou_token.weight"),
        ),
    }[name]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("SAM 3", "SAM 3"),
        ("SAM 3 in transformers", "SAM 3"),
        ("SAM-HQ", "SAM-HQ"),
        ("SAM 2 HQ", "SAM-HQ"),
        ("LoRA", "LoRA"),
        ("PEFT", "LoRA"),
        ("EfficientSAM", "12 blocks, 192 wide"),
        ("EdgeSAM", "EdgeSAM"),
        ("EfficientViT-SAM", "EfficientViT-SAM"),
        ("another encoder", "another image encoder"),
        ("no encoder", "no image encoder"),
        ("a larger TinyViT", "not of MobileSAM's size"),
        ("transformers", "Hugging Face's layout"),
    ],
)
def test_relatives_are_named_and_refused(published: dict[str, dict[str, Any]], name: str, says: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        identify(unloaded(variant(published, name)))
    message = str(caught.value)
    assert says in message
    assert "SAM (ViT-B, ViT-L, ViT-H), MobileSAM, SAM 2 and SAM 2.1" in message
    assert "\n" not in message


def test_other_models_are_not_described() -> None:
    for weights in ({}, keys("0.conv.weight", "22.cv2.0.0.conv.weight"), keys("prompt_encoder.x"), keys("a.lora_A")):
        checkpoint = unloaded(weights)
        assert not Sam().recognises(checkpoint)
        assert Sam().describe(checkpoint) == ""


# ---- what is refused while loading ------------------------------------------------------------------------


def test_a_missing_key_is_named_and_counted(published: dict[str, dict[str, Any]]) -> None:
    weights = dict(published["sam_vit_b"])
    del weights["mask_decoder.iou_token.weight"], weights["mask_decoder.mask_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"mask_decoder\.iou_token\.weight and 1 more missing") as caught:
        Sam().load(unloaded(weights), name="x")
    assert "\n" not in str(caught.value)


def test_an_unexpected_key_is_named(published: dict[str, dict[str, Any]]) -> None:
    weights = published["sam2.1_hiera_tiny"] | keys("adapter.weight")
    with pytest.raises(CheckpointError, match=r"got adapter\.weight unexpected"):
        Sam().load(unloaded(weights), name="x")


def test_missing_and_unexpected_are_said_together(published: dict[str, dict[str, Any]]) -> None:
    weights = {k.replace("neck.0", "necks.0"): t for k, t in published["mobile_sam"].items()}
    with pytest.raises(
        CheckpointError, match=r"neck\.0\.weight missing and image_encoder\.necks\.0\.weight unexpected"
    ):
        Sam().load(unloaded(weights), name="x")


def test_a_position_embedding_for_another_size_is_refused(published: dict[str, dict[str, Any]]) -> None:
    weights = published["sam_vit_b"] | {"image_encoder.pos_embed": torch.empty(1, 32, 32, 768, device="meta")}
    with pytest.raises(CheckpointError, match=r"pos_embed.*\(1, 64, 64, 768\), got \(1, 32, 32, 768\)"):
        Sam().load(unloaded(weights), name="x")


@pytest.mark.parametrize("size_hw", [(640, 640), (1024, 1008), (512, 1024)])
def test_another_size_is_an_option_error(published: dict[str, dict[str, Any]], size_hw: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match=rf"1024x1024 only.*got {size_hw[0]}x{size_hw[1]}"):
        Sam().load(unloaded(published["mobile_sam"]), name="x", size_hw=size_hw)


@pytest.mark.parametrize("batch", [0, 2])
def test_another_batch_is_an_option_error(published: dict[str, dict[str, Any]], batch: int) -> None:
    with pytest.raises(OptionError, match=f"1 image a call, got {batch}"):
        Sam().load(unloaded(published["mobile_sam"]), name="x", batch=batch)


# ---- what is loaded ---------------------------------------------------------------------------------------


def test_the_specs_are_the_publishers(loaded: dict[str, LoadedModel]) -> None:
    for kind, model in loaded.items():
        spec, second = model.spec, kind.startswith("sam2")
        assert (spec.name, spec.family, spec.architecture, spec.task) == (kind, "sam", kind, "prompt-segment")
        assert (spec.batch, spec.class_names, spec.strides, spec.license) == (1, (), (), "")
        assert spec.preprocess.size_hw == (1024, 1024)
        assert spec.preprocess.resize == ("stretch" if second else "longest-side")
        assert spec.preprocess.pad_value is None
        prompts = spec.prompts
        assert prompts is not None
        assert (prompts.box_first, prompts.pad_with_box) == (second, second)
        assert prompts.stability == ((0.05, 0.98) if second else None)
        assert prompts.logit_limit == (32.0 if second else None)
        assert (prompts.score_threshold, prompts.stability_threshold) == (0.8 if second else 0.88, 0.95)


def test_normalisation_is_sams_own(loaded: dict[str, LoadedModel]) -> None:
    from segment_anything import sam_model_registry

    reference = sam_model_registry["vit_b"]()
    preprocess = loaded["mobile_sam"].spec.preprocess
    assert (torch.tensor(preprocess.mean) * 255).tolist() == pytest.approx(reference.pixel_mean.flatten().tolist())
    assert (torch.tensor(preprocess.std) * 255).tolist() == pytest.approx(reference.pixel_std.flatten().tolist())


def test_thresholds_are_those_of_the_published_generators(loaded: dict[str, LoadedModel]) -> None:
    import inspect

    from segment_anything import SamAutomaticMaskGenerator

    defaults = inspect.signature(SamAutomaticMaskGenerator.__init__).parameters
    prompts = loaded["mobile_sam"].spec.prompts
    assert prompts is not None
    assert prompts.score_threshold == defaults["pred_iou_thresh"].default
    assert prompts.stability_threshold == defaults["stability_score_thresh"].default


@pytest.mark.parametrize("kind", LOADED)
def test_the_graphs_shapes_are_the_modules(loaded: dict[str, LoadedModel], kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, sizes = loaded[kind], {"prompts": 3, "points": 5}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for graph in model.spec.graphs:
            outputs = model.modules[graph.name](*(torch.zeros(i.sized(sizes)) for i in graph.inputs))
            tensors = outputs if isinstance(outputs, tuple) else (outputs,)
            assert [tuple(t.shape) for t in tensors] == [o.sized(sizes) for o in graph.outputs]
            assert {t.dtype for t in tensors} == {torch.float32}


@pytest.mark.parametrize("kind", LOADED)
def test_the_decoder_takes_what_the_encoder_gives(loaded: dict[str, LoadedModel], kind: str) -> None:
    encoder, decoder = loaded[kind].spec.graphs
    assert (encoder.name, decoder.name) == ("encoder", "decoder")
    assert decoder.inputs[: len(encoder.outputs)] == encoder.outputs
    prompts = decoder.inputs[len(encoder.outputs) :]
    assert tuple(i.name for i in prompts) == loaded[kind].fp32_inputs["decoder"]
    assert [i.shown for i in prompts] == [
        "(prompts 1..64, points 1..32, 2)",
        "(prompts 1..64, points 1..32)",
        "(prompts 1..64, 1, 256, 256)",
        "(prompts 1..64,)",
    ]
    assert {axis for i in (*decoder.inputs, *decoder.outputs) for axis in i.axes if axis} == set(decoder.usual)


@pytest.mark.parametrize("kind", LOADED)
def test_every_layer_norm_stays_fp32(loaded: dict[str, LoadedModel], kind: str) -> None:
    model = loaded[kind]
    for name, module in model.modules.items():
        islands = model.fp32_islands[name]
        assert len(set(islands)) == len(islands)
        for path in (*layer_norms(module), *islands):
            assert module.get_submodule(path) is not None
            assert any(path == island or path.startswith(f"{island}.") for island in islands)
    assert any("LayerNorm2d" in type(m).__name__ for m in model.modules["decoder"].modules())


@pytest.mark.parametrize("kind", LOADED)
def test_weights_are_in_memory_once(sam_checkpoint: Callable[[str], Path], kind: str) -> None:
    checkpoint = open_checkpoint(sam_checkpoint(kind))
    model = Sam().load(checkpoint, name=kind)
    stored = {tensor.data_ptr() for tensor in checkpoint.state_dict.values()}
    parameters = [p for module in model.modules.values() for p in module.parameters()]
    assert all(p.data_ptr() in stored and not p.requires_grad and not p.is_meta for p in parameters)
    assert not any(module.training for whole in model.modules.values() for module in whole.modules())


def test_half_precision_weights_become_float32(sam_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    state_dict = torch.load(sam_checkpoint("mobile_sam"), weights_only=True)
    halves = {key: t.half() if t.is_floating_point() else t for key, t in state_dict.items()}
    torch.save({"state_dict": {f"module.{k}": t for k, t in halves.items()}, "epoch": 3}, tmp_path / "half.pt")
    model = Sam().load(open_checkpoint(tmp_path / "half.pt"), name="half")
    weight = model.modules["encoder"].get_parameter("image_encoder.neck.0.weight")
    assert weight.dtype == torch.float32
    assert torch.equal(weight, halves["image_encoder.neck.0.weight"].float())


def prompts(p: int, n: int, seed: int = 0) -> tuple[Any, ...]:
    """(P, N, 2) points, (P, N) labels, (P, 1, 256, 256) masks, which none of the prompts has."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(p, n, 2, generator=generator) * 1024
    labels = torch.randint(-1, 4, (p, n), generator=generator).float()
    return points, labels, torch.zeros(p, 1, 256, 256), torch.zeros(p)


def features(model: LoadedModel) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(o.shape, generator=generator) for o in model.spec.graphs[0].outputs)


@pytest.mark.parametrize("kind", LOADED)
def test_prompts_do_not_see_each_other(loaded: dict[str, LoadedModel], kind: str) -> None:
    decoder, image = loaded[kind].modules["decoder"], features(loaded[kind])
    points, labels, *_ = prompts(2, 4)
    mask_input, has_mask = torch.randn(2, 1, 256, 256), torch.tensor([0.0, 1.0])
    with torch.no_grad():
        together, scores = decoder(*image, points, labels, mask_input, has_mask)
        for i in range(2):
            one = slice(i, i + 1)
            mask, score = decoder(*image, points[one], labels[one], mask_input[one], has_mask[one])
            torch.testing.assert_close(mask[0], together[i], atol=2e-4, rtol=0)
            torch.testing.assert_close(score[0], scores[i], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", LOADED)
def test_a_mask_that_does_not_count_changes_nothing(loaded: dict[str, LoadedModel], kind: str) -> None:
    decoder, image = loaded[kind].modules["decoder"], features(loaded[kind])
    points, labels, none, has_mask = prompts(1, 2)
    with torch.no_grad():
        without, _ = decoder(*image, points, labels, none, has_mask)
        ignored, _ = decoder(*image, points, labels, torch.full_like(none, float("nan")), has_mask)
        counted, _ = decoder(*image, points, labels, none, torch.ones(1))
    assert torch.equal(without, ignored)
    assert float((without - counted).abs().max()) > 0.01  # an empty mask is not no mask


@pytest.mark.parametrize("kind", LOADED)
def test_seeded_masks_are_worth_comparing(loaded: dict[str, LoadedModel], kind: str) -> None:
    """Both signs, several sizes, prompts that differ: else the tests that use them could not fail."""
    decoder, image = loaded[kind].modules["decoder"], features(loaded[kind])
    with torch.no_grad():
        masks, scores = decoder(*image, *prompts(2, 2))
    share = (masks > 0).float().mean((2, 3))
    assert float(share.min()) < 0.4
    assert float(share.max()) > 0.6
    assert float((masks[0] - masks[1]).abs().max()) > 1
    assert float(masks.std()) > 2
    assert 0.3 < float(scores.min()) < float(scores.max()) < 1.2


def test_a_copy_is_independent(loaded: dict[str, LoadedModel]) -> None:
    """Half-precision graphs are made from copies."""
    for name in ("encoder", "decoder"):
        original = loaded["sam2.1_hiera_tiny"].modules[name]
        twin = copy.deepcopy(original)
        before = [b.clone() for b in original.buffers()]
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.data.zero_()
        assert before
        assert all(torch.equal(b, kept) and bool(b.any()) for b, kept in zip(original.buffers(), before, strict=True))


def test_building_leaves_nothing_behind_in_other_peoples_classes() -> None:
    """What ultralytics or segment_anything would make while being imported, every later model would share."""
    program = (
        "import gc, torch\n"
        "from visionfast.families.sam_modules import build_network\n"
        "for name in ('sam2.1_hiera_tiny', 'mobile_sam'):\n"
        "    build_network(name)\n"
        "gc.collect()\n"
        "from ultralytics.nn.modules import Detect\n"
        "print(Detect.anchors.device, *(o.shape for o in gc.get_objects() if type(o) is torch.Tensor and o.is_meta))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu"]
