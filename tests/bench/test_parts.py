"""The exchanged parts answer alike, and each baseline answers at all."""

from __future__ import annotations

import gc
import hashlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from visionfast import artifacts, machine
from visionfast.agreement import compare_detections
from visionfast.bench.agreements import agreement
from visionfast.bench.parts import (
    DenseMasks,
    EagerNetwork,
    OwnAfter,
    PillowBefore,
    Pipeline,
    TorchvisionAfter,
    as_results,
)
from visionfast.bench.records import Input, Samples, System
from visionfast.bench.report_tables import has_latencies
from visionfast.bench.steps import SeveralAtOnce, open_steps, per_image
from visionfast.bench.systems import Answer, NullSystem
from visionfast.errors import UnsupportedModelError
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.results import Detections
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, TensorSpec


def _spec(task: str, classes: int, planes: int = 0) -> ModelSpec:
    outputs = [TensorSpec("predictions", (1, 4 + classes + planes, 200), "float32")]
    if planes:
        outputs.append(TensorSpec("prototypes", (1, planes, 40, 40), "float32"))
    graph = GraphSpec("model", (TensorSpec("images", (1, 160, 160, 3), "uint8", "NHWC"),), tuple(outputs))
    names = tuple(f"kind {i}" for i in range(classes))
    return ModelSpec("small", "yolov8", "small", task, (graph,), PreprocessSpec((160, 160)), names, (8,))  # type: ignore[arg-type]


def _outputs(seed: int, classes: int, planes: int = 0, confident: bool = True) -> dict[str, Any]:
    """Random boxes within the input of 160 × 160, some of them above the threshold."""
    random = np.random.default_rng(seed)
    rows = np.empty((4 + classes + planes, 200), np.float32)
    rows[:2] = random.uniform(20, 140, (2, 200))
    rows[2:4] = random.uniform(5, 60, (2, 200))
    rows[4 : 4 + classes] = random.uniform(0, 0.5 if confident else 0.2, (classes, 200))
    rows[4 + classes :] = random.normal(0, 1, (planes, 200))
    outputs = {"predictions": rows[None]}
    if planes:
        outputs["prototypes"] = random.normal(0, 1, (1, planes, 40, 40)).astype(np.float32)
    return outputs


