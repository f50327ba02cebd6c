"""Batches through DALI: every answer is its own image's, and what is wrong with one harms no other."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from visionfast import machine
from visionfast.errors import (
    BackendError,
    BackendUnavailableError,
    ImageError,
    ImageFormatError,
    ImageTruncatedError,
    OptionError,
)
from visionfast.preprocess import dali as module
from visionfast.preprocess import reference
from visionfast.preprocess.dali import CpuDecode, DaliPreprocessor, DaliRow
from visionfast.preprocess.dali_admission import Admission, admit
from visionfast.preprocess.dali_graph import input_pipeline
from visionfast.preprocess.decode import DecodeLimits, decode_image
from visionfast.types import PreprocessSpec

pytest.importorskip("nvidia.dali", reason="needs visionfast[dali]")

SPEC = PreprocessSpec((48, 64))
BATCH = 4


def image(i):
    """All images differ in colour everywhere; most have the same size, so that nothing else tells them apart."""
    height, width = (30, 40) if i % 3 else (31 + i, 45)
    pixels = (
        np.random.default_rng(i).integers(-20, 21, (height, width, 1))
        + np.array([i * 37, i * 101, 50 + i * 59]) % 215
        + 20
    )
    return np.clip(pixels, 0, 255).astype(np.uint8)


def encoded(pixels, kind="JPEG", **options):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def good(i):
    return encoded(image(i), quality=100, subsampling=0)


def fails_in_dali(i):
    """Its header is right, its end marker is there, and no decoder accepts it: it has no quantisation tables."""
    file = good(i)
    return file[: file.index(b"\xff\xdb")] + file[file.index(b"\xff\xc0") :]


def damaged_scan(i):
    """Cut short, and ended as if it were not."""
    return good(i)[:-200] + b"\xff\xd9"


def alpha(i):
    return encoded(np.dstack([image(i), np.full(image(i).shape[:2], 255, np.uint8)]), "PNG")


# What becomes of each kind: (file, by run(), by the definition)
KINDS = {
    "jpeg": (good, DaliRow, None),
    "progressive": (lambda i: encoded(image(i), quality=100, subsampling=0, progressive=True), DaliRow, None),
    "png": (lambda i: encoded(image(i), "PNG"), DaliRow, None),
    "alpha": (alpha, CpuDecode, None),
    "fails in dali": (fails_in_dali, CpuDecode, ImageTruncatedError),
    "damaged scan": (damaged_scan, DaliRow, ImageTruncatedError),
    "truncated": (lambda i: good(i)[:-100], CpuDecode, ImageTruncatedError),
    "ends in its header": (lambda i: good(i)[:100], ImageTruncatedError, ImageTruncatedError),
    "empty": (lambda i: b"", ImageFormatError, ImageFormatError),
    "text": (lambda i: b"an answer to nothing", ImageFormatError, ImageFormatError),
}


@pytest.fixture(scope="module")
def preprocessor():
    with DaliPreprocessor(SPEC, batch=BATCH) as opened:
        yield opened


def check_answers(preprocessor, kinds, first=0):
    """Runs a batch of these kinds and holds every answer to the definition."""
    files = [KINDS[kind][0](first + i) for i, kind in enumerate(kinds)]
    batch = preprocessor.run(files)
    damage = batch.damage()
    assert len(batch.answers) == len(files)
    rows_seen = []
    for index, (kind, file, answer) in enumerate(zip(kinds, files, batch.answers, strict=True)):
        _, expected_type, expected_error = KINDS[kind]
        assert isinstance(answer, expected_type), (kind, answer)
        if isinstance(answer, ImageError):
            assert answer.source == f"bytes[{index}]"
            continue
        assert answer.index == index
        assert (index in damage) == (kind == "damaged scan")
        if isinstance(answer, DaliRow):
            assert answer.run in batch.runs
            assert answer.run.indices[answer.row] == index
            rows_seen.append(index)
            if index in damage:
                assert isinstance(damage[index], expected_error)
                assert damage[index].source == f"bytes[{index}]"
                continue
            canvas, letterbox = reference.letterbox(decode_image(file), SPEC)
            assert answer.letterbox == letterbox
            row = np.from_dlpack(answer.run.tensor)[answer.row]
            assert np.abs(row.astype(int) - canvas).max() <= 1
        elif expected_error is not None:
            with pytest.raises(expected_error):
                decode_image(file)
    assert sorted(index for run in batch.runs for index in run.indices) == rows_seen
    return batch


def test_the_kinds_are_what_they_are_called():
    for kind, (make, expected_type, _) in KINDS.items():
        if expected_type is not DaliRow and kind != "fails in dali":
            continue
        assert isinstance(admit(make(1), limits=DecodeLimits(), name="x"), Admission), kind


def test_one_run_for_a_sound_batch(preprocessor):
    batch = check_answers(preprocessor, ["jpeg"] * BATCH)
    (run,) = batch.runs
    assert run.indices == (0, 1, 2, 3)
    assert np.from_dlpack(run.tensor).shape == (BATCH, 48, 64, 3)
    assert [answer.row for answer in batch.answers] == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 9])
def test_any_number_of_images(preprocessor, n):
    batch = check_answers(preprocessor, ["jpeg"] * n)
    assert [len(run.indices) for run in batch.runs] == [min(BATCH, n - start) for start in range(0, n, BATCH)]


@pytest.mark.parametrize("bad", [kind for kind in KINDS if kind not in ("jpeg", "png", "progressive")])
def test_a_bad_image_at_every_position_of_consecutive_batches(preprocessor, bad):
    for position in range(6):
        kinds = ["jpeg"] * 6
        kinds[position] = bad
        check_answers(preprocessor, kinds, first=position)


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(st.lists(st.sampled_from(sorted(KINDS)), max_size=9), min_size=1, max_size=4),
    first=st.integers(0, 50),
)
@example(batches=[["fails in dali"] * 4, ["jpeg"] * 4], first=0)
@example(batches=[["fails in dali", "jpeg"] * 4, ["jpeg", "fails in dali"] * 4, ["jpeg"] * 8], first=0)
@example(batches=[["fails in dali"], ["jpeg"], ["fails in dali"], ["png"]], first=3)
@example(batches=[["damaged scan"] * 4, ["jpeg"] * 4], first=0)
@example(batches=[["empty"] * 4, []], first=0)
def test_every_answer_is_its_own_images_whatever_came_before(preprocessor, batches, first):
    for kinds in batches:
        check_answers(preprocessor, kinds, first)
        first += len(kinds)


def test_a_failed_run_is_repeated_image_by_image(preprocessor):
    batch = check_answers(preprocessor, ["jpeg", "fails in dali", "jpeg", "png"])
    assert [run.indices for run in batch.runs] == [(0,), (2,), (3,)]
    assert batch.answers[1].reason.startswith("DALI cannot decode it: Failed to decode sample")
    assert "\n" not in batch.answers[1].reason


def test_all_at_once_as_arrays(preprocessor):
    kinds = list(KINDS)
    files = [make(i) for i, (make, _, _) in enumerate(KINDS.values())]
    for index, (kind, result) in enumerate(zip(kinds, preprocessor(files), strict=True)):
        error = KINDS[kind][2]
        if error is None:
            canvas, letterbox = reference.letterbox(decode_image(files[index]), SPEC)
            assert result[1] == letterbox
            assert np.abs(result[0].astype(int) - canvas).max() <= 1
        else:
            assert isinstance(result, error)
            assert str(result).startswith(f"bytes[{index}]: ")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_float_inputs_from_dali_and_without_it(dtype):
    spec = PreprocessSpec((48, 64), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    files = [good(1), alpha(2), KINDS["png"][0](3)]
    with DaliPreprocessor(spec, batch=2, dtype=dtype) as preprocessor:
        for file, (planes, letterbox) in zip(files, preprocessor(files), strict=True):
            canvas, expected_letterbox = reference.letterbox(decode_image(file), spec)
            assert letterbox == expected_letterbox
            assert planes.dtype == dtype
            expected = reference.normalise(canvas, spec)
            np.testing.assert_allclose(planes, expected, rtol=2**-10, atol=1 / 255 / 0.224 + 2**-10)


def test_errors_carry_the_callers_names(preprocessor):
    files = [good(0), b"", damaged_scan(2)]
    batch = preprocessor.run(files, names=["a.jpg", "b.jpg", "c.jpg"])
    assert batch.answers[1].source == "b.jpg"
    assert {index: error.source for index, error in batch.damage().items()} == {2: "c.jpg"}
    with pytest.raises(ValueError, match="zip"):
        preprocessor.run(files, names=["a.jpg"])


def test_damage_is_not_looked_for_where_it_is_allowed_or_not_wanted():
    for options in ({"check_scans": False}, {"limits": DecodeLimits(allow_truncated=True)}):
        with DaliPreprocessor(SPEC, batch=2, **options) as preprocessor:
            batch = preprocessor.run([damaged_scan(0), good(1)])
            assert batch.damage() == {}
            assert all(isinstance(answer, DaliRow) for answer in batch.answers)


# ---- tensors ---------------------------------------------------------------------------------------------------


def test_tensors_are_views_and_are_not_written_again(preprocessor):
    batch = preprocessor.run([good(1), good(2)])
    (run,) = batch.runs
    view = np.from_dlpack(run.tensor)
    assert view.__array_interface__["data"][0] == run.tensor.__array_interface__["data"][0]  # no copy
    before = view.copy()
    del batch, run
    for i in range(3, 30):
        preprocessor.run([good(i), fails_in_dali(i)] if i % 5 == 0 else [good(i), good(i + 1)])
    np.testing.assert_array_equal(view, before)


def test_torch_views_the_tensor():
    torch = pytest.importorskip("torch", reason="needs torch")
    with DaliPreprocessor(SPEC, batch=2, dtype="float16") as preprocessor:
        batch = preprocessor.run([good(1), good(2)])
        tensor = torch.from_dlpack(batch.runs[0].tensor)
        assert tuple(tensor.shape) == (2, 3, 48, 64)
        assert tensor.dtype == torch.float16
        np.testing.assert_array_equal(tensor.numpy(), np.from_dlpack(batch.runs[0].tensor))
        del batch
    assert torch.isfinite(tensor).all()  # it outlives the preprocessor


class Recording:
    """The pipeline's two calls, noted and passed on; the stream goes no further: there is no device here."""

    def __init__(self, pipeline):
        self.pipeline = pipeline
        self.calls = []

    def feed_input(self, name, data):
        self.calls.append(("feed", name, len(data)))
        self.pipeline.feed_input(name, data)

    def run(self, stream):
        self.calls.append(("run", stream))
        return self.pipeline.run()


