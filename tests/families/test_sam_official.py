"""The graphs against the publishers' own code, with the same weights: what the engines are certified against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded_sam import official_layout

from visionfast.checkpoint import open_checkpoint
from visionfast.families import LoadedModel
from visionfast.families.sam import Sam
from visionfast.families.sam_modules import WeightsOnMeta, build_network

# Both sides are float32 on logits that reach some 30 and scores of about 1; only the order of a few additions differs.
MASK_TOLERANCE, SCORE_TOLERANCE = 2e-4, 1e-5
SAM2_CONFIGS = {"tiny": "t", "small": "s", "base_plus": "b+", "large": "l"}


@pytest.fixture(scope="module", autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def load(path: Path) -> LoadedModel:
    return Sam().load(open_checkpoint(path), name=path.stem)


@pytest.fixture(scope="module")
def mobile(sam_checkpoint: Callable[[str], Path]) -> LoadedModel:
    return load(sam_checkpoint("mobile_sam"))


@pytest.fixture(scope="module")
def tiny(sam_checkpoint: Callable[[str], Path]) -> LoadedModel:
    return load(sam_checkpoint("sam2.1_hiera_tiny"))


@pytest.fixture(scope="module")
def official_sam(sam_checkpoint: Callable[[str], Path]) -> Any:
    """segment_anything's prompt encoder and mask decoder with MobileSAM's weights, as MobileSAM uses them."""
    from segment_anything import sam_model_registry

    network = sam_model_registry["vit_b"]()
    weights = torch.load(sam_checkpoint("mobile_sam"), weights_only=True)
    for name in ("prompt_encoder", "mask_decoder"):
        own = {k.removeprefix(f"{name}."): t for k, t in weights.items() if k.startswith(f"{name}.")}
        getattr(network, name).load_state_dict(own)
    return network.eval()


@pytest.fixture(scope="module")
def official_sam2(sam_checkpoint: Callable[[str], Path]) -> Any:
    build_sam = pytest.importorskip("sam2.build_sam", reason="the official SAM 2 is not installed: see the Makefile")
    return build_sam.build_sam2(
        "configs/sam2.1/sam2.1_hiera_t.yaml", str(sam_checkpoint("sam2.1_hiera_tiny")), device="cpu"
    )


# ---- the layouts ------------------------------------------------------------------------------------------


def shapes(network: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}


@pytest.mark.parametrize("size", SAM2_CONFIGS)
@pytest.mark.parametrize("generation", ["sam2", "sam2.1"])
def test_sam2s_keys_and_shapes_are_the_official_ones(generation: str, size: str) -> None:
    pytest.importorskip("sam2", reason="the official SAM 2 is not installed: see the Makefile")
    from hydra import compose
    from hydra.utils import instantiate
    from sam2.modeling import memory_attention, memory_encoder, sam2_base  # noqa: F401 (nothing is imported on meta)
    from sam2.modeling.backbones import hieradet, image_encoder  # noqa: F401

    config = compose(config_name=f"configs/{generation}/{generation}_hiera_{SAM2_CONFIGS[size]}.yaml")
    with WeightsOnMeta():
        official = instantiate(config.model, _recursive_=True)
    assert shapes(build_network(f"{generation}_hiera_{size}")) == shapes(official)


@pytest.mark.parametrize("size", ["vit_b", "vit_l", "vit_h"])
def test_sams_keys_and_shapes_are_the_official_ones(size: str) -> None:
    from segment_anything import sam_model_registry

    with torch.device("meta"):
        official = sam_model_registry[size]()
    assert shapes(build_network(f"sam_{size}")) == shapes(official)


def test_mobile_sams_keys_and_shapes_are_ultralytics() -> None:
    assert shapes(build_network("mobile_sam")) == shapes(official_layout("mobile_sam"))


# ---- encoders ---------------------------------------------------------------------------------------------


def picture() -> Any:
    """(1024, 1024, 3) uint8: blobs of all sizes, with one black side, as padding is before normalisation."""
    generator = torch.Generator().manual_seed(3)
    octaves = [torch.rand(1, 3, 2**k, 2**k, generator=generator) - 0.5 for k in range(1, 9)]
    large = [torch.nn.functional.interpolate(o, size=(1024, 1024), mode="bilinear") for o in octaves]
    pixels = ((sum(large) / 2 + 0.5).clamp(0, 1) * 255).byte()[0].permute(1, 2, 0)
    pixels[900:] = 0
    return pixels.contiguous().numpy()


def normalised(pixels: Any) -> torch.Tensor:
    mean, std = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    return ((torch.from_numpy(pixels).float() / 255 - mean) / std).permute(2, 0, 1)[None]


def test_mobile_sams_encoder_is_ultralytics(sam_checkpoint: Callable[[str], Path], mobile: LoadedModel) -> None:
    reference: Any = official_layout("mobile_sam")
    reference.load_state_dict(torch.load(sam_checkpoint("mobile_sam"), weights_only=True))
    images = normalised(picture())
    expected = reference.eval().image_encoder(images)
    assert torch.equal(mobile.modules["encoder"](images), expected)
    assert float(expected.std()) > 0.5


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # sam2 1.1's own transforms
def test_sam2s_encoder_gives_what_the_official_predictor_keeps(tiny: LoadedModel, official_sam2: Any) -> None:
    from sam2.sam2_image_predictor import SAM2ImagePredictor

    predictor, pixels = SAM2ImagePredictor(official_sam2), picture()
    predictor.set_image(pixels)
    embeddings, finest, finer = tiny.modules["encoder"](normalised(pixels))
    kept = predictor._features
    torch.testing.assert_close(embeddings, kept["image_embed"], atol=1e-4, rtol=0)
    torch.testing.assert_close(finest, kept["high_res_feats"][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(finer, kept["high_res_feats"][1], atol=1e-4, rtol=0)


def test_vit_bs_encoder_is_the_official_one(sam_checkpoint: Callable[[str], Path]) -> None:
    """All weights, and the answer of the first windowed and the first global block with the neck behind them: the
    others are of the same two kinds, and a whole pass takes 20 s."""
    from segment_anything import sam_model_registry

    path = sam_checkpoint("sam_vit_b")
    official: Any = sam_model_registry["vit_b"](path).eval().image_encoder
    ours: Any = load(path).modules["encoder"].get_submodule("image_encoder")
    assert type(ours) is type(official)
    expected = official.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.state_dict().items())
    images = normalised(picture())
    for encoder in (ours, official):
        encoder.blocks = torch.nn.ModuleList([encoder.blocks[0], encoder.blocks[2]])
    assert torch.equal(ours(images), official(images))


# ---- decoders ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompts:
    """As a caller has them, in pixels of the network's input; P prompts of n points, each with a box or without."""

    points: Any = None  # (P, n, 2)
    labels: Any = None  # (P, n) 1 and 0
    boxes: Any = None  # (P, 4) xyxy
    masks: Any = None  # (P, 1, 256, 256) logits

    def tensors(self, box_first: bool, pad_with_box: bool) -> tuple[torch.Tensor, ...]:
        """The decoder's inputs, by `PromptSpec`'s rules."""
        count = len(self.points if self.boxes is None else self.boxes)
        corners = torch.empty(count, 0, 2) if self.boxes is None else self.boxes.reshape(count, 2, 2)
        kinds = torch.tensor([[2.0, 3.0]]).expand(count, 2)[:, : corners.shape[1]]
        points = torch.empty(count, 0, 2) if self.points is None else self.points
        labels = torch.empty(count, 0) if self.labels is None else self.labels
        pads = 1 if pad_with_box or self.boxes is None else 0
        pad, pad_label = torch.zeros(count, pads, 2), torch.full((count, pads), -1.0)
        if box_first:
            points, labels = torch.cat((corners, points, pad), 1), torch.cat((kinds, labels, pad_label), 1)
        else:
            points, labels = torch.cat((points, pad, corners), 1), torch.cat((labels, pad_label, kinds), 1)
        masks = torch.zeros(count, 1, 256, 256) if self.masks is None else self.masks
        return points, labels, masks, torch.full((count,), 0.0 if self.masks is None else 1.0)


