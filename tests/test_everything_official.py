"""Everything mode against the publishers' own automatic generators, on the same modules in PyTorch.

The generators, predictors and transforms are theirs, whole. The networks are small: a convolution in place of the
image encoder, and either SAM's own decoder with seeded weights, or a decoder that draws discs around the points, so
that masks overlap, touch edges, have holes and fall apart as real ones do. Their input is 512 × 512, for the time
that the official generators take to enlarge masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from visionfast.everything import everything
from visionfast.postprocess.decoded import HostDecoded
from visionfast.postprocess.masks import InstanceMasks, mask_iou
from visionfast.results import Masks
from visionfast.types import ModelSpec, PreprocessSpec, PromptSpec, PromptTensors

torch = pytest.importorskip("torch", reason="the official generators run in PyTorch: pip install 'visionfast[build]'")
segment_anything = pytest.importorskip("segment_anything", reason="pip install segment-anything")

_SIZE = 512  # of the networks' input, pixels
_MEAN_STD: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_SAM = ModelSpec(
    "discs",
    "sam",
    "discs",
    "prompt-segment",
    (),
    PreprocessSpec((_SIZE, _SIZE), "longest-side", "bilinear-antialias", None, **_MEAN_STD),
    (),
    (),
    prompts=PromptSpec(box_first=False, pad_with_box=False),
)
_SAM2 = ModelSpec(
    "discs2",
    "sam",
    "discs2",
    "prompt-segment",
    (),
    PreprocessSpec((_SIZE, _SIZE), "stretch", "bilinear-antialias", None, **_MEAN_STD),
    (),
    (),
    prompts=PromptSpec(True, True, stability=(0.05, 0.98), logit_limit=32.0, score_threshold=0.8),
)


# ---- small networks -------------------------------------------------------------------------------------------


class _Patches(torch.nn.Module):  # type: ignore[name-defined,misc]
    """An image encoder: one seeded convolution, (1, 3, 512, 512) → (1, 256, 64, 64)."""

    img_size = _SIZE

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(3, 256, _SIZE // 64, _SIZE // 64)

    def forward(self, images: Any) -> Any:
        return self.convolution(images)


class _Points(torch.nn.Module):  # type: ignore[name-defined,misc]
    """A prompt encoder that hands on the first point as it is."""

    def forward(self, points: Any, boxes: Any = None, masks: Any = None) -> tuple[Any, Any]:
        return points[0][:, 0].float(), None

    def get_dense_pe(self) -> None:
        return None


class _Discs(torch.nn.Module):  # type: ignore[name-defined,misc]
    """A mask decoder: four discs a point, with the image's texture, around the nearest of 8 × 8 places."""

    def predict_masks(self, image_embeddings: Any, image_pe: Any, sparse_prompt_embeddings: Any, **_: Any) -> Any:
        """(P, 2) points in pixels of the input → (P, 4, 256, 256) logits, (P, 4) scores."""
        texture = torch.nn.functional.interpolate(image_embeddings[:, :8], size=256, mode="bicubic")[0]  # (8, 256, 256)
        point = sparse_prompt_embeddings * 256 / _SIZE
        centre = torch.floor(point / 32) * 32 + 16
        axis = torch.arange(256) + 0.5
        away = ((axis[None, :, None] - centre[:, 1, None, None]) ** 2 + (axis - centre[:, 0, None, None]) ** 2) ** 0.5
        radius = torch.tensor([30.0, 9.0, 17.0, 55.0]) + (point - centre).abs().sum(1, keepdim=True) / 32  # (P, 4)
        logits = (radius[..., None, None] - away[:, None]) * 4 + 48 * texture[:4]
        x, y = point.long().clamp(0, 255).unbind(1)
        scores = torch.sigmoid(2 + 2 * texture[4:, y, x].T - (point - centre).abs().sum(1, keepdim=True) / 20)
        return logits, scores

    def forward(self, multimask_output: bool, **inputs: Any) -> tuple[Any, Any]:
        assert multimask_output
        logits, scores = self.predict_masks(**inputs)
        return logits[:, 1:], scores[:, 1:]


def _sam(decoder: str) -> Any:
    """SAM's own class around these networks."""
    modeling = segment_anything.modeling
    if decoder == "discs":
        return modeling.Sam(_Patches(), _Points(), _Discs()).eval()
    from seeded_sam import seed_weights

    prompt_encoder = modeling.PromptEncoder(256, (64, 64), (_SIZE, _SIZE), 16)
    transformer = modeling.TwoWayTransformer(depth=2, embedding_dim=256, mlp_dim=256, num_heads=8)
    mask_decoder = modeling.MaskDecoder(transformer_dim=256, transformer=transformer)
    network = modeling.Sam(_Patches(), prompt_encoder, mask_decoder).eval()
    seed_weights(network, 0)
    return network


