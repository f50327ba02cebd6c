"""Clicks and boxes through real engines, against the publishers' own predictors."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from visionfast.embedding_cache import EmbeddingCache
from visionfast.errors import BackendError, ImageNotFoundError, ManifestError, OptionError
from visionfast.pipeline import Detector, open_engine
from visionfast.preprocess.decode import decode_image
from visionfast.prompt_segmenter import PromptSegmenter

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

pytest.importorskip("torch", reason="engines are built from PyTorch: pip install 'visionfast[build]'")

KINDS = ("mobile_sam", "sam2.1_hiera_tiny", pytest.param("sam_vit_b", marks=pytest.mark.slow))
# zidane.jpg is 1280×720.
PROMPTS: dict[str, dict[str, Any]] = {
    "a point": {"points": [(640, 360, 1)]},
    "a point on the edge": {"points": [(1279.9, 0, 1)]},
    "positive and negative points": {"points": [(400, 300, 1), (900, 500, 1), (20, 700, 0)]},
    "a negative point alone": {"points": [(640, 360, 0)]},
    "a box": {"boxes": (100, 50, 700, 719.5)},
    "the whole picture": {"boxes": (0, 0, 1280, 720)},
    "a box and points": {"points": [(400, 300, 1), (150, 100, 0)], "boxes": (100, 50, 700, 700)},
}


class Pair:
    """An engine and its publisher's predictor, on one picture."""

    def __init__(self, folder: Path, checkpoint: Path, picture: Path) -> None:
        from visionfast.bench.official_sam import official_predictor
        from visionfast.checkpoint import open_checkpoint

        self.pixels = decode_image(picture)
        self.segmenter = PromptSegmenter.open(folder)
        self.encoded = self.segmenter.encode(self.pixels)
        self.official = official_predictor(open_checkpoint(checkpoint), self.segmenter.spec.architecture)
        self.official.set_image(self.pixels)

    def expected(
        self, *, points: Any = None, boxes: Any = None, mask_input: Any = None, multimask: bool = False
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """(C, H, W) masks, (C,) scores, (C, 256, 256) logits of one prompt."""
        masks, scores, logits = self.official.predict(
            point_coords=None if points is None else np.array([p[:2] for p in points], np.float64),
            point_labels=None if points is None else np.array([p[2] for p in points]),
            box=None if boxes is None else np.array(boxes, np.float64),
            mask_input=mask_input,
            multimask_output=multimask,
        )
        return masks.astype(bool), scores, logits


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest,
    sam_checkpoint: Callable[..., Path],
    built_engine: Callable[..., Path],
    photographs: list[Path],
) -> Iterator[Pair]:
    if request.param.startswith("sam2"):
        pytest.importorskip("sam2", reason="SAM 2's own predictor is not installed")
    checkpoint = sam_checkpoint(request.param)
    # The same arguments as `mobile`'s: an engine is built once.
    made = Pair(built_engine(checkpoint, images=(photographs[1],)), checkpoint, photographs[1])
    yield made
    made.segmenter.close()


@pytest.fixture(scope="module")
def mobile(sam_checkpoint: Callable[..., Path], built_engine: Callable[..., Path], photographs: list[Path]) -> Path:
    return built_engine(sam_checkpoint("mobile_sam"), images=(photographs[1],))


@pytest.fixture
def segmenter(mobile: Path) -> Iterator[PromptSegmenter]:
    with PromptSegmenter.open(mobile) as opened:
        yield opened


