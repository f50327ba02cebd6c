"""The pipelines of NVIDIA's container on the real server, with doubles for the GPU and what runs on it.

Everything else is what is deployed: the configurations but for their backends, the intake, DALI's graph on its CPU
operators, the kernels in Triton's interpreter, and what goes between them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from nvidia_double import runs_here, tensorrt_engine
from PIL import Image

from visionfast.errors import ImageError, OptionError
from visionfast.pipeline import Detector, Segmenter
from visionfast.results import Detections
from visionfast.serving.scheduling import QueueLimits, Scheduling
from visionfast.serving.server import Server
from visionfast.serving.wire import fault_of, inputs_of, outputs_of, pack_image, pack_options, unpack_answers
from visionfast.types import Task

library = pytest.importorskip("tritonclient.grpc", reason="the server is asked with tritonclient: visionfast[triton]")
pytest.importorskip("nvidia.dali", reason="needs visionfast[dali]")
pytest.importorskip("torch", reason="needs torch")

LOW: dict[str, Any] = {"conf": 0.1}  # an untrained network is never sure
FEW: dict[str, Any] = {"conf": 0.1, "max_det": 6}  # the interpreter is slow
PIPELINES: dict[str, Task] = {
    "detect-ensemble": "detect",
    "detect-fused": "detect",
    "segment-ensemble": "segment",
    "openvino-ensemble": "detect",
}


def ask(server: Server, model: str, arrays: dict[str, npt.NDArray[Any]]) -> list[Detections | ImageError]:
    """One request, by gRPC. Raises what the stage raised, or the library's error."""
    task = PIPELINES[model]
    inputs = []
    for tensor in inputs_of(task):
        inputs.append(library.InferInput(tensor.name, arrays[tensor.name].shape, tensor.datatype))
        inputs[-1].set_data_from_numpy(arrays[tensor.name])
    with library.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        try:
            result = client.infer(model, inputs, client_timeout=60)
        except library.InferenceServerException as error:
            raise fault_of(str(error)) or error from error
    return unpack_answers({tensor.name: result.as_numpy(tensor.name) for tensor in outputs_of(task)}, task)


def one(server: Server, model: str, image: bytes, **options: Any) -> Detections | ImageError:
    (answer,) = ask(server, model, pack_image(image, pack_options(**options)))
    return answer


def assert_same(got: Detections | ImageError, expected: Detections | ImageError) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, ImageError):
        assert isinstance(got, ImageError)
        assert got.reason == expected.reason
        return
    assert isinstance(got, Detections)
    for name in ("xyxy", "confidence", "class_id"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    assert got.image_hw == expected.image_hw
    assert (got.mask and got.mask.counts) == (expected.mask and expected.mask.counts)


@pytest.fixture(scope="module")
def openvino(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]) -> Callable[[Task], Path]:
    """The engine that stands for a plan: a small one, for the interpreter's sake."""
    return lambda task: built_engine(seeded_checkpoint(task), size_hw=(96, 160))


