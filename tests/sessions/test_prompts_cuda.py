"""The GPU's prompt session on a recording device: what it asks for and when, and that its answers are the host's.

The device's memory is the host's and the kernels run in Triton's interpreter, so everything is really computed.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from recording import RecordingDevice, RecordingEngine

from visionfast.backends.fake import FakeRunner
from visionfast.errors import BackendError, IncompatibleEngineError, ShapeError
from visionfast.postprocess import device_masks
from visionfast.postprocess.enlarge import enlarge_reference
from visionfast.preprocess.antialias import geometry
from visionfast.sessions.prompts_cuda import CudaPromptSession
from visionfast.sessions.prompts_host import HostPromptSession
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, PromptSpec, PromptTensors, TensorSpec

SIDE, PLANE, MOST, POINTS = 64, 16, 3, 5


def spec(resize: Any = "longest-side", dtype: str = "float32") -> ModelSpec:
    features = (
        TensorSpec("image_embeddings", (1, 2, 4, 4), dtype),
        TensorSpec("high_res_features_0", (1, 1, PLANE, PLANE), dtype),
    )
    image = TensorSpec("images", (1, 3, SIDE, SIDE), dtype, "NCHW")
    inputs = (
        *features,
        TensorSpec("points", (MOST, POINTS, 2), "float32", "", ("prompts", "points", "")),
        TensorSpec("labels", (MOST, POINTS), "float32", "", ("prompts", "points")),
        TensorSpec("mask_input", (MOST, 1, PLANE, PLANE), "float32", "", ("prompts", "", "", "")),
        TensorSpec("has_mask", (MOST,), "float32", "", ("prompts",)),
    )
    outputs = (
        TensorSpec("masks", (MOST, 4, PLANE, PLANE), dtype, "", ("prompts", "", "", "")),
        TensorSpec("scores", (MOST, 4), dtype, "", ("prompts", "")),
    )
    graphs = (
        GraphSpec("encoder", (image,), features),
        GraphSpec("decoder", inputs, outputs, {"prompts": 1, "points": 2}),
    )
    preprocess = PreprocessSpec((SIDE, SIDE), resize, "bilinear-antialias", None, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    prompts = PromptSpec(box_first=False, pad_with_box=False)
    return ModelSpec("fake", "sam", "sam_fake", "prompt-segment", graphs, preprocess, (), (), prompts=prompts)


def encoder(feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    image = feeds["images"].float()
    fine = image.mean(1, keepdim=True).reshape(1, 1, PLANE, 4, PLANE, 4).mean((3, 5))
    return {"image_embeddings": image[:, :2, ::16, ::16], "high_res_features_0": fine}


def decoder(feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cones around the points, bent by the features: each prompt's masks depend on it alone, whoever is beside it."""
    y, x = torch.meshgrid(torch.arange(PLANE) * 4 + 2.0, torch.arange(PLANE) * 4 + 2.0, indexing="ij")
    points, labels = feeds["points"], feeds["labels"]
    total = torch.zeros(len(points), PLANE, PLANE)
    for n in range(points.shape[1]):
        near = 20 - ((x - points[:, n, 0, None, None]) ** 2 + (y - points[:, n, 1, None, None]) ** 2).sqrt()
        total = total + near * (labels[:, n] - 0.5)[:, None, None]
    total = total + feeds["high_res_features_0"].float()[0, 0] + feeds["image_embeddings"].float()[0, 0, 1, 2]
    total = total + feeds["mask_input"][:, 0] * feeds["has_mask"][:, None, None]
    masks = torch.stack([total - 2.5 * c for c in range(4)], 1)
    return {"masks": masks, "scores": masks[:, :, 3, 5] / 32}


def opened(
    model: ModelSpec | None = None, device: RecordingDevice | None = None
) -> tuple[CudaPromptSession, RecordingEngine, RecordingEngine]:
    model, device = model or spec(), device or RecordingDevice()
    engines = RecordingEngine(model.graphs[0], device, encoder), RecordingEngine(model.graphs[1], device, decoder)
    return CudaPromptSession(model, *engines), *engines


