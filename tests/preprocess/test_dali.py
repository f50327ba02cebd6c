"""DALI's graph on its CPU operators, held to the NumPy definition: the GPU runs the same graph."""

from __future__ import annotations

import io
import subprocess
import sys

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from visionfast.errors import (
    BackendUnavailableError,
    ImageError,
    ImageFormatError,
    ImageTooLargeError,
    ImageTruncatedError,
    OptionError,
)
from visionfast.preprocess import reference
from visionfast.preprocess.dali import DaliPreprocessor, input_pipeline
from visionfast.preprocess.dali_admission import Admission, admit
from visionfast.preprocess.decode import DecodeLimits, decode_image
from visionfast.types import PreprocessSpec

pytest.importorskip("nvidia.dali", reason="needs visionfast[dali]")

SPEC = PreprocessSpec((96, 160))


@pytest.fixture(scope="module")
def preprocessor():
    return DaliPreprocessor(SPEC, batch=4)


def noise(image_hw, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), dtype=np.uint8)


def png(image):
    return cv2.imencode(".png", image[:, :, ::-1])[1].tobytes()


def jpeg(image, **options):
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "JPEG", **options)
    return stream.getvalue()


def differ(canvas, other):
    return int(np.abs(canvas.astype(int) - other).max())


def run_graph(pipeline, files):
    pipeline.feed_input("encoded", [np.frombuffer(file, np.uint8) for file in files])
    images, sizes_hw = pipeline.run()
    return [(np.array(images.at(i)), tuple(sizes_hw.at(i))) for i in range(len(files))]


SIDES = st.one_of(st.integers(1, 5), st.integers(1, 700))


@settings(max_examples=60, deadline=None)
@given(image_hw=st.tuples(SIDES, SIDES), seed=st.integers(0, 2**32 - 1))
@example(image_hw=(1, 1), seed=0)
@example(image_hw=(1, 3000), seed=0)
@example(image_hw=(3000, 1), seed=0)
@example(image_hw=(3, 320), seed=0)  # 1.5 rows
@example(image_hw=(5, 320), seed=0)  # 2.5 rows: half to even
@example(image_hw=(95, 160), seed=0)  # the odd pixel of padding
@example(image_hw=(96, 160), seed=0)
@example(image_hw=(192, 320), seed=0)
def test_png_within_one_level_of_the_definition(preprocessor, image_hw, seed):
    image = noise(image_hw, seed)
    file = png(image)
    assert isinstance(admit(file, limits=DecodeLimits(), name="x"), Admission)
    ((canvas, geometry),) = preprocessor([file])
    expected, expected_geometry = reference.letterbox(image, SPEC)
    assert geometry == expected_geometry
    assert differ(canvas, expected) <= 1


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
def test_jpeg_with_orientation(preprocessor, photographs, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    with Image.open(photographs[0]) as photograph:
        file = jpeg(np.asarray(photograph), exif=exif.tobytes(), quality=95)
    assert isinstance(admit(file, limits=DecodeLimits(), name="x"), Admission)
    ((canvas, geometry),) = preprocessor([file])
    expected, expected_geometry = reference.letterbox(decode_image(file), SPEC)
    assert geometry == expected_geometry
    assert differ(canvas, expected) <= 1


def test_grey_jpeg_does_not_crash(preprocessor):
    file = jpeg(noise((40, 50))[:, :, 0])
    ((canvas, _),) = preprocessor([file])
    assert differ(canvas, reference.letterbox(decode_image(file), SPEC)[0]) <= 1


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-3)])
def test_float_outputs(dtype, tolerance):
    spec = PreprocessSpec((64, 64), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    images = [noise((50, 80), 1), noise((90, 30), 2)]
    files = [png(image) for image in images]
    whole = input_pipeline(spec, batch=2, dtype="uint8")
    floating = input_pipeline(spec, batch=2, dtype=dtype)
    for (canvas, size_hw), (tensor, _), image in zip(
        run_graph(whole, files), run_graph(floating, files), images, strict=True
    ):
        assert size_hw == image.shape[:2]
        assert tensor.shape == (3, 64, 64)
        assert tensor.dtype == dtype
        np.testing.assert_allclose(tensor, reference.normalise(canvas, spec), atol=tolerance, rtol=tolerance)


def test_odd_kinds_take_the_cpu_way_with_its_answer(preprocessor):
    rgba = np.concatenate([noise((30, 40)), noise((30, 40), 1)[:, :, :1]], axis=2)
    kinds = [("PNG", Image.fromarray(rgba)), ("GIF", Image.fromarray(noise((30, 40))).quantize(9))]
    kinds += [("TIFF", Image.fromarray(rgba)), ("JPEG", Image.fromarray(noise((30, 40))).convert("CMYK"))]
    kinds += [("PNG", Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40) * 50))]
    files = []
    for kind, image in kinds:
        stream = io.BytesIO()
        image.save(stream, kind)
        files.append(stream.getvalue())
    for file, (canvas, geometry) in zip(files, preprocessor(files), strict=True):
        expected, expected_geometry = reference.letterbox(decode_image(file), SPEC)
        assert geometry == expected_geometry
        np.testing.assert_array_equal(canvas, expected)


