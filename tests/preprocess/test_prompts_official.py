"""Clicks and boxes against the official predictors: their prompt encoders' answers, to the bit."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from visionfast.preprocess.antialias import geometry
from visionfast.preprocess.prompts import prompt_tensors
from visionfast.types import PreprocessSpec, PromptSpec

SAM = PromptSpec(box_first=False, pad_with_box=False)
SAM2 = PromptSpec(box_first=True, pad_with_box=True)
HW = (480, 640)
POINTS = [(320, 240, 1), (100, 50, 0)]
BOX = (10, 20, 300, 400)


def tensors(points=None, boxes=None, *, spec=SAM, image_hw=HW):
    resize = "stretch" if spec.box_first else "longest-side"
    placed = geometry(image_hw, PreprocessSpec((1024, 1024), resize, "bilinear-antialias", None))
    return prompt_tensors(points, boxes, placed=placed, spec=spec, most_points=32)


class _SeenError(Exception):
    """The prompt encoder has answered: the rest of the predictor has no part in this."""


def sparse_of(encoder, predict):
    """What a predictor makes its prompt encoder answer: the prompts' embeddings, (P, N, C)."""

    def stop(_module, _inputs, outputs):
        raise _SeenError(outputs[0])

    handle = encoder.register_forward_hook(stop)
    try:
        predict()
    except _SeenError as seen:
        return seen.args[0].numpy()
    finally:
        handle.remove()
    raise AssertionError("the predictor did not ask its prompt encoder")


def embedded(encoder, made):
    """Our points and labels, in the encoder's own embeddings: (P, N, C). An order, a label, a pad or a bit of a
    coordinate that differs gives another one."""
    import torch

    with torch.no_grad():
        positions = encoder.pe_layer.forward_with_coords(torch.from_numpy(made.points) + 0.5, encoder.input_image_size)
        kinds = torch.stack(
            [encoder.not_a_point_embed.weight[0], *(kind.weight[0] for kind in encoder.point_embeddings)]
        )
        labels = torch.from_numpy(made.labels).long()
        return (torch.where(labels[..., None] < 0, 0.0, positions) + kinds[labels + 1]).numpy()


@pytest.fixture(scope="module")
def sam():
    torch = pytest.importorskip("torch")
    pytest.importorskip("segment_anything")
    from segment_anything import SamPredictor
    from segment_anything.modeling import ImageEncoderViT, PromptEncoder, Sam

    torch.manual_seed(0)
    image_encoder = ImageEncoderViT(img_size=1024, embed_dim=8, depth=1, num_heads=1)
    prompt_encoder = PromptEncoder(256, (64, 64), (1024, 1024), 16)
    predictor = SamPredictor(Sam(image_encoder, prompt_encoder, torch.nn.Identity()))
    predictor.is_image_set = True  # its features are not looked at before the prompts are embedded

    def sparse(image_hw, predict):
        predictor.original_size = image_hw
        return sparse_of(prompt_encoder, lambda: predict(predictor))

    return SimpleNamespace(encoder=prompt_encoder, sparse=sparse, transform=predictor.transform)


@pytest.fixture(scope="module")
def sam2():
    torch = pytest.importorskip("torch")
    pytest.importorskip("sam2")
    from sam2.modeling.sam.prompt_encoder import PromptEncoder
    from sam2.sam2_image_predictor import SAM2ImagePredictor

    torch.manual_seed(0)
    encoder = PromptEncoder(256, (64, 64), (1024, 1024), 16)
    # The predictor asks the whole model for these three; its image encoder has no part in prompts.
    model = SimpleNamespace(image_size=1024, sam_prompt_encoder=encoder, device=torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)  # in its transforms
        predictor = SAM2ImagePredictor(model)
    predictor._is_image_set = True

    def sparse(image_hw, predict):
        predictor._orig_hw = [image_hw]
        return sparse_of(encoder, lambda: predict(predictor))

    return SimpleNamespace(encoder=encoder, sparse=sparse, predictor=predictor)


SIDES = st.one_of(st.integers(1, 5), st.integers(1, 5000))