def on_host(model: ModelSpec) -> HostPromptSession:
    def through_torch(compute: Any) -> Any:
        def answer(feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
            made = compute({name: torch.from_numpy(array.copy()) for name, array in feeds.items()})
            return {name: tensor.numpy() for name, tensor in made.items()}

        return answer

    runners = (FakeRunner(g, through_torch(f)) for g, f in zip(model.graphs, (encoder, decoder), strict=True))
    return HostPromptSession(model, *runners)


def picture(seed: int, image_hw: tuple[int, int]) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), np.uint8)


def clicks(seed: int, prompts: int = 1, points: int = 2, *, mask: bool = False) -> PromptTensors:
    rng = np.random.default_rng(seed)
    return PromptTensors(
        rng.uniform(0, SIDE, (prompts, points, 2)).astype(np.float32),
        rng.integers(-1, 4, (prompts, points)).astype(np.float32),
        rng.normal(0, 5, (prompts, 1, PLANE, PLANE)).astype(np.float32) if mask else None,
    )


def everything(prompts: int) -> npt.NDArray[np.int64]:
    return np.arange(prompts * 4, dtype=np.int64)


# ---- the answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", ["longest-side", "stretch"])
@pytest.mark.parametrize("image_hw", [(20, 50), (40, 20), (1, 1)])
def test_answers_are_those_of_the_host(image_hw: tuple[int, int], resize: Any) -> None:
    model = spec(resize)
    placed = geometry(image_hw, model.preprocess)
    session, host = opened(model)[0], on_host(model)
    features, expected_features = (s.encode(picture(1, image_hw)) for s in (session, host))
    assert list(features) == list(expected_features)
    for name, tensor in features.items():
        np.testing.assert_array_equal(tensor.numpy(), expected_features[name])
    for prompts in (clicks(2, 1, 1), clicks(3, 2, 5), clicks(4, MOST, 2, mask=True)):
        got, expected = session.decode(features, prompts), host.decode(expected_features, prompts)
        assert got.scores.dtype == np.float32
        np.testing.assert_array_equal(got.scores, expected.scores)
        chosen = everything(len(prompts))[::-5]
        logits = got.logits(chosen)
        assert logits.dtype == np.float32
        np.testing.assert_array_equal(logits, expected.logits(chosen))
        enlarged = enlarge_reference(logits, placed, resize)
        undecided = np.abs(enlarged) < 1e-5
        masks = got.masks(chosen, placed)
        assert masks.image_hw == image_hw
        assert not ((masks.dense() != expected.masks(chosen, placed).dense()) & ~undecided).any()
        np.testing.assert_array_equal(got.stability(chosen, 1.5), expected.stability(chosen, 1.5))
        np.testing.assert_allclose(
            got.stability(chosen, 1.5, placed), expected.stability(chosen, 1.5, placed), atol=2e-3
        )


def test_more_prompts_than_the_engine_takes_go_in_chunks() -> None:
    session, _, engine = opened()
    features, prompts = session.encode(picture(1, (30, 40))), clicks(5, 2 * MOST + 1, 3, mask=True)
    del engine.device.log[:]
    together = session.decode(features, prompts)
    assert engine.device.log.count("synchronize") == engine.device.log.count("engine") == 3
    assert together.scores.shape == (7, 4)
    for i in range(len(prompts)):
        assert prompts.mask_input is not None
        one = PromptTensors(prompts.points[[i]], prompts.labels[[i]], prompts.mask_input[[i]])
        alone = session.decode(features, one)
        np.testing.assert_array_equal(alone.scores[0], together.scores[i])
        np.testing.assert_array_equal(alone.logits(everything(1)), together.logits(everything(1) + 4 * i))