# ---- a pipeline that goes wrong --------------------------------------------------------------------------------


def test_another_images_answer_is_an_error_not_an_answer():
    """An input too many in DALI's queue: every answer from then on would be the one before."""
    with DaliPreprocessor(SPEC, batch=2) as preprocessor:
        left_over = good(9) + np.array([77, 48, 64, 0, 0], "<i4").tobytes()
        preprocessor._pipeline.feed_input("encoded", [np.frombuffer(left_over, np.uint8)])
        with pytest.raises(BackendError, match=r"DALI: expected images \[\d+\], got \[77\]; send the batch again"):
            preprocessor.run([good(1)])
        check_answers(preprocessor, ["jpeg", "jpeg", "png"])


@pytest.mark.parametrize(
    "kinds", [["fails in dali"], ["jpeg", "fails in dali", "jpeg"], ["fails in dali"] * 3 + ["jpeg"]]
)
def test_a_dead_pipeline_is_replaced(kinds):
    """Without the dynamic executor, DALI's pipeline is dead after a failure; that stands for whatever else kills it."""
    import nvidia.dali as dali

    serialised = input_pipeline(SPEC, batch=BATCH, with_trailer=True).serialize()
    legacy = {"prefetch_queue_depth": 1, "exec_dynamic": False, "exec_pipelined": True, "exec_async": True}
    with DaliPreprocessor(SPEC, batch=BATCH) as preprocessor:
        preprocessor._pipeline = dead = dali.Pipeline.deserialize(serialised, **legacy)
        check_answers(preprocessor, ["jpeg"] * 3)
        assert preprocessor._pipeline is dead
        check_answers(preprocessor, kinds)
        assert preprocessor._pipeline is not dead
        check_answers(preprocessor, kinds)
        check_answers(preprocessor, ["jpeg"] * 3)


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, IndexError])
def test_a_failure_that_passes_costs_no_answer(error):
    """Say, no memory for a moment. DALI raises what Python has for the case."""
    with DaliPreprocessor(SPEC, batch=BATCH) as preprocessor:
        sound = preprocessor._pipeline

        class FailingOnce(Recording):
            def run(self, stream):
                result = super().run(stream)
                if len(self.calls) == 2:
                    raise error("for this once")
                return result

        preprocessor._pipeline = FailingOnce(sound)
        batch = check_answers(preprocessor, ["jpeg"] * 3)
        assert len(batch.runs) == 3