def _iou(a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> float:
    union = np.count_nonzero(a | b)
    return np.count_nonzero(a & b) / union if union else 1.0


# ---- the same answers as the publisher's predictor --------------------------------------------------------


@pytest.mark.parametrize("multimask", [False, True], ids=["single", "multimask"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt(pair: Pair, prompt: str, multimask: bool) -> None:
    expected, scores, logits = pair.expected(**PROMPTS[prompt], multimask=multimask)
    got = pair.segmenter.segment(pair.encoded, **PROMPTS[prompt], multimask=multimask, logits=True)
    assert len(got) == len(expected) == (3 if multimask else 1)
    assert got.logits is not None
    np.testing.assert_allclose(got.score, scores, atol=1e-3)
    np.testing.assert_allclose(got.logits, logits, atol=1e-3 * float(np.abs(logits).max()))
    assert min(map(_iou, got.mask.dense(), expected)) >= 0.99


def test_a_prompt_that_goes_on_from_a_mask(pair: Pair) -> None:
    _, _, logits = pair.expected(points=[(640, 360, 1)])
    points = [(640, 360, 1), (200, 200, 0)]
    expected, scores, _ = pair.expected(points=points, mask_input=logits)
    before = pair.segmenter.segment(pair.encoded, points=[(640, 360, 1)], logits=True)
    got = pair.segmenter.segment(pair.encoded, points=points, mask_input=before.logits)
    np.testing.assert_allclose(got.score, scores, atol=1e-3)
    assert _iou(got.mask.dense()[0], expected[0]) >= 0.99


def test_64_boxes(pair: Pair) -> None:
    draw = np.random.default_rng(0)
    corner = draw.uniform(0, (1000, 500), (64, 2))
    boxes = np.concatenate([corner, corner + draw.uniform(20, (280, 220), (64, 2))], 1)
    got = pair.segmenter.segment(pair.encoded, boxes=boxes)
    assert len(got) == 64
    assert got.prompt.tolist() == list(range(64))
    for i in (0, 1, 31, 63):
        expected, scores, _ = pair.expected(boxes=boxes[i])
        assert got.score[i] == pytest.approx(scores[0], abs=1e-3)
        assert _iou(got.mask[[i]].dense()[0], expected[0]) >= 0.99


def test_its_certificate_passed(pair: Pair) -> None:
    assert pair.segmenter.manifest is not None
    certificate = pair.segmenter.manifest.certificate
    assert certificate.status == "passed"
    assert certificate.measures["min_embedding_cosine"] >= 0.9999
    assert certificate.measures["min_mask_iou"] >= 0.99
    assert certificate.measures["masks"] == 6 * 4


# ---- the cache in front ------------------------------------------------------------------------------------


def test_an_image_is_encoded_once(mobile: Path, photographs: list[Path]) -> None:
    with PromptSegmenter.open(mobile) as segmenter:
        first = segmenter.segment(photographs[0], points=[(100, 100, 1)])
        again = segmenter.segment(photographs[0].read_bytes(), points=[(100, 100, 1)])
        assert again.mask == first.mask
        stats = segmenter.cache_stats()
        assert (stats.misses, stats.hits, stats.entries) == (1, 1, 1)
        assert {"hash", "decode", "preprocess", "encoder", "decoder", "postprocess"} == set(first.stage_ns)
        assert {"hash", "decoder", "postprocess"} == set(again.stage_ns)
        encoded = segmenter.encode(photographs[0])
        assert {"decoder", "postprocess"} == set(segmenter.segment(encoded, points=[(100, 100, 1)]).stage_ns)


def test_a_changed_byte_is_a_miss(segmenter: PromptSegmenter, photographs: list[Path]) -> None:
    jpeg = photographs[0].read_bytes()
    pixels = decode_image(jpeg).copy()
    segmenter.encode(pixels)
    pixels[0, 0, 0] ^= 1
    segmenter.encode(pixels)
    segmenter.encode(jpeg)
    segmenter.encode(jpeg + b"\0")  # what stands behind a JPEG's end changes no pixel, but nobody looked
    assert segmenter.cache_stats().misses == 4


def test_other_weights_are_a_miss(mobile: Path, tmp_path: Path, photographs: list[Path]) -> None:
    cache = EmbeddingCache(1 << 30)
    with PromptSegmenter.open(mobile, cache=cache) as one:
        one.encode(photographs[0])
        assert one.manifest is not None
        changed = dataclasses.replace(one.manifest, weights_sha256="0" * 64)
    with PromptSegmenter.from_folder(mobile, changed, cache=cache) as other:
        other.encode(photographs[0])
    assert (cache.stats().misses, cache.stats().hits) == (2, 0)


def test_a_changed_byte_in_the_engine_is_told(mobile: Path, tmp_path: Path) -> None:
    shutil.copytree(mobile, tmp_path / "engine")
    with (tmp_path / "engine" / "encoder.bin").open("r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ManifestError, match=r"encoder\.bin: expected sha256 .* it was changed: build it again"):
        PromptSegmenter.open(tmp_path / "engine")


def test_a_folder_outlives_the_process(mobile: Path, tmp_path: Path, photographs: list[Path]) -> None:
    with PromptSegmenter.open(mobile, cache_folder=tmp_path) as segmenter:
        first = segmenter.segment(photographs[0], points=[(100, 100, 1)])
    with PromptSegmenter.open(mobile, cache_folder=tmp_path) as segmenter:
        again = segmenter.segment(photographs[0], points=[(100, 100, 1)])
        assert segmenter.cache_stats().disk_hits == 1
    assert again.mask == first.mask


def test_an_image_that_another_engine_encoded(mobile: Path, photographs: list[Path]) -> None:
    with PromptSegmenter.open(mobile) as one:
        encoded = one.encode(photographs[0])
        assert one.manifest is not None
        changed = dataclasses.replace(one.manifest, weights_sha256="0" * 64)
        with (
            PromptSegmenter.from_folder(mobile, changed) as other,
            pytest.raises(OptionError, match="expected an image that this engine encoded"),
        ):
            other.segment(encoded, points=[(1, 1, 1)])


@pytest.mark.parametrize("fits", [True, False], ids=["all have room", "a third has room"])
def test_many_clicks_from_many_threads(mobile: Path, photographs: list[Path], fits: bool) -> None:
    import cv2
    from many_clicks import answers, at_once, complaints, some_clicks

    pixels = [decode_image(path) for path in photographs]
    pictures = [
        cv2.imencode(".png", cv2.resize(p, size, interpolation=cv2.INTER_AREA))[1].tobytes()
        for p, size in zip([*pixels, pixels[0]], [(200, 260), (320, 180), (90, 31)], strict=True)
    ]
    clicks = some_clicks(32, pictures, stay=4)
    with PromptSegmenter.open(mobile) as alone:
        right = answers(alone, pictures, clicks)
        one = alone.cache_stats().bytes // len(pictures)
    outcome = at_once(
        lambda cache: PromptSegmenter.open(mobile, cache=cache),
        pictures,
        clicks,
        right,
        threads=8,
        cache_bytes=one * (3 if fits else 1),
    )
    assert complaints(outcome, clicks, pictures, fits=fits) == []
    assert outcome.most_bytes > 0
    if not fits:
        assert outcome.stats.evictions > 0


def test_the_wait_for_anothers_image_is_a_stage_of_its_own(tmp_path: Path, photographs: list[Path]) -> None:
    from small_segmenter import build_small_segmenter

    with PromptSegmenter.open(build_small_segmenter(tmp_path / "small")) as segmenter:
        assert "turn" not in segmenter.encode(photographs[0]).stage_ns
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(segmenter.encode(photographs[1])))
        with segmenter.session._encoding:  # type: ignore[attr-defined]  # another image is being encoded
            other.start()
            while (frame := sys._current_frames().get(other.ident or 0)) is None or not (
                frame.f_code.co_name == "encode" and frame.f_code.co_filename.endswith("prompts_host.py")
            ):
                assert other.is_alive()
                time.sleep(0.001)
            time.sleep(0.05)  # from asking whether it has to wait to waiting
        other.join(60)
    stage_ns = found[0].stage_ns
    assert list(stage_ns) == ["hash", "decode", "turn", "preprocess", "encoder"]
    assert stage_ns["turn"] > 0


def test_masks_are_looked_at_one_by_one(segmenter: PromptSegmenter, photographs: list[Path]) -> None:
    found = segmenter.segment(photographs[0], points=(400, 500, 1), multimask=True, logits=True)
    best = found[int(found.score.argmax())]
    assert best.score.tolist() == [found.score.max()]
    assert [one.mask for one in found] == [found[[i]].mask for i in range(3)]
    assert len(segmenter.segment(photographs[0], points=(400, 500, 1), mask_input=best.logits)) == 1
    assert repr(found).startswith("Masks(3 of 810×1080, score [")
    shown = found.to_supervision()
    assert shown.mask.shape == (3, 1080, 810)
    assert shown.data["prompt"].tolist() == [0, 0, 0]


def test_no_boxes_no_masks(segmenter: PromptSegmenter, photographs: list[Path]) -> None:
    found = segmenter.segment(photographs[0], boxes=np.zeros((0, 4)))
    assert (len(found), found.image_hw, segmenter.cache_stats().misses) == (0, (1080, 810), 0)


def test_everything_and_clicks_share_the_encoding(segmenter: PromptSegmenter, photographs: list[Path]) -> None:
    found = segmenter.everything(photographs[0], points_per_side=2, score_threshold=0, stability_threshold=0)
    assert {"hash", "decode", "preprocess", "encoder", "decoder", "postprocess"} == set(found.stage_ns)
    again = segmenter.everything(photographs[0], points_per_side=1)
    assert {"hash", "decode", "decoder", "postprocess"} == set(again.stage_ns)
    encoded = segmenter.encode(photographs[0])
    assert segmenter.cache_stats().misses == 1
    with pytest.raises(OptionError, match="expected an image, got an encoded one"):
        segmenter.everything(encoded)
    with pytest.raises(OptionError, match="option 'pred_iou_thresh': expected one of points_per_side, score_threshold"):
        segmenter.everything(photographs[0], pred_iou_thresh=0.5)


# ---- what does not work ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({}, "expected points or boxes"),
        ({"points": [(810, 10, 1)]}, r"expected 0 <= x < 810 and 0 <= y < 1080, got \(810"),
        ({"points": [(10, 1080, 1)]}, r"point 0: expected 0 <= x < 810 and 0 <= y < 1080"),
        ({"points": [(5, 5, 1), (-1, 10, 1)]}, r"prompt 0, point 1: expected 0 <= x < 810"),
        ({"points": [(float("nan"), 10, 1)]}, r"got \(nan"),
        ({"points": [(10, 10, 2)]}, r"expected label 1 \(on the object\) or 0"),
        ({"boxes": (10, 10, 10, 50)}, r"boxes: prompt 0: expected 0 <= x1 < x2 <= 810"),
        ({"boxes": [(0, 0, 5, 5), (0, 0, 811, 50)]}, r"boxes: prompt 1: expected 0 <= x1 < x2 <= 810"),
        ({"points": [(10, 10, 1)] * 32}, r"expected at most 31 a prompt"),
    ],
)
def test_a_prompt_that_does_not_fit(
    segmenter: PromptSegmenter, photographs: list[Path], prompt: dict[str, Any], says: str
) -> None:
    with pytest.raises(OptionError, match=says) as caught:
        segmenter.segment(photographs[0], **prompt)
    assert "\n" not in str(caught.value)
    stats = segmenter.cache_stats()
    assert stats.misses == stats.failures == 0  # said before the image was encoded


def test_a_bad_image_harms_no_other(segmenter: PromptSegmenter, photographs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ImageNotFoundError, match=r"nowhere\.jpg"):
        segmenter.segment(tmp_path / "nowhere.jpg", points=[(1, 1, 1)])
    assert len(segmenter.segment(photographs[0], points=[(1, 1, 1)])) == 1
    assert segmenter.cache_stats().entries == 1


def test_closed(mobile: Path, photographs: list[Path]) -> None:
    segmenter = PromptSegmenter.open(mobile)
    encoded = segmenter.encode(photographs[0])
    segmenter.close()
    segmenter.close()
    with pytest.raises(BackendError, match="closed"):
        segmenter.segment(encoded, points=[(1, 1, 1)])
    with pytest.raises(BackendError, match="closed"):
        segmenter.encode(photographs[1])


def test_opened_as_what_it_is(
    mobile: Path, built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]
) -> None:
    with open_engine(mobile) as opened:
        assert isinstance(opened, PromptSegmenter)
    with pytest.raises(OptionError, match="prompt-segment"):
        Detector.open(mobile)
    with pytest.raises(OptionError, match="a model for detect"):
        PromptSegmenter.open(built_engine(seeded_checkpoint("detect", 3)))
    with pytest.raises(OptionError, match="option 'conf': expected one of cache"):
        PromptSegmenter.open(mobile, conf=0.5)
    for threads in (0, 10**20, "2"):
        with pytest.raises(OptionError, match="threads: expected a whole number from 1 to"):
            PromptSegmenter.open(mobile, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="cache: expected it, or cache_bytes"):
        PromptSegmenter.open(mobile, cache=EmbeddingCache(1), cache_bytes=1)
    with pytest.raises(OptionError, match="expected a whole number of bytes"):
        PromptSegmenter.open(mobile, cache_bytes=float("nan"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda graphs: graphs.reverse(), "expected the graphs encoder, decoder"),
        (lambda graphs: graphs[1]["outputs"].reverse(), "expected the outputs masks, scores"),
        (lambda graphs: graphs[1]["inputs"].pop(), "expected the encoder's outputs and then points"),
        (lambda graphs: graphs[0]["outputs"][0].update(shape=[1, 256, 32, 32]), "expected the encoder's outputs"),
        (lambda graphs: graphs[1]["inputs"][1].update(axes=["prompts", "clicks", ""]), "expected an axis of"),
        (lambda graphs: graphs[1]["inputs"][1].update(dtype="float16"), r"points: expected \(64, 32, 2\) float32"),
        (lambda graphs: graphs[1]["inputs"][4].update(axes=[]), r"has_mask: expected \(64,\) float32 with the axes"),
        (lambda graphs: graphs[1]["outputs"][0].update(shape=[64, 3, 256, 256]), r"expected masks \(64, 4, 256, 256\)"),
        (lambda graphs: graphs[1].update(usual={"prompts": 0, "points": 2}), "usual: expected 1 to 64 prompts, got 0"),
        (lambda graphs: graphs[0]["inputs"][0].update(dtype="zz"), r"encoder: expected one input \(1, 3, 1024, 1024\)"),
    ],
)
def test_a_damaged_manifest(mobile: Path, tmp_path: Path, change: Callable[[Any], object], says: str) -> None:
    document = json.loads((mobile / "engine.json").read_text())
    change(document["spec"]["graphs"])
    for file in mobile.iterdir():
        if file.is_file() and file.name != "engine.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "engine.json").write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=says):
        PromptSegmenter.open(tmp_path)


def test_what_serves_needs_nothing_that_builds(mobile: Path, photographs: list[Path]) -> None:
    script = textwrap.dedent(
        """
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"torch", "ultralytics", "segment_anything", "sam2", "onnx", "triton"}:
                    raise ImportError(f"{name} is not for serving")

        sys.meta_path.insert(0, Refuse())
        import visionfast as vf

        with vf.PromptSegmenter.open(sys.argv[1]) as sam:
            image = sam.encode(sys.argv[2])
            print(len(sam.segment(image, points=[(320, 240, 1)], boxes=None)))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(mobile), str(photographs[0])], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