@st.composite
def prompts(draw, width=64):
    """An image's size, and points, a box or both on it."""
    h, w = draw(SIDES), draw(SIDES)

    def coordinate(below):
        # No float32 so small that a quotient of it loses bits.
        return draw(
            st.one_of(
                st.integers(0, below - 1),
                st.floats(0.0009765625, below, exclude_max=True, width=width),
            )
        )

    points, box = None, None
    which = draw(st.sampled_from(["points", "box", "both"]))
    if which != "box":
        points = [(coordinate(w), coordinate(h), draw(st.integers(0, 1))) for _ in range(draw(st.integers(1, 5)))]
    if which != "points":
        x, y = sorted([coordinate(w), coordinate(w)]), sorted([coordinate(h), coordinate(h)])
        assume(x[0] < x[1] and y[0] < y[1])
        box = (x[0], y[0], x[1], y[1])
    return (h, w), points, box


def asked(points, box):
    """For an official predictor's `predict`."""
    array = None if points is None else np.array(points, np.float64)
    return {
        "point_coords": None if array is None else array[:, :2],
        "point_labels": None if array is None else array[:, 2].astype(int),
        "box": None if box is None else np.array(box, np.float64),
    }


@settings(max_examples=100, deadline=None)
@given(prompt=prompts())
@example(prompt=((480, 640), POINTS, BOX))
@example(prompt=((1, 1), [(0, 0, 0)], None))
@example(prompt=((2, 4096), [(4095, 1, 1)], (0, 0, 4096, 2)))
def test_sams_predictor_embeds_the_same(sam, prompt):
    image_hw, points, box = prompt
    assume(min(sam.transform.get_preprocess_shape(*image_hw, 1024)) > 0)  # theirs has no image then
    made = tensors(points, box, image_hw=image_hw)
    theirs = sam.sparse(image_hw, lambda predictor: predictor.predict(**asked(points, box)))
    np.testing.assert_array_equal(embedded(sam.encoder, made), theirs)


@settings(max_examples=100, deadline=None)
@given(prompt=prompts(width=32))
@example(prompt=((480, 640), POINTS, BOX))
@example(prompt=((1, 1), [(0, 0, 0)], None))
@example(prompt=((2, 4096), [(4095, 1, 1)], (0, 0, 4096, 2)))
def test_sam_2s_predictor_embeds_the_same(sam2, prompt):
    image_hw, points, box = prompt
    made = tensors(points, box, spec=SAM2, image_hw=image_hw)
    theirs = sam2.sparse(image_hw, lambda predictor: predictor.predict(**asked(points, box)))
    np.testing.assert_array_equal(embedded(sam2.encoder, made), theirs)


@settings(max_examples=100, deadline=None)
@given(prompt=prompts())
@example(prompt=((480, 640), [(0.1, 320.7, 1)], (0.1, 0.2, 0.3, 0.7)))
def test_sam_2s_predictor_rounds_coordinates_once_more(sam2, prompt):
    image_hw, points, box = prompt
    made = tensors(points, box, spec=SAM2, image_hw=image_hw)
    _, xy, _, corners = sam2.predictor._prep_prompts(**_renamed(asked(points, box), image_hw, sam2.predictor))
    parts = [part for part in (corners, xy) if part is not None]
    theirs = np.concatenate([part.reshape(1, -1, 2).numpy() for part in parts], axis=1)
    ours = made.points[:, :-1]  # the padding is the encoder's work
    assert (np.abs(ours.astype(np.float64) - theirs) <= np.spacing(np.maximum(ours, theirs))).all()


def _renamed(asked_, image_hw, predictor):
    predictor._orig_hw = [image_hw]
    return asked_ | {"mask_logits": None, "normalize_coords": True}


def test_a_batch_of_64_boxes(sam, sam2):
    torch = pytest.importorskip("torch")
    corners = np.sort(np.random.default_rng(0).integers(0, 480, (64, 2, 2)), axis=1)
    corners[:, 1] += 1  # none without area
    boxes = corners.reshape(64, 4)
    theirs = sam2.sparse(HW, lambda predictor: predictor.predict(box=boxes))
    np.testing.assert_array_equal(embedded(sam2.encoder, tensors(None, boxes, spec=SAM2)), theirs)

    placed = torch.from_numpy(sam.transform.apply_boxes(boxes, HW)).float()
    theirs = sam.sparse(HW, lambda predictor: predictor.predict_torch(None, None, boxes=placed))
    np.testing.assert_array_equal(embedded(sam.encoder, tensors(None, boxes)), theirs)
