"""DALI's graph itself: the letterbox it is told and the one it computes, its outputs, and the GPU's graph as data."""

from __future__ import annotations

import functools

import cv2
import numpy as np
import pytest
from dali_message import pipeline_definition
from hypothesis import example, given, settings
from hypothesis import strategies as st

from visionfast.errors import OptionError
from visionfast.preprocess import reference
from visionfast.preprocess.dali_graph import input_pipeline, trailer
from visionfast.preprocess.decode import decode_image
from visionfast.types import PreprocessSpec

pytest.importorskip("nvidia.dali", reason="needs visionfast[dali]")

SIZES_HW = [(96, 160), (33, 31), (64, 64)]
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SIDES = st.one_of(st.integers(1, 5), st.integers(1, 500))


def noise(image_hw, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (*image_hw, 3), dtype=np.uint8)


def png(image):
    return cv2.imencode(".png", image[:, :, ::-1])[1].tobytes()


def jpeg(image, *options):
    return cv2.imencode(".jpg", image[:, :, ::-1], options)[1].tobytes()


@functools.cache
def built(size_hw, dtype="uint8", with_trailer=False, **options):
    pipeline = input_pipeline(PreprocessSpec(size_hw, **options), batch=2, dtype=dtype, with_trailer=with_trailer)
    pipeline.build()
    return pipeline


def run(pipeline, files):
    pipeline.feed_input("encoded", [np.frombuffer(file, np.uint8) for file in files])
    return [output.as_array() for output in pipeline.run()]


awkward = [(1, 1), (1, 2000), (2000, 1), (3, 320), (5, 320), (95, 160), (96, 160), (192, 320), (2, 3), (31, 33)]


def with_awkward_sizes(test):
    for image_hw in awkward:
        test = example(image_hw=image_hw, size_hw=SIZES_HW[0], seed=1)(test)
        test = example(image_hw=image_hw, size_hw=SIZES_HW[1], seed=1)(test)
    drawn = given(image_hw=st.tuples(SIDES, SIDES), size_hw=st.sampled_from(SIZES_HW), seed=st.integers(0, 999))
    return settings(max_examples=60, deadline=None)(drawn(test))


@with_awkward_sizes
def test_the_letterbox_told_is_the_one_computed_in_the_graph(image_hw, size_hw, seed):
    file = png(noise(image_hw, seed))
    told = trailer(seed, reference.letterbox_geometry(image_hw, size_hw))
    computed_image, computed_hw = run(built(size_hw), [file])
    image, read_hw, came_out = run(built(size_hw, with_trailer=True), [file + told.tobytes()])
    np.testing.assert_array_equal(image, computed_image)
    assert read_hw.tolist() == computed_hw.tolist() == [list(image_hw)]
    assert came_out.dtype == np.int32
    np.testing.assert_array_equal(came_out, told[None])


@with_awkward_sizes
def test_float_outputs_are_the_definition_within_one_level(image_hw, size_hw, seed):
    image = noise(image_hw, seed)
    spec = PreprocessSpec(size_hw, **IMAGENET)
    file = png(image) + trailer(seed, reference.letterbox_geometry(image_hw, size_hw)).tobytes()
    expected = reference.normalise(reference.letterbox(image, spec)[0], spec, np.float64)
    level = 1 / 255 / min(spec.std)  # the resize may be off by one
    for dtype, rounding in (("float32", 1e-6), ("float16", 2**-10)):  # rounding: relative, for values up to 2.7
        tensor = run(built(size_hw, dtype, True, **IMAGENET), [file])[0]
        assert tensor.shape == (1, 3, *size_hw)
        assert tensor.dtype == dtype
        np.testing.assert_allclose(tensor[0], expected, rtol=rounding, atol=level + rounding)


@pytest.mark.parametrize("encode", [png, jpeg, lambda image: jpeg(image, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)])
@pytest.mark.parametrize("serial", [0, 1, 0x7FD8FFD8, 0x40D9FFD9, 0x7FFFFFFF])
def test_bytes_behind_the_image_change_no_pixel(encode, serial):
    """Not even those that look like a JPEG's markers."""
    file = encode(noise((40, 60)))
    told = trailer(serial, reference.letterbox_geometry((40, 60), (96, 160)))
    behind, _, came_out = run(built((96, 160), with_trailer=True), [file + told.tobytes()] * 2)
    np.testing.assert_array_equal(behind, run(built((96, 160)), [file] * 2)[0])
    assert came_out[:, 0].tolist() == [serial, serial]
    expected, _ = reference.letterbox(decode_image(file), PreprocessSpec((96, 160)))
    assert np.abs(behind[0].astype(int) - expected).max() <= 1


# ---- the GPU's graph, as data ----------------------------------------------------------------------------------


SPECS = [
    PreprocessSpec((96, 160)),
    PreprocessSpec((96, 160), "centre-crop", "bicubic-antialias", 0, cover_hw=(110, 183)),
    PreprocessSpec((96, 160), "stretch", "bicubic-antialias", 0),
]