def pixels_at(*xy: float) -> torch.Tensor:
    return torch.tensor(xy).reshape(1, -1, 2)


BOXES = torch.tensor([[10.0, 20.0, 300.0, 400.0], [512.0, 0.0, 1023.5, 1023.5], [7.25, 900.0, 8.0, 901.0]])
CASES = {
    "a point": Prompts(pixels_at(320, 240), torch.ones(1, 1)),
    "a negative point": Prompts(pixels_at(320, 240), torch.zeros(1, 1)),
    "both kinds, and the corners": Prompts(pixels_at(0, 0, 1023, 1023, 500.5, 100.25), torch.tensor([[1.0, 0.0, 1.0]])),
    "a box": Prompts(boxes=BOXES[:1]),
    "a box and points": Prompts(pixels_at(100, 50, 310, 390), torch.tensor([[0.0, 1.0]]), BOXES[:1]),
    "a mask": Prompts(
        pixels_at(320, 240), torch.ones(1, 1), masks=torch.linspace(-20, 20, 65536).reshape(1, 1, 256, 256)
    ),
    "a box and a mask": Prompts(boxes=BOXES[:1], masks=torch.full((1, 1, 256, 256), -3.0)),
    "three boxes": Prompts(boxes=BOXES),
    "three boxes with a point each": Prompts(
        torch.tensor([[[5.0, 6.0]], [[7.0, 8.0]], [[9.0, 9.0]]]), torch.ones(3, 1), BOXES
    ),
}