def _sam2() -> Any:
    """What `SAM2ImagePredictor` asks of a SAM 2 model, around the same networks."""
    patches, discs, points = _Patches(), _Discs(), _Points()

    def features(embeddings: Any) -> tuple[None, list[Any], None, None]:
        tokens = embeddings.flatten(2).permute(2, 0, 1)  # (4096, 1, 256)
        return None, [torch.zeros(65536, 1, 32), torch.zeros(16384, 1, 64), tokens], None, None

    def decode(multimask_output: bool, repeat_image: bool, high_res_features: Any, **inputs: Any) -> Any:
        return *discs(multimask_output, **inputs), None, None

    return SimpleNamespace(
        image_size=_SIZE,
        device=torch.device("cpu"),
        forward_image=patches,
        _prepare_backbone_features=features,
        directly_add_no_mem_embed=False,
        sam_prompt_encoder=points,
        sam_mask_decoder=decode,
        discs=discs,
    )


# ---- sessions on them -----------------------------------------------------------------------------------------


class _Session:
    """The official modules behind `PromptSession`, and the publishers' own preprocessing in front."""

    points = 32

    def __init__(self, model: Any, spec: ModelSpec, prompts: int) -> None:
        self.prompts = prompts
        self.encoded: list[tuple[int, ...]] = []
        self.most = 0
        self._model, self._spec = model, spec

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def encode(self, pixels: npt.NDArray[np.uint8], stage_ns: dict[str, int] | None = None) -> dict[str, Any]:
        self.encoded.append(pixels.shape)
        if self._spec is _SAM2:
            from sam2.utils.transforms import SAM2Transforms

            return {"image_embeddings": self._model.forward_image(SAM2Transforms(_SIZE, 0.0)(pixels)[None])}
        resized = segment_anything.utils.transforms.ResizeLongestSide(_SIZE).apply_image(pixels)
        image = self._model.preprocess(torch.from_numpy(resized).permute(2, 0, 1)[None])
        return {"image_embeddings": self._model.image_encoder(image)}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def decode(self, features: Any, prompts: PromptTensors) -> HostDecoded:
        self.most = max(self.most, len(prompts))
        if self._spec is _SAM2:
            encoder, decoder = self._model.sam_prompt_encoder, self._model.discs
        else:
            encoder, decoder = self._model.prompt_encoder, self._model.mask_decoder
        points, labels = torch.from_numpy(prompts.points), torch.from_numpy(prompts.labels)
        if not isinstance(encoder, _Points):  # which pads by itself
            points, labels = points[:, :1], labels[:, :1]
        sparse, dense = encoder(points=(points, labels), boxes=None, masks=None)
        masks, scores = decoder.predict_masks(
            image_embeddings=features["image_embeddings"],
            image_pe=encoder.get_dense_pe(),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
        )
        return HostDecoded(masks.numpy(), scores.numpy(), self._spec.preprocess.resize)

    def close(self) -> None:
        pass


# ---- the comparison -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def picture() -> npt.NDArray[np.uint8]:
    """(300, 420, 3): smooth noise."""
    noise = np.random.default_rng(3).normal(size=(300, 420, 3))
    smooth = cv2.GaussianBlur(noise, (0, 0), 6)
    pixels: npt.NDArray[np.uint8] = np.clip(127 + smooth * 40 / smooth.std(), 0, 255).astype(np.uint8)
    return pixels


def _assert_same(ours: Masks, official: list[dict[str, Any]]) -> None:
    assert len(ours) == len(official)
    if not official:
        return
    theirs = InstanceMasks.from_dense(np.stack([record["segmentation"] for record in official]))
    iou = mask_iou(ours.mask, theirs).diagonal()
    iou = np.where((ours.mask.area() == 0) & (theirs.area() == 0), 1, iou)
    assert iou.min() >= 0.999, f"mask {iou.argmin()}"
    assert ours.stability is not None
    assert ours.points is not None
    for name, mine, tolerance in (
        ("predicted_iou", ours.score, 1e-6),
        ("stability_score", ours.stability, 1e-3),
        ("point_coords", ours.points[:, None], 1e-3),
        ("area", ours.mask.area(), 2),
    ):
        np.testing.assert_allclose(mine, [record[name] for record in official], 0, tolerance, err_msg=name)


_NAMES = {
    "points_per_side": "points_per_side",
    "score_threshold": "pred_iou_thresh",
    "stability_threshold": "stability_score_thresh",
    "stability_offset": "stability_score_offset",
    "nms_threshold": "box_nms_thresh",
    "crop_layers": "crop_n_layers",
    "crop_nms_threshold": "crop_nms_thresh",
    "crop_overlap": "crop_overlap_ratio",
    "crop_points_scale": "crop_n_points_downscale_factor",
    "min_area": "min_mask_region_area",
}
"""An option here → there."""