def parsed(spec=SPECS[0], **options):
    """A pipeline as data; `mixed` is serialised without a driver as long as no GPU is named."""
    options = {"batch": 8, "with_trailer": True} | options
    return pipeline_definition().FromString(input_pipeline(spec, **options).serialize())


def arguments(operator):
    """Without the device, and without where in the source the operator was made."""
    return {
        argument.name: argument.SerializeToString()
        for argument in operator.arguments
        if argument.name != "device" and not argument.name.startswith("_origin_stack")
    }


def edges(operator):
    return [[(edge.name, edge.is_argument) for edge in group] for group in (operator.inputs, operator.outputs)]


@pytest.mark.parametrize("with_trailer", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.resize)
def test_the_gpus_graph_is_the_cpus_but_for_the_devices(spec, dtype, with_trailer):
    cpu, mixed = (parsed(spec, dtype=dtype, device=device, with_trailer=with_trailer) for device in ("cpu", "mixed"))
    assert len(cpu.operators) == len(mixed.operators) > 5
    moved = {}
    for here, there in zip(cpu.operators, mixed.operators, strict=True):
        assert here.name == there.name
        assert arguments(here) == arguments(there)
        assert edges(here) == edges(there)
        assert {edge.device for edge in (*here.inputs, *here.outputs)} <= {"cpu"}
        devices = [edge.device for edge in (*there.inputs, *there.outputs) if not edge.is_argument]
        if "gpu" in devices:
            moved[there.name] = (*devices, *(edge.device for edge in there.inputs if edge.is_argument))
    on_gpu = ("gpu", "gpu")  # in, out; what they are told of sizes and places is on the CPU
    assert moved == {"decoders__Image": ("cpu", "gpu"), "Resize": (*on_gpu, "cpu"), "Slice": (*on_gpu, "cpu")} | (
        {} if dtype == "uint8" else {"CropMirrorNormalize": on_gpu}
    )
    assert [edge.device for edge in mixed.outputs] == ["gpu"] + ["cpu"] * (1 + with_trailer)
    assert [edge.name for edge in mixed.outputs] == [edge.name for edge in cpu.outputs]


def decoder_arguments(**options):
    (decoder,) = (op for op in parsed(device="mixed", **options).operators if op.name == "decoders__Image")
    return {a.name: [*a.floats, *a.ints, *a.strings, *a.bools][0] for a in decoder.arguments if not a.is_vector}


def test_what_the_gpus_decoder_is_told():
    told = decoder_arguments(hw_decoder_load=0.25, expected_hw=(720, 1280))
    assert told["device"] == "mixed"
    assert told["hw_decoder_load"] == 0.25
    assert (told["preallocate_height_hint"], told["preallocate_width_hint"]) == (720, 1280)
    assert told["jpeg_fancy_upsampling"] is True


@pytest.mark.parametrize("expected_hw", [(1, 1), (1080, 1920), (100, 10**9), (10**9, 100), (20_000, 20_000)])
@pytest.mark.parametrize("batch", [1, 8, 32, 33, 4096])
def test_memory_taken_in_advance_is_bounded(batch, expected_hw):
    told = decoder_arguments(batch=batch, expected_hw=expected_hw)
    height, width = told["preallocate_height_hint"], told["preallocate_width_hint"]
    assert 1 <= height <= expected_hw[0]
    assert 1 <= width <= expected_hw[1]
    assert batch * height * width <= 2**26
    if batch * expected_hw[0] * expected_hw[1] <= 2**26:
        assert (height, width) == expected_hw


@pytest.mark.parametrize("with_trailer", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_a_serialised_pipeline_gives_the_same_results(dtype, with_trailer):
    import nvidia.dali as dali

    options = {"batch": 2, "dtype": dtype, "with_trailer": with_trailer}
    original = input_pipeline(PreprocessSpec((96, 160)), **options)
    revived = dali.Pipeline.deserialize(original.serialize(), prefetch_queue_depth=1)
    original.build()
    images = [noise((50, 80), 1), noise((97, 30), 2)]
    behind = [trailer(i, reference.letterbox_geometry(image.shape[:2], (96, 160))) for i, image in enumerate(images)]
    files = [png(image) + told.tobytes() * with_trailer for image, told in zip(images, behind, strict=True)]
    for _ in range(2):
        for output, again in zip(run(original, files), run(revived, files), strict=True):
            np.testing.assert_array_equal(output, again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch, threads: expected at least 1, got 0 and 2"),
        ({"batch": 1, "threads": 0}, "batch, threads: expected at least 1, got 1 and 0"),
        ({"batch": 1, "hw_decoder_load": 1.5}, "hw_decoder_load: expected 0 to 1, got 1.5"),
        ({"batch": 1, "hw_decoder_load": float("nan")}, "hw_decoder_load: expected 0 to 1, got nan"),
        ({"batch": 1, "expected_hw": (0, 10)}, r"expected_hw: expected sides of at least 1 pixel, got \(0, 10\)"),
    ],
)
def test_options_are_named_when_wrong(options, message):
    with pytest.raises(OptionError, match=message):
        input_pipeline(PreprocessSpec((96, 160)), **options)