def test_no_prompts_are_no_masks() -> None:
    session, _, engine = opened()
    features = session.encode(picture(1, (30, 40)))
    del engine.device.log[:]
    decoded = session.decode(features, clicks(1, 0))
    none = np.zeros(0, np.int64)
    assert "engine" not in engine.device.log
    assert decoded.scores.shape == (0, 4)
    assert decoded.logits(none).shape == (0, PLANE, PLANE)
    assert decoded.stability(none, 1.0).shape == (0,)
    assert len(decoded.masks(none, geometry((30, 40), spec().preprocess))) == 0


def test_half_precision() -> None:
    model = spec(dtype="float16")
    session, image = opened(model)[0], picture(1, (33, 50))
    features, prompts = session.encode(image), clicks(2, 2)
    assert {tensor.dtype for tensor in features.values()} == {torch.float16}
    exact = opened(spec())[0]
    expected_features = exact.encode(image)
    for name, tensor in features.items():
        torch.testing.assert_close(tensor.float(), expected_features[name], rtol=2e-3, atol=2e-3)
    feeds = {**features, "points": torch.from_numpy(prompts.points), "labels": torch.from_numpy(prompts.labels)}
    feeds |= {"mask_input": torch.zeros(2, 1, PLANE, PLANE), "has_mask": torch.zeros(2)}
    expected = {name: tensor.half().float().numpy() for name, tensor in decoder(feeds).items()}
    decoded = session.decode(features, prompts)
    logits = decoded.logits(everything(2))
    np.testing.assert_array_equal(decoded.scores, expected["scores"])
    np.testing.assert_array_equal(logits, expected["masks"].reshape(8, PLANE, PLANE))
    placed = geometry((33, 50), model.preprocess)
    enlarged = enlarge_reference(logits, placed, "longest-side")
    differ = decoded.masks(everything(2), placed).dense() != (enlarged > 0)
    assert not (differ & (np.abs(enlarged) > 1e-5)).any()


def test_stability_of_a_mask_that_is_nowhere() -> None:
    session = opened()[0]
    prompts = PromptTensors(np.full((1, 1, 2), -1e6, np.float32), np.ones((1, 1), np.float32))
    decoded = session.decode(session.encode(picture(1, (9, 9))), prompts)
    placed = geometry((9, 9), spec().preprocess)
    assert decoded.stability(everything(1), 1.0).tolist() == [1] * 4
    assert np.isnan(decoded.stability(everything(1), 1.0, placed)).all()
    assert decoded.masks(everything(1), placed).area().tolist() == [0] * 4


def test_a_mask_of_an_earlier_answer_counts_for_its_own_call_only() -> None:
    session = opened()[0]
    features, without, given = session.encode(picture(1, (30, 40))), clicks(2), clicks(2, mask=True)
    expected = session.decode(features, without).scores
    assert given.mask_input is not None
    assert not np.array_equal(session.decode(features, given).scores, expected)
    given.mask_input[:] = np.nan  # what 0 × NaN would be
    assert np.isnan(session.decode(features, given).scores).all()
    np.testing.assert_array_equal(session.decode(features, without).scores, expected)


def test_results_are_no_live_buffers() -> None:
    session = opened()[0]
    placed = geometry((30, 40), spec().preprocess)
    features = session.encode(picture(1, (30, 40)))
    decoded = session.decode(features, clicks(2, 2))
    kept = {name: tensor.clone() for name, tensor in features.items()}
    before = decoded.scores.copy(), decoded.logits(everything(2)), decoded.masks(everything(2), placed)
    logits_before = before[1].copy()
    other = session.encode(picture(9, (70, 20)))
    session.decode(other, clicks(3, MOST, 5)).masks(everything(1), geometry((70, 20), spec().preprocess))
    assert all(torch.equal(features[name], kept[name]) for name in kept)
    assert not any(torch.equal(features[name], other[name]) for name in kept)
    np.testing.assert_array_equal(decoded.scores, before[0])
    np.testing.assert_array_equal(before[1], logits_before)
    np.testing.assert_array_equal(decoded.logits(everything(2)), before[1])
    assert decoded.masks(everything(2), placed) == before[2]
    assert torch.equal(session.encode(picture(1, (30, 40)))["image_embeddings"], kept["image_embeddings"])


