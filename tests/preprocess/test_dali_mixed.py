"""DALI on the GPU, held to the definition. Everything else about it is proved without one, in test_dali_*.py."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from visionfast import machine
from visionfast.preprocess import reference
from visionfast.preprocess.antialias import crop
from visionfast.preprocess.dali import CpuDecode, DaliPreprocessor, DaliRow
from visionfast.preprocess.decode import decode_image
from visionfast.types import PreprocessSpec

pytest.importorskip("nvidia.dali", reason="needs visionfast[dali]")
torch = pytest.importorskip("torch", reason="needs torch")
if not machine.gpus():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

SPEC = PreprocessSpec((320, 320))


def png(image):
    return cv2.imencode(".png", image[:, :, ::-1])[1].tobytes()


def noise(image_hw, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), dtype=np.uint8)


@pytest.fixture
def stream():
    return torch.cuda.Stream()


def on_the_host(run, stream):
    """What a session does: views on its stream, and one synchronisation."""
    with torch.cuda.stream(stream):
        tensor = torch.from_dlpack(run.tensor)
        assert tensor.is_cuda
        host = tensor.to("cpu", non_blocking=True)
    stream.synchronize()
    return host.numpy()


@pytest.mark.parametrize("image_hw", [(1, 1), (1, 2000), (2000, 1), (3, 640), (95, 160), (320, 320), (721, 1283)])
def test_png_within_one_level_of_the_definition(stream, image_hw):
    image = noise(image_hw)
    with DaliPreprocessor(SPEC, batch=2, device="mixed", stream=stream) as preprocessor:
        (answer,) = preprocessor.run([png(image)]).answers
        expected, letterbox = reference.letterbox(image, SPEC)
        assert answer.letterbox == letterbox
        assert np.abs(on_the_host(answer.run, stream)[0].astype(int) - expected).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("hw_decoder_load", [0.0, 1.0])
def test_jpeg_on_average_within_one_level(stream, photographs, orientation, hw_decoder_load):
    """nvJPEG's inverse cosine transform is not libjpeg-turbo's: a single pixel may differ by more."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    with Image.open(photographs[0]) as photograph:
        photograph.save(out, "JPEG", exif=exif.tobytes(), quality=95)
    options = {"device": "mixed", "stream": stream, "hw_decoder_load": hw_decoder_load}
    with DaliPreprocessor(SPEC, batch=1, **options) as preprocessor:
        (answer,) = preprocessor.run([out.getvalue()]).answers
        expected, letterbox = reference.letterbox(decode_image(out.getvalue()), SPEC)
        assert answer.letterbox == letterbox
        assert np.abs(on_the_host(answer.run, stream)[0].astype(int) - expected).mean() <= 1


@pytest.mark.parametrize("image_hw", [(300, 400), (120, 90), (1100, 1500), (256, 257)])
def test_a_centre_crop_within_two_levels_of_the_definition(stream, image_hw):
    image = noise(image_hw)
    spec = PreprocessSpec((224, 224), "centre-crop", "bicubic-antialias", 0, cover_hw=(256, 256))
    with DaliPreprocessor(spec, batch=2, device="mixed", stream=stream) as preprocessor:
        (answer,) = preprocessor.run([png(image)]).answers
        expected, placed = crop(image, spec)
        assert answer.letterbox == placed
        off = np.abs(on_the_host(answer.run, stream)[0].astype(int) - expected)
        assert off.max() <= 2
        assert off.mean() <= 0.1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_planes_for_the_engine(stream, dtype):
    image = noise((200, 300))
    with DaliPreprocessor(SPEC, batch=1, device="mixed", dtype=dtype, stream=stream) as preprocessor:
        (run,) = preprocessor.run([png(image)]).runs
        expected = reference.normalise(reference.letterbox(image, SPEC)[0], SPEC)
        planes = on_the_host(run, stream)
        assert planes.dtype == dtype
        np.testing.assert_allclose(planes[0], expected, rtol=2**-10, atol=1 / 255 + 2**-10)


def test_a_bad_image_fails_alone_on_the_gpu(stream):
    """All of one size and each of one grey, so that a mixed-up answer shows."""
    with DaliPreprocessor(SPEC, batch=4, device="mixed", stream=stream) as preprocessor:
        for bad in range(8):
            files = []
            for i in range(8):
                _, jpeg = cv2.imencode(".jpg", np.full((64, 64, 3), 10 + 25 * i, np.uint8))
                file = jpeg.tobytes()
                no_tables = file[: file.index(b"\xff\xdb")] + file[file.index(b"\xff\xc0") :]
                files.append(no_tables if i == bad else file)
            answers = preprocessor.run(files).answers
            assert isinstance(answers[bad], CpuDecode)
            for i, answer in enumerate(answers):
                if i != bad:
                    assert isinstance(answer, DaliRow)
                    grey = on_the_host(answer.run, stream)[answer.row, 160, 160]
                    assert np.abs(grey.astype(int) - (10 + 25 * i)).max() <= 2