@pytest.mark.parametrize("image_hw", [(160, 160), (97, 211), (480, 37), (1, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_both_suppressions_find_the_same(image_hw: tuple[int, int], seed: int) -> None:
    pytest.importorskip("torchvision")
    spec, placed = _spec("detect", 3), letterbox_geometry(image_hw, (160, 160))
    outputs = _outputs(seed, 3)
    theirs, ours = (after(spec)(outputs, placed) for after in (TorchvisionAfter, OwnAfter))
    assert len(ours) == len(theirs) > 10
    np.testing.assert_array_equal(ours.confidence, theirs.confidence)
    np.testing.assert_array_equal(ours.class_id, theirs.class_id)
    # The one scales back by the gain, the other by the resized picture's whole pixels: half a pixel of the input.
    np.testing.assert_allclose(ours.xyxy, theirs.xyxy, atol=0.51 / placed.gain)
    assert theirs.image_hw == image_hw


def test_both_masks_are_alike() -> None:
    pytest.importorskip("torchvision")
    spec, placed = _spec("segment", 2, planes=8), letterbox_geometry((120, 200), (160, 160))
    outputs = _outputs(0, 2, planes=8)
    theirs, ours = (after(spec)(outputs, placed) for after in (TorchvisionAfter, OwnAfter))
    assert isinstance(theirs, DenseMasks)
    assert theirs.masks.shape == (len(theirs.detections), 120, 200)
    assert theirs.masks.dtype == np.bool_
    measures = compare_detections(ours, as_results(theirs), conf=0.25, slack=0.0)
    assert measures["objects"] > 5
    assert measures["min_iou"] > 0.999


@pytest.mark.parametrize("task", ["detect", "segment"])
def test_nothing_found_is_an_answer(task: str) -> None:
    pytest.importorskip("torchvision")
    planes = 8 if task == "segment" else 0
    spec, placed = _spec(task, 2, planes=planes), letterbox_geometry((50, 80), (160, 160))
    found = TorchvisionAfter(spec)(_outputs(0, 2, planes, confident=False), placed)
    if planes:
        assert found.masks.shape == (0, 50, 80)
    assert len(as_results(found)) == 0
    assert as_results(found).xyxy.shape == (0, 4)


# ---- words about agreement --------------------------------------------------------------------------------


def _found(xyxy: list[list[float]], confidence: list[float]) -> Detections:
    boxes = np.array(xyxy, np.float32).reshape(-1, 4)
    return Detections(boxes, np.array(confidence, np.float32), np.zeros(len(boxes), np.int64), (100, 100))


@pytest.mark.parametrize(
    ("expected", "found", "words"),
    [
        ([_found([], [])], [_found([], [])], "no objects in these images"),
        (
            [_found([[0, 0, 10, 10]], [0.9])],
            [_found([[0, 0, 10, 10]], [0.9])],
            "1 objects, 0 unmatched, least IoU 1.000",
        ),
        (
            [_found([[0, 0, 10, 10]], [0.9])],
            [_found([[0, 0, 10, 8]], [0.9])],
            "1 objects, 0 unmatched, least IoU 0.800",
        ),
        ([_found([[0, 0, 10, 10]], [0.9])], [_found([], [])], "1 objects, 1 unmatched"),
        ([_found([], [])], [_found([[0, 0, 10, 10]], [0.9])], "0 objects, 1 unmatched"),
        ([np.array([1.0, 0.0], np.float32)], [np.array([2.0, 0.0], np.float32)], "least cosine 1.000000"),
        ([np.eye(2)[0], np.eye(2)[0]], [np.eye(2)[0], np.eye(2)[1]], "least cosine 0.000000"),
        ([np.ones((1, 4, 4), bool)], [np.tri(4, 4, dtype=bool)[None]], "least mask IoU 0.625"),
    ],
)
def test_agreement_in_words(expected: list[Any], found: list[Any], words: str) -> None:
    assert agreement(expected, found) == words


# ---- several at once --------------------------------------------------------------------------------------


def test_an_image_among_several() -> None:
    class Counting(NullSystem):
        def __init__(self) -> None:
            super().__init__()
            self.asked = 0

        def call(self, encoded: bytes) -> Answer:
            self.asked += 1
            return Answer(None, {"engine": 30})

    counting = Counting()
    several = SeveralAtOnce(counting, 3)
    try:
        answer = several.call(b"")
    finally:
        several.close()
    assert counting.asked == several.images == 6
    assert answer.stage_ns == {"engine": 6 * 30 // 3}

    def column(*values: int) -> Any:
        return np.array(values, np.int64)

    samples = Samples(
        round=column(0, 1),
        input=column(0, 0),
        due_ns=column(0, 1000),
        begun_ns=column(10, 1000),
        done_ns=column(70, 1600),
        stage_ns={"engine": column(60, -1)},
        failed=np.zeros(2, np.bool_),
    )
    share = per_image(samples, 6)
    assert share.latency_ns.tolist() == [10, 100]
    assert share.stage_ns["engine"].tolist() == [10, -1]


# ---- the real ones, on a small seeded model ---------------------------------------------------------------


@pytest.fixture(scope="module")
def picture(photographs: list[Path]) -> Input:
    encoded = photographs[0].read_bytes()
    return Input(photographs[0].name, encoded, hashlib.sha256(encoded).hexdigest(), (1080, 810), "jpeg", len(encoded))


@pytest.fixture
def threads_kept() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_baseline_answers(
    seeded_checkpoint: Callable[..., Path],
    built_engine: Callable[..., Path],
    picture: Input,
    threads_kept: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from visionfast.bench.baselines import open_baselines

    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # whether or not it is here
    weights = seeded_checkpoint("detect", 3)
    with open_baselines(weights, built_engine(weights), inputs=[picture]) as (systems, absent):
        kinds = {system.system.key: system.system.kind for system in systems}
        assert [one.name for one in absent] == ["onnxruntime"]
        assert kinds.items() >= {"naive": "naive", "ultralytics": "peer", "ultralytics-openvino": "peer"}.items()
        for system in systems:
            assert system.system.details["agreement"] == "no objects in these images"
            answer = system.call(picture.encoded)
            assert as_results(answer.found).image_hw == picture.image_hw
            assert {"decode", "engine"} <= answer.stage_ns.keys()
            assert len(system.parallel(2)) == 2
    del systems, system
    collecting = threading.Thread(target=gc.collect)  # what is dropped by another thread takes no signal's stack along
    collecting.start()
    collecting.join()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_masks_have_baselines_too(
    seeded_checkpoint: Callable[..., Path], built_engine: Callable[..., Path], picture: Input, threads_kept: None
) -> None:
    from visionfast.bench.ultralytics_peer import ultralytics_module, ultralytics_pytorch

    weights = seeded_checkpoint("segment", 3)
    spec = artifacts.read_manifest(built_engine(weights)).spec
    network = EagerNetwork(ultralytics_module(weights), spec)
    naive = Pipeline(System("naive", "", "naive"), PillowBefore(spec), network, TorchvisionAfter(spec))
    for system in (naive, *ultralytics_pytorch(weights, spec.preprocess.size_hw)):
        answer = system.call(picture.encoded)
        assert answer.found.masks.shape == (0, *picture.image_hw)  # seeded weights find nothing
        assert as_results(answer.found).image_hw == picture.image_hw


def test_who_clicks_officially(sam_checkpoint: Callable[[str], Path], picture: Input, threads_kept: None) -> None:
    from visionfast.bench.sam_peer import OfficialPredictor

    official = OfficialPredictor(System("official", "", "naive"), sam_checkpoint("mobile_sam"), "mobile_sam")
    answer = official.call(picture.encoded)
    assert answer.found.shape == (1, *picture.image_hw)
    assert answer.found.dtype == np.bool_
    assert set(answer.stage_ns) == {"decode", "encoder", "decoder"}


def test_the_steps_end_at_visionfast(
    seeded_checkpoint: Callable[..., Path], built_engine: Callable[..., Path], picture: Input, threads_kept: None
) -> None:
    weights = seeded_checkpoint("detect", 3)
    with open_steps(weights, built_engine(weights), inputs=[picture]) as systems:
        names = [system.system.name for system in systems if "alone" not in system.system.details]
        assert names[:6] == [
            "naive PyTorch",
            "fixed shape",
            "compiled engine",
            "decode and preprocess",
            "post-processing",
            "session reuse",
        ]
        assert {s.system.name for s in systems if "alone" in s.system.details} == {
            "decode and preprocess",
            "post-processing",
        }
        assert len({system.system.key for system in systems}) == len(systems)
        for system in systems:
            assert {"decode", "preprocess", "engine", "postprocess"} <= system.call(picture.encoded).stage_ns.keys()


@pytest.mark.slow  # the detector's go the same way
def test_vectors_have_steps_too(
    dino_checkpoint: Callable[..., Path], built_engine: Callable[..., Path], picture: Input, threads_kept: None
) -> None:
    weights = dino_checkpoint("dinov2_vits14")
    with open_steps(weights, built_engine(weights), inputs=[picture]) as systems:
        said = {system.system.key: system.system.details["agreement"] for system in systems}
    assert said
    assert all(float(words.split()[-1]) > 0.99 for words in said.values())


def test_clicks_have_no_waterfall(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    from small_segmenter import build_small_segmenter

    engine = build_small_segmenter(tmp_path / "small")
    with pytest.raises(UnsupportedModelError, match="no waterfall for prompt-segment"), open_steps(tmp_path, engine):
        pass


def test_a_gpu_has_no_waterfall(copied_engine: Path) -> None:
    artifacts.write_manifest(copied_engine, replace(artifacts.read_manifest(copied_engine), device="sm89"))
    with pytest.raises(UnsupportedModelError, match="got one for sm89"), open_steps(copied_engine, copied_engine):
        pass


def test_the_loop_gives_the_vectors_that_visionfast_gives_in_full_batches(
    dino_checkpoint: Callable[..., Path],
    built_engine: Callable[..., Path],
    picture: Input,
    threads_kept: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from visionfast.bench.dino_loop import DataLoaderLoop, measure_loop
    from visionfast.bench.engine_systems import open_visionfast

    monkeypatch.setattr("visionfast.bench.dino_loop._FEWEST_ROUNDS", 2)
    weights = dino_checkpoint("dinov2_vits14")
    engine = built_engine(weights)

    class Watched(DataLoaderLoop):
        asked: ClassVar[list[int]] = []

        def run(self, images: Sequence[bytes | Path]) -> tuple[npt.NDArray[np.float32], list[int]]:
            self.asked.append(len(images))
            return super().run(images)

    loop = Watched(weights, artifacts.read_manifest(engine), batch=2)
    vectors, done_ns = loop.run([picture.encoded] * 3)
    assert len(vectors) == len(done_ns) == 3
    assert done_ns == sorted(done_ns)
    own = open_visionfast(engine)
    try:
        found = own.call(picture.encoded).found
        Watched.asked.clear()
        measured = measure_loop(loop, own, [picture] * 5, seconds=0.01)
    finally:
        own.close()
    assert float(agreement([found], [vectors[0]]).split()[-1]) > 0.99
    (beside, its), (system, loops) = measured
    whole = math.lcm(2, machine.usable_cpus())  # batches are full, and no thread waits for another's last image
    count = -(-5 // whole) * whole
    assert Watched.asked == [2, count] * 2  # a batch untimed, then the round
    assert len(its) == len(loops) == 2 * count
    assert [has_latencies(one) for one in (beside, system)] == [True, False]