def features(model: LoadedModel, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(o.shape, generator=generator) for o in model.spec.graphs[0].outputs]


def decoded(model: LoadedModel, image: list[torch.Tensor], prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    rules = model.spec.prompts
    assert rules is not None
    masks, scores = model.modules["decoder"](*image, *prompts.tensors(rules.box_first, rules.pad_with_box))
    return masks, scores


def sam_answer(network: Any, image: list[torch.Tensor], prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """As `SamPredictor.predict_torch` does it, before it chooses."""
    points = None if prompts.points is None else (prompts.points, prompts.labels)
    sparse, dense = network.prompt_encoder(points=points, boxes=prompts.boxes, masks=prompts.masks)
    masks, scores = network.mask_decoder.predict_masks(
        image_embeddings=image[0],
        image_pe=network.prompt_encoder.get_dense_pe(),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
    )
    return masks, scores


def sam2_answer(network: Any, image: list[torch.Tensor], prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """As `SAM2ImagePredictor._predict` does it, before it chooses: a box is two points that come first."""
    points, labels = prompts.points, prompts.labels
    if prompts.boxes is not None:
        count = len(prompts.boxes)
        corners, kinds = prompts.boxes.reshape(count, 2, 2), torch.tensor([[2, 3]]).repeat(count, 1)
        points = corners if points is None else torch.cat((corners, points), 1)
        labels = kinds if labels is None else torch.cat((kinds, labels), 1)
    sparse, dense = network.sam_prompt_encoder(points=(points, labels), boxes=None, masks=prompts.masks)
    masks, scores, _tokens, _object = network.sam_mask_decoder.predict_masks(
        image_embeddings=image[0],
        image_pe=network.sam_prompt_encoder.get_dense_pe(),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        repeat_image=len(points) > 1,
        high_res_features=image[1:],
    )
    return masks, scores


def assert_same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(got[0], expected[0], atol=MASK_TOLERANCE, rtol=0)
    torch.testing.assert_close(got[1], expected[1], atol=SCORE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_sams_decoder_is_the_official_one(mobile: LoadedModel, official_sam: Any, case: str) -> None:
    image, prompts = features(mobile), CASES[case]
    assert_same(decoded(mobile, image, prompts), sam_answer(official_sam, image, prompts))


@pytest.mark.parametrize("case", CASES)
def test_sam2s_decoder_is_the_official_one(tiny: LoadedModel, official_sam2: Any, case: str) -> None:
    image, prompts = features(tiny), CASES[case]
    assert_same(decoded(tiny, image, prompts), sam2_answer(official_sam2, image, prompts))


@st.composite
def any_prompts(draw: st.DrawFn) -> Prompts:
    """One or two prompts of up to four points, with a box or without; not nothing."""
    count, points, boxed = draw(st.integers(1, 2)), draw(st.integers(0, 4)), draw(st.booleans())
    side = st.floats(0, 1024, width=32)

    def numbers(*shape: int, of: st.SearchStrategy[float]) -> torch.Tensor:
        size = int(np.prod(shape))
        return torch.tensor(draw(st.lists(of, min_size=size, max_size=size)), dtype=torch.float32).reshape(shape)

    if not points and not boxed:
        points = 1
    return Prompts(
        points=numbers(count, points, 2, of=side) if points else None,
        labels=numbers(count, points, of=st.sampled_from((0.0, 1.0))) if points else None,
        boxes=numbers(count, 4, of=side) if boxed else None,  # degenerate and turned-round ones too
    )


@settings(max_examples=6, deadline=None)
@given(prompts=any_prompts())
def test_any_prompts_agree_with_sam(mobile: LoadedModel, official_sam: Any, prompts: Prompts) -> None:
    image = features(mobile)
    with torch.no_grad():
        assert_same(decoded(mobile, image, prompts), sam_answer(official_sam, image, prompts))


@settings(max_examples=6, deadline=None)
@given(prompts=any_prompts())
def test_any_prompts_agree_with_sam2(tiny: LoadedModel, official_sam2: Any, prompts: Prompts) -> None:
    image = features(tiny)
    with torch.no_grad():
        assert_same(decoded(tiny, image, prompts), sam2_answer(official_sam2, image, prompts))


def test_the_padding_and_the_order_matter(mobile: LoadedModel) -> None:
    """If they did not, the cases above would prove nothing about them."""
    image, prompts = features(mobile), CASES["a box and points"]
    decoder = mobile.modules["decoder"]
    official, _ = decoder(*image, *prompts.tensors(box_first=False, pad_with_box=False))
    padded, _ = decoder(*image, *prompts.tensors(box_first=False, pad_with_box=True))
    assert float((official - padded).abs().max()) > 100 * MASK_TOLERANCE