def test_a_pipeline_that_only_refuses_an_image_is_kept(preprocessor):
    before = preprocessor._pipeline
    check_answers(preprocessor, ["fails in dali", "jpeg", "fails in dali"])
    assert preprocessor._pipeline is before


def test_another_size_than_the_headers_goes_to_the_cpu(preprocessor, monkeypatch):
    """The letterbox that the caller would be told is not the one in the tensor."""
    honest = module.admit
    lies = {good(2): (30, 41)}

    def lying(data, **options):
        return Admission(data, lies[data]) if data in lies else honest(data, **options)

    monkeypatch.setattr(module, "admit", lying)
    answers = preprocessor.run([good(1), good(2), good(4)]).answers
    assert answers[1] == CpuDecode(1, "its header says 41×30 pixels, DALI 40×30")
    assert [answer.row for answer in (answers[0], answers[2])] == [0, 2]


def test_serial_numbers_go_round(preprocessor):
    preprocessor._serial = 2**31 - 3
    for _ in range(3):
        check_answers(preprocessor, ["jpeg"] * 3)
    assert preprocessor._serial == 6


# ---- streams and devices ---------------------------------------------------------------------------------------


def test_every_run_is_on_the_callers_stream():
    with DaliPreprocessor(SPEC, batch=2) as preprocessor:
        recording = preprocessor._pipeline = Recording(preprocessor._pipeline)
        preprocessor._stream = stream = object()
        preprocessor.run([good(i) for i in range(3)])
        assert recording.calls == [("feed", "encoded", 2), ("run", stream), ("feed", "encoded", 1), ("run", stream)]
        recording.calls.clear()
        preprocessor.run([good(0), fails_in_dali(1)])
        feeds = [call[2] for call in recording.calls if call[0] == "feed"]
        assert feeds == [2, 1, 1, 1]  # together, each alone, and a sound picture after the one that failed
        assert [call[1] for call in recording.calls if call[0] == "run"] == [stream] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": 7}, "stream: expected none for device 'cpu', got 7"),
        ({"stream": "7", "device": "mixed"}, "stream: expected a CUDA stream or its handle, got '7'"),
        ({"device": "gpu"}, "device: expected cpu or mixed, got 'gpu'"),
        ({"dtype": "int8"}, "dtype: expected one of uint8, float32, float16, got 'int8'"),
        ({"batch": 0}, "batch, threads: expected at least 1, got 0 and 2"),
        ({"threads": 0}, "batch, threads: expected at least 1, got 8 and 0"),
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(OptionError, match=message):
        DaliPreprocessor(SPEC, **options)


@pytest.mark.parametrize("device_id", [None, 0])
def test_mixed_without_a_driver_says_what_is_missing(device_id):
    if machine.gpus():
        pytest.skip("there is a GPU here")
    with pytest.raises(BackendUnavailableError, match="mixed needs an NVIDIA GPU and its driver") as raised:
        DaliPreprocessor(SPEC, device="mixed", device_id=device_id)
    assert "\n" not in str(raised.value)


def test_a_closed_preprocessor_says_so():
    with DaliPreprocessor(SPEC, batch=1) as preprocessor:
        preprocessor.run([good(1)])
    with pytest.raises(BackendError, match="got a closed one"):
        preprocessor.run([good(1)])
    preprocessor.close()