def test_masks_and_logits_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    image_hw = (40, 30)  # 60 words a mask
    placed = geometry(image_hw, spec().preprocess)
    session = opened()[0]
    expected = session.decode(session.encode(picture(1, image_hw)), clicks(2)).masks(everything(1), placed)
    assert len(set(expected.counts)) > 1
    for words, rounds in ((130, 2), (60, 4), (25, 3 * 4)):  # two at a time, one, and a third of one
        monkeypatch.setattr(device_masks, "CAPACITY_WORDS", words)
        monkeypatch.setattr(device_masks, "_MOST_LOGITS", 3)
        session, _, engine = opened()
        decoded = session.decode(session.encode(picture(1, image_hw)), clicks(2))
        del engine.device.log[:]
        assert decoded.masks(everything(1), placed) == expected
        assert engine.device.log.count("synchronize") == rounds
        del engine.device.log[:]
        decoded.logits(everything(1))
        assert engine.device.log.count("synchronize") == 2


# ---- the order of things ----------------------------------------------------------------------------------


def test_one_synchronisation_a_call() -> None:
    session, _, engine = opened()
    log, image = engine.device.log, picture(1, (30, 40))
    placed = geometry((30, 40), spec().preprocess)
    features = session.encode(image)
    decoded = session.decode(features, clicks(2))
    decoded.masks(everything(1), placed)
    del log[:]
    features = session.encode(image)
    assert log == [
        "copy to device",  # the image
        "engine",
        *["empty"] * 2,  # the caller's features
        *["copy to device"] * 2,
        "synchronize",
    ]
    del log[:]
    decoded = session.decode(features, clicks(3, 2, 3))
    assert log == [
        "empty",  # the caller's logits
        *["copy to device"] * 2,  # points and labels
        "bind",
        "engine",
        "copy to host",  # scores
        "synchronize",
    ]
    del log[:]
    decoded.masks(everything(1)[:1], placed)  # of an image as the last one: its table is on the device
    assert log == ["copy to device", "copy to host", "synchronize"]
    del log[:]
    decoded.stability(everything(1)[:1], 1.0)
    assert log == [*["copy to device"] * 2, "copy to host", "synchronize"]
    del log[:]
    decoded.logits(everything(1)[:2])
    assert log == [*["copy to host"] * 2, "synchronize"]


def test_opening_binds_the_encoder_once_and_warms_both_up() -> None:
    _, _, engine = opened()
    log = [entry for entry in engine.device.log if not entry.startswith(("empty", "pinned", "copy"))]
    assert log == ["bind", "engine", "synchronize", "bind", "engine", *["synchronize"] * 4]


def test_many_calls_keep_no_memory() -> None:
    session, _, engine = opened()
    device, image, prompts = engine.device, picture(1, (30, 40)), clicks(2, 2, 3, mask=True)
    placed = geometry((30, 40), spec().preprocess)

    def click() -> int:
        before = device.allocated
        decoded = session.decode(session.encode(image), prompts)
        decoded.masks(everything(1)[:1], placed)
        decoded.stability(everything(1)[:1], 1.0, placed)
        return int(device.allocated - before)

    click()  # buffers grow to their size
    features, logits = 4 * (2 * 4 * 4 + PLANE * PLANE), 4 * 2 * 4 * PLANE * PLANE
    assert click() == features + logits  # what the caller keeps, and nothing else
    gc.collect()
    objects = sum(type(o) is torch.Tensor for o in gc.get_objects())
    for _ in range(4):
        click()
    gc.collect()
    assert sum(type(o) is torch.Tensor for o in gc.get_objects()) == objects
    assert device._to_host == []


def test_stages_are_timed() -> None:
    session = opened()[0]
    stage_ns = {"hash": 1}
    session.encode(picture(1, (30, 40)), stage_ns)
    assert set(stage_ns) == {"hash", "preprocess", "encoder"}
    assert min(stage_ns.values()) > 0