def _official(generator: Any, model: Any, pixels: npt.NDArray[np.uint8], **options: Any) -> list[dict[str, Any]]:
    named = {_NAMES[name]: value for name, value in options.items()}
    records: list[dict[str, Any]] = generator(model, points_per_batch=16, **named).generate(pixels)
    return records


_DISCS: dict[str, dict[str, Any]] = {
    "nothing filtered": {"score_threshold": 0.0, "stability_threshold": 0.0},
    "by score": {"score_threshold": 0.85, "stability_threshold": 0.0},
    "by stability": {"score_threshold": 0.0, "stability_threshold": 0.93},
    "nothing left": {"score_threshold": 1.0, "stability_threshold": 0.0},
    "more suppressed": {"score_threshold": 0.7, "stability_threshold": 0.9, "nms_threshold": 0.2},
    "crops": {"score_threshold": 0.7, "stability_threshold": 0.9, "crop_layers": 1, "crop_points_scale": 2},
    "crops, unlike": {
        "score_threshold": 0.7,
        "stability_threshold": 0.0,
        "crop_layers": 1,
        "crop_overlap": 0.1,
        "crop_nms_threshold": 0.3,
        "points_per_side": 5,
    },
    "regions": {"score_threshold": 0.6, "stability_threshold": 0.9, "min_area": 100},
    "regions in crops": {
        "score_threshold": 0.7,
        "stability_threshold": 0.9,
        "crop_layers": 1,
        "crop_points_scale": 2,
        "min_area": 300,
    },
}


@pytest.mark.parametrize("options", _DISCS.values(), ids=_DISCS)
def test_discs_are_those_of_sams_generator(picture: npt.NDArray[np.uint8], options: dict[str, Any]) -> None:
    options = {"points_per_side": 8} | options
    model = _sam("discs")
    official = _official(segment_anything.SamAutomaticMaskGenerator, model, picture, **options)
    session = _Session(model, _SAM, prompts=3)
    ours = everything(picture, session, _SAM, **options)
    _assert_same(ours, official)
    assert session.most == 3
    assert len(session.encoded) == (5 if "crop_layers" in options else 1)


def test_the_options_above_keep_some_and_drop_some(picture: npt.NDArray[np.uint8]) -> None:
    session = _Session(_sam("discs"), _SAM, prompts=8)
    features = session.encode(picture)

    def count(**options: Any) -> int:
        return len(everything(picture, session, _SAM, features=features, **{"points_per_side": 8} | options))

    every = count(score_threshold=0, stability_threshold=0, nms_threshold=1)
    assert every == 3 * 64
    unfiltered = count(**_DISCS["nothing filtered"])
    scored, stable, fewer = (count(**_DISCS[name]) for name in ("by score", "by stability", "more suppressed"))
    assert 0 < fewer < max(scored, stable) < unfiltered < every
    assert scored > 0
    assert stable > 0
    assert count(**_DISCS["nothing left"]) == 0


def test_the_defaults_are_the_official_ones(picture: npt.NDArray[np.uint8]) -> None:
    model = _sam("discs")
    official = segment_anything.SamAutomaticMaskGenerator(model, points_per_side=6, points_per_batch=12)
    ours = everything(picture, _Session(model, _SAM, prompts=1), _SAM, points_per_side=6)
    _assert_same(ours, official.generate(picture))
    assert len(ours) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"points_per_side": 4, "score_threshold": 0.7, "stability_threshold": 0.75, "nms_threshold": 1.0},
        # Empty masks, masks of a pixel, and stabilities of 0 / 0 among them.
        {"points_per_side": 3, "score_threshold": 0.0, "stability_threshold": 0.0, "nms_threshold": 1.0},
    ],
    ids=["usual", "nothing filtered"],
)
def test_sams_own_decoder_gives_what_its_generator_gives(
    picture: npt.NDArray[np.uint8], options: dict[str, Any]
) -> None:
    model = _sam("seeded")
    official = _official(segment_anything.SamAutomaticMaskGenerator, model, picture, **options)
    ours = everything(picture, _Session(model, _SAM, prompts=4), _SAM, **options)
    _assert_same(ours, official)
    assert len(ours) > 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # sam2's own transforms
@pytest.mark.parametrize("crop_layers", [0, 1])
def test_sam_2s_generator_agrees_too(picture: npt.NDArray[np.uint8], crop_layers: int) -> None:
    amg = pytest.importorskip("sam2.automatic_mask_generator", reason="`make setup` installs sam2, for tests")
    model = _sam2()
    official = amg.SAM2AutomaticMaskGenerator(
        model, points_per_side=8, points_per_batch=16, crop_n_layers=crop_layers, crop_n_points_downscale_factor=2
    )
    session = _Session(model, _SAM2, prompts=5)
    ours = everything(picture, session, _SAM2, points_per_side=8, crop_layers=crop_layers, crop_points_scale=2)
    _assert_same(ours, official.generate(picture))
    assert len(ours) > 5