def broken_inside(file):
    """A JPEG whose header is right, whose end marker is there, and that no decoder accepts."""
    return file[: file.index(b"\xff\xdb")] + file[file.index(b"\xff\xc0") :]  # no quantisation tables


def test_a_corrupt_image_harms_none_and_shifts_nothing(preprocessor):
    images = [noise((30 + 3 * i, 40), i) for i in range(10)]
    files = [jpeg(image, quality=100, subsampling=0) for image in images]
    alone = [preprocessor([file])[0] for file in files]
    bad = {1: broken_inside(files[1]), 5: files[5][: len(files[5]) // 2], 8: b"", 9: broken_inside(files[9])}
    assert isinstance(admit(bad[1], limits=DecodeLimits(), name="x"), Admission)  # this one reaches DALI
    for _ in range(3):
        answers = preprocessor([bad.get(i, file) for i, file in enumerate(files)])
        assert len(answers) == len(files)
        for i, answer in enumerate(answers):
            if i in bad:
                assert isinstance(answer, ImageError)
                assert answer.source == f"bytes[{i}]"
            else:
                assert answer[1] == alone[i][1]
                np.testing.assert_array_equal(answer[0], alone[i][0])


def test_results_are_no_live_buffers(preprocessor):
    ((canvas, _),) = preprocessor([png(noise((30, 40), 1))])
    before = canvas.copy()
    preprocessor([png(noise((30, 40), seed)) for seed in range(2, 6)])
    np.testing.assert_array_equal(canvas, before)


def test_the_header_is_checked_before_dali_sees_it():
    preprocessor = DaliPreprocessor(SPEC, batch=2, limits=DecodeLimits(max_pixels=1000, max_bytes=20_000))
    small = png(noise((10, 10)))
    answers = preprocessor([png(noise((40, 50))), small, png(noise((100, 100))), b"text", small[:-20]])
    kinds = [type(answer) for answer in answers]
    assert kinds == [ImageTooLargeError, tuple, ImageTooLargeError, ImageFormatError, ImageTruncatedError]


def test_no_image():
    assert DaliPreprocessor(SPEC, batch=2)([]) == []


def test_options_are_checked():
    with pytest.raises(OptionError, match="expected cpu or mixed, got 'gpu'"):
        input_pipeline(SPEC, batch=1, device="gpu")
    with pytest.raises(OptionError, match="expected one of uint8, float32, float16, got 'int8'"):
        input_pipeline(SPEC, batch=1, dtype="int8")


def test_without_dali_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(BackendUnavailableError, match=r"install visionfast\[dali\]"):
        input_pipeline(SPEC, batch=1)


def test_importing_the_package_loads_no_decoder():
    code = "import sys, visionfast.preprocess; print([m for m in ('cv2', 'PIL', 'nvidia') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_public_names():
    import visionfast.preprocess as package

    assert package.__all__ == sorted(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name