# ---- threads ----------------------------------------------------------------------------------------------


def test_threads_take_turns_and_every_answer_is_right() -> None:
    session = opened()[0]
    placed = geometry((20, 26), spec().preprocess)
    images = [picture(i, (20, 26)) for i in range(4)]
    prompts = [clicks(10 + i, 1 + i % 2, 1 + i, mask=i == 2) for i in range(4)]
    expected = []
    for image, prompt in zip(images, prompts, strict=True):
        decoded = session.decode(session.encode(image), prompt)
        expected.append((decoded.scores, decoded.masks(everything(1)[1:2], placed)))
    faults: list[str] = []

    def ask(first: int) -> None:
        try:
            for turn in range(3):
                i = (first + turn) % 4
                decoded = session.decode(session.encode(images[i]), prompts[i])
                masks = decoded.masks(everything(1)[1:2], placed)
                if not np.array_equal(decoded.scores, expected[i][0]) or masks != expected[i][1]:
                    faults.append(f"image {i} has another's answer")
        except Exception as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert faults == []
    assert not any(thread.is_alive() for thread in threads)


def test_an_image_is_prepared_while_others_click(monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened()[0]
    features = session.encode(picture(1, (30, 40)))
    expected = session.decode(features, clicks(2)).scores
    entered, leave = threading.Event(), threading.Event()
    parts = session._parts
    assert parts is not None
    prepare = parts[0].prepare

    def slow(pixels: npt.NDArray[np.uint8]) -> None:
        entered.set()
        assert leave.wait(20)
        prepare(pixels)

    monkeypatch.setattr(parts[0], "prepare", slow)
    encoded: list[Any] = []
    other = threading.Thread(target=lambda: encoded.append(session.encode(picture(5, (30, 40)))))
    other.start()
    assert entered.wait(20)
    np.testing.assert_array_equal(session.decode(features, clicks(2)).scores, expected)
    leave.set()
    other.join(20)
    assert len(encoded) == 1


def test_closing_waits_for_whoever_is_asking() -> None:
    entered, leave = threading.Event(), threading.Event()
    armed: list[bool] = []

    def slow(feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if armed:
            entered.set()
            assert leave.wait(20)
        return decoder(feeds)

    model, device = spec(), RecordingDevice()
    engines = RecordingEngine(model.graphs[0], device, encoder), RecordingEngine(model.graphs[1], device, slow)
    session = CudaPromptSession(model, *engines)
    features = session.encode(picture(1, (30, 40)))
    armed.append(True)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(session.decode(features, clicks(2))))
    closing = threading.Thread(target=session.close)
    asking.start()
    assert entered.wait(20)
    closing.start()
    closing.join(0.2)
    assert [engine.closed for engine in engines] == [0, 0]
    leave.set()
    asking.join(20)
    closing.join(20)
    assert [engine.closed for engine in engines] == [1, 1]
    assert len(answers) == 1


# ---- when it fails ----------------------------------------------------------------------------------------


def test_a_closed_session_says_so_and_its_answers_can_be_read() -> None:
    session, *engines = opened()
    placed = geometry((30, 40), spec().preprocess)
    features = session.encode(picture(1, (30, 40)))
    decoded = session.decode(features, clicks(2))
    expected = decoded.masks(everything(1), placed)
    session.close()
    session.close()
    assert [engine.closed for engine in engines] == [1, 1]
    with pytest.raises(BackendError, match="it is closed; open the engine again"):
        session.encode(picture(1, (3, 4)))
    with pytest.raises(BackendError, match="it is closed; open the engine again"):
        session.decode(features, clicks(2))
    assert decoded.masks(everything(1), placed) == expected
    gone = weakref.ref(session)
    del session, engines
    gc.collect()
    assert gone() is None
    assert decoded.masks(everything(1), placed) == expected


def test_closing_closes_both_whatever_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for which in (0, 1):
        session, *engines = opened()

        def refuse() -> None:
            raise BackendError("will not go")

        monkeypatch.setattr(engines[which], "close", refuse)
        with pytest.raises(BackendError, match="will not go"):
            session.close()
        assert engines[1 - which].closed == 1


def test_a_failing_engine_leaves_a_session_that_works() -> None:
    session, *engines = opened()
    image, prompts = picture(1, (30, 40)), clicks(2, mask=True)
    features = session.encode(image)
    expected = session.decode(features, prompts).scores
    for engine, call in zip(
        engines, (lambda: session.encode(image), lambda: session.decode(features, prompts)), strict=True
    ):
        engine.failing = BackendError("refused")
        del engine.device.log[:]
        with pytest.raises(BackendError, match="refused"):
            call()
        assert engine.device.log[-1] == "synchronize"  # nothing still reads the buffers
        engine.failing = None
        np.testing.assert_array_equal(session.decode(session.encode(image), prompts).scores, expected)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("error", [BackendError("no memory"), KeyboardInterrupt(), RuntimeError("odd")])
def test_what_fails_while_opening_is_released(error: BaseException, which: int) -> None:
    model, device = spec(), RecordingDevice()
    engines = RecordingEngine(model.graphs[0], device, encoder), RecordingEngine(model.graphs[1], device, decoder)
    engines[which].failing = error  # type: ignore[assignment]
    with pytest.raises(type(error)):
        CudaPromptSession(model, *engines)
    assert [engine.closed for engine in engines] == [1, 1]


def test_engines_of_two_models_are_refused() -> None:
    model, other, device = spec(), spec(dtype="float16"), RecordingDevice()
    engines = RecordingEngine(model.graphs[0], device, encoder), RecordingEngine(other.graphs[1], device, decoder)
    with pytest.raises(IncompatibleEngineError, match=r"writes image_embeddings \(1, 2, 4, 4\) float16, .* float32"):
        CudaPromptSession(model, *engines)
    assert [engine.closed for engine in engines] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_embeddings": None}, "features: expected high_res_features_0, image_embeddings, got high_res"),
        ({"other": torch.zeros(1)}, "features: expected"),
        ({"image_embeddings": np.zeros((1, 2, 4, 4), np.float32)}, "expected a tensor on cpu, got one on the host"),
        ({"image_embeddings": torch.zeros(1, 2, 4, 4, device="meta")}, "got one on meta"),
        ({"image_embeddings": torch.zeros(1, 2, 4, 5)}, r"image_embeddings: expected \(1, 2, 4, 4\) float32"),
        ({"image_embeddings": torch.zeros(1, 2, 4, 4).half()}, "got .* float16"),
    ],
)
def test_features_of_another_model(changes: dict[str, Any], message: str) -> None:
    session = opened()[0]
    features = dict(session.encode(picture(1, (30, 40)))) | changes
    features = {name: tensor for name, tensor in features.items() if tensor is not None}
    with pytest.raises(ShapeError, match=message):
        session.decode(features, clicks(1))


def test_more_points_than_the_engine_takes() -> None:
    session, _, engine = opened()
    assert (session.prompts, session.points) == (MOST, POINTS)
    features = session.encode(picture(1, (30, 40)))
    del engine.device.log[:]
    with pytest.raises(ShapeError, match="points: expected at most 5 with padding and box corners, got 6"):
        session.decode(features, clicks(1, 1, 6))
    assert engine.device.log == []


@pytest.mark.parametrize("chosen", [[4], [-1], [[0]]])
def test_masks_that_there_are_not(chosen: Any) -> None:
    session, _, engine = opened()
    decoded = session.decode(session.encode(picture(1, (30, 40))), clicks(1))
    placed, wrong = geometry((30, 40), spec().preprocess), np.array(chosen, np.int64)
    del engine.device.log[:]
    for call in (decoded.logits, lambda c: decoded.masks(c, placed), lambda c: decoded.stability(c, 1.0)):
        with pytest.raises(ShapeError, match="chosen: expected"):
            call(wrong)
    assert engine.device.log == []