@pytest.fixture(scope="module")
def server(openvino: Callable[[Task], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from visionfast.serving.repository import deploy

    home = tmp_path_factory.mktemp("nvidia")
    folders = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISIONFAST_HOME", str(home))
        for name, task in PIPELINES.items():
            layout: Any = name.rpartition("-")[2]
            batch = 2 if layout == "fused" else 1
            asked: dict[str, Any] = {"engine_backend": "openvino"}
            engine = openvino(task)
            if not name.startswith("openvino"):
                asked = {"target": "nvidia"}
                engine = tensorrt_engine(openvino(task), home / "engines" / name / "sm89", batch=batch)
            folder = deploy(
                engine,
                name=name,
                layout=layout,
                **asked,
                scheduling=Scheduling(max_batch=4, online=QueueLimits(64, 60_000)),
                options=FEW,
                uncertified=True,
            )
            folders.append(runs_here(folder, openvino(task)))
    with Server(folders, http=0, grpc=0, metrics=0) as running:
        yield running


@pytest.fixture(scope="module")
def images(reduced_photographs: Callable[[int], list[Path]]) -> list[bytes]:
    """Small PNGs, which the intake decodes, so that what follows is the definition's to the bit; and what is none."""
    first, second = (path.read_bytes() for path in reduced_photographs(12))
    return [first, b"", second, b"no image", first[: len(first) // 2]]


@pytest.mark.parametrize("model", PIPELINES)
def test_answers_are_those_of_the_engine_opened_here(
    server: Server, model: str, images: list[bytes], openvino: Callable[[Task], Path]
) -> None:
    task = PIPELINES[model]
    with (Segmenter if task == "segment" else Detector).open(openvino(task), **FEW) as detector:
        expected = detector(images, on_error="return")
    assert sum(isinstance(answer, Detections) and len(answer) > 0 for answer in expected) > 0
    for image, answer in zip(images, expected, strict=True):
        assert_same(one(server, model, image), answer)


@pytest.mark.parametrize(("model", "count"), [("detect-ensemble", 3), ("detect-fused", 1), ("openvino-ensemble", 3)])
def test_requests_that_come_at_once_each_get_their_own_answer(
    server: Server, model: str, count: int, images: list[bytes], openvino: Callable[[Task], Path]
) -> None:
    asked: list[dict[str, Any]] = [
        FEW,
        {**LOW, "max_det": 1},
        {**LOW, "max_det": 7, "classes": ["kind 1"]},
        {**LOW, "iou": 0.0, "class_agnostic": True, "max_det": 3},
        {"conf": 7},
    ]
    calls = [(image, options) for image in images[:count] for options in asked]

    def call(which: tuple[bytes, dict[str, Any]]) -> Detections | ImageError | OptionError:
        try:
            return one(server, model, which[0], **which[1])
        except OptionError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        answers = list(pool.map(call, calls))
    for (image, options), answer in zip(calls, answers, strict=True):
        if options["conf"] == 7:
            assert str(answer) == "conf: expected a number from 0 to 1, got 7"
            continue
        assert not isinstance(answer, OptionError)
        with Detector.open(openvino("detect"), **{**FEW, **options}) as detector:
            assert_same(answer, detector([image], on_error="return")[0])


def test_a_jpeg_is_decoded_by_dali_and_turned_as_it_says(
    server: Server, reduced_photographs: Callable[[int], list[Path]]
) -> None:
    """Its boxes are not those of libjpeg-turbo's pixels to the bit; how the image lies is."""
    with Image.open(reduced_photographs(3)[0]) as photograph:
        for orientation in (1, 6, 3):
            stream, exif = io.BytesIO(), Image.Exif()
            exif[0x0112] = orientation
            photograph.save(stream, "JPEG", quality=95, exif=exif.tobytes())
            answer = one(server, "detect-ensemble", stream.getvalue())
            assert isinstance(answer, Detections)
            width, height = photograph.size
            assert answer.image_hw == ((width, height) if orientation == 6 else (height, width))
            assert len(answer) > 1
            assert set(answer.stage_ns) == {"decode", "postprocess"}


def test_several_images_in_one_request_go_to_the_fused_pipeline_alone(server: Server, images: list[bytes]) -> None:
    longest = max(map(len, images))
    rows = [pack_image(image.ljust(longest, b"\0"), pack_options(**FEW)) for image in images[:3]]
    arrays = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    arrays["length"] = np.array([[len(image)] for image in images[:3]], np.int32)
    answers = ask(server, "detect-fused", arrays)
    for image, answer in zip(images[:3], answers, strict=True):
        assert_same(answer, one(server, "detect-fused", image))
    with pytest.raises(library.InferenceServerException, match="batch-size must be <= 1"):
        ask(server, "detect-ensemble", arrays)
