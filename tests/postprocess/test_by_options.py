"""Every slot's own options on the device: what `postprocess` gives with them, whatever the neighbours ask for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch")

import torch
from recording import RecordingDevice, RecordingEngine

from visionfast.postprocess.by_options import PostprocessByOptions
from visionfast.postprocess.detections import postprocess
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.results import Detections
from visionfast.sessions.cuda import CudaSession
from visionfast.types import GraphSpec, Letterbox, ModelSpec, PreprocessSpec, TensorSpec

SIZE = (64, 96)
BATCH, CLASSES, COEFFICIENTS, ANCHORS = 3, 3, 8, 126
USUAL: dict[str, Any] = {
    "num_classes": CLASSES,
    "conf": 0.5,
    "iou": 0.5,
    "max_det": 12,
    "classes": None,
    "class_agnostic": False,
}


def spec_of(task: Any) -> ModelSpec:
    coefficients = COEFFICIENTS if task == "segment" else 0
    outputs = [TensorSpec("predictions", (BATCH, 4 + CLASSES + coefficients, ANCHORS), "float32")]
    if coefficients:
        outputs.append(TensorSpec("prototypes", (BATCH, coefficients, 16, 24), "float16"))
    image = TensorSpec("images", (BATCH, 3, *SIZE), "float32", "NCHW")
    graph = GraphSpec("model", (image,), tuple(outputs))
    return ModelSpec("m", "yolov8", "yolov8n", task, (graph,), PreprocessSpec(SIZE), ("a", "b", "c"), (8, 16, 32))


def network(spec: ModelSpec, seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    outputs = {}
    for tensor in spec.graphs[0].outputs:
        made = rng.random(tensor.shape, np.float32)
        if tensor.name == "predictions":
            made[:, 0] *= SIZE[1]
            made[:, 1] *= SIZE[0]
            made[:, 2:4] = made[:, 2:4] * 40 + 2
            made[:, 4 + CLASSES :] -= 0.5
            made[:, 4:, ANCHORS // 2 :] = made[:, 4:, : ANCHORS // 2]  # ties
        else:
            made -= 0.5
        outputs[tensor.name] = torch.from_numpy(made.astype(tensor.dtype))
    return outputs


@functools.cache
def kernels(task: str) -> PostprocessByOptions:
    spec = spec_of(task)
    return PostprocessByOptions(spec, spec.graphs[0].outputs, RecordingDevice(), options=USUAL)


def assert_same(got: Detections, expected: Detections) -> None:
    for name in ("xyxy", "confidence", "class_id"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    assert (got.mask and got.mask.counts) == (expected.mask and expected.mask.counts)
    assert got.image_hw == expected.image_hw


def defined(tensors: Any, slot: int, letterbox: Letterbox, options: dict[str, Any]) -> Detections:
    prototypes = tensors.get("prototypes")
    return postprocess(
        tensors["predictions"][slot].numpy(),
        letterbox,
        prototypes=None if prototypes is None else prototypes[slot].numpy(),
        **options,
    )


OPTIONS = st.fixed_dictionaries(
    {
        "num_classes": st.just(CLASSES),
        "conf": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "iou": st.sampled_from([0.0, 0.5, 1.0]),
        "max_det": st.sampled_from([1, 2, 11, 12, 13, 40, 126, 127, 10_000, 2**31]),
        "classes": st.sampled_from([None, [0], [2, 1], [1, 1]]),
        "class_agnostic": st.booleans(),
    }
)


SIZES = st.sampled_from([None, (64, 96), (1, 1), (200, 30), (30, 200)])


def check(task: str, seed: int, options: list[dict[str, Any]], sizes: Sequence[tuple[int, int] | None]) -> None:
    tensors = network(spec_of(task), seed)
    letterboxes = [None if size is None else letterbox_geometry(size, SIZE) for size in sizes]
    found = kernels(task).objects(tensors, letterboxes, options)
    assert set(found) == {slot for slot, size in enumerate(sizes) if size}
    for slot, detections in found.items():
        letterbox = letterboxes[slot]
        assert letterbox is not None
        assert_same(detections, defined(tensors, slot, letterbox, options[slot]))


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    seed=st.integers(0, 99),
    options=st.lists(OPTIONS, min_size=BATCH, max_size=BATCH),
    sizes=st.lists(SIZES, min_size=BATCH, max_size=BATCH),
)
@example(seed=1, options=[USUAL] * 3, sizes=[None] * 3)
@example(seed=1, options=[{**USUAL, "max_det": 2**31}] * 3, sizes=[(64, 96)] * 3)
def test_every_slot_is_answered_by_its_own_options(
    seed: int, options: list[dict[str, Any]], sizes: list[tuple[int, int] | None]
) -> None:
    check("detect", seed, options, sizes)


@pytest.mark.parametrize("max_det", [5, 16])
def test_masks_are_those_of_the_objects_that_are_given(max_det: int) -> None:
    """Their kernels are slow in the interpreter: a few cases."""
    asked = {**USUAL, "max_det": max_det, "conf": 0.6, "iou": 1.0}
    check("segment", max_det, [asked, USUAL, asked], [(64, 96), (30, 200), (70, 50)])


def test_fewer_slots_than_the_batch_has() -> None:
    tensors = network(spec_of("detect"), 5)
    letterbox = letterbox_geometry((50, 50), SIZE)
    found = kernels("detect").objects(tensors, [letterbox], [USUAL])
    assert_same(found[0], defined(tensors, 0, letterbox, USUAL))


def test_kernels_are_kept_and_compiled_for_few_counts_of_objects() -> None:
    spec = spec_of("detect")
    made = PostprocessByOptions(spec, spec.graphs[0].outputs, RecordingDevice(), options=USUAL)
    tensors, letterbox = network(spec, 6), letterbox_geometry((50, 50), SIZE)
    device = made._device
    assert isinstance(device, RecordingDevice)

    def allocated(**options: Any) -> int:
        before = device.allocated
        asked = {**USUAL, **options}
        assert_same(made.objects(tensors, [letterbox], [asked])[0], defined(tensors, 0, letterbox, asked))
        return device.allocated - before

    assert allocated() == allocated(max_det=1) == allocated(max_det=7) == 0
    assert allocated(conf=0.6) > 0
    assert allocated(conf=0.6, max_det=3) == 0
    assert allocated(max_det=13) > 0
    assert allocated(max_det=16) == allocated(max_det=14) == 0
    for conf in (0.1, 0.2, 0.3, 0.4):
        assert allocated(conf=conf) > 0
    assert len(made._ready) == 4


def test_a_session_answers_its_last_batch_again() -> None:
    spec = spec_of("detect")
    tensors = network(spec, 7)
    engine = RecordingEngine(spec.graphs[0], RecordingDevice(), lambda feeds: tensors)
    images = [np.zeros((40, 60, 3), np.uint8), b"no image", np.zeros((90, 20, 3), np.uint8)]
    session = CudaSession(spec, engine, options=USUAL, limits=DecodeLimits())
    try:
        first = session.answer(images, first=0, raises=False)
        other = {**USUAL, "conf": 0.9, "max_det": 11}
        again = session.objects_by({0: other, 1: other})
        assert set(again) == {0}  # the second is no image, the third was not asked for
        assert_same(again[0], defined(tensors, 0, letterbox_geometry((40, 60), SIZE), other))
        assert len(again[0]) != len(first[0])  # type: ignore[arg-type]
        assert session.objects_by({}) == {}
        assert_same(session.answer(images[:1], first=0, raises=True)[0], first[0])  # type: ignore[arg-type]
        assert set(session.objects_by({0: other, 2: other})) == {0}
    finally:
        session.close()
