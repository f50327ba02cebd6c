"""The fused letterbox: kernels against the NumPy definitions, to the bit (in Triton's interpreter without a GPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the kernels take torch tensors")
pytest.importorskip("triton", reason="the kernels are written in Triton's language")

from visionfast.errors import OptionError, ShapeError  # noqa: E402
from visionfast.preprocess.cpu import CpuPreprocessor  # noqa: E402
from visionfast.preprocess.decode import decode_image  # noqa: E402
from visionfast.preprocess.kernels import DeviceLetterbox, letterbox_nv12, letterbox_rgb  # noqa: E402
from visionfast.preprocess.nv12 import nv12_to_rgb  # noqa: E402
from visionfast.preprocess.reference import letterbox, normalise  # noqa: E402
from visionfast.types import PreprocessSpec  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
DTYPES = {torch.float16: np.float16, torch.float32: np.float32, torch.uint8: np.uint8}

SIDES = st.one_of(st.integers(1, 9), st.integers(1, 70), st.sampled_from([128, 255, 700]))
EVEN_SIDES = st.one_of(st.integers(1, 5), st.integers(1, 35), st.sampled_from([128, 351])).map(lambda n: 2 * n)
SPECS = st.builds(
    PreprocessSpec,
    size_hw=st.sampled_from([(32, 32), (32, 64), (64, 32), (5, 7), (1, 1), (9, 130)]),  # a tile is 4 × 128
    pad_value=st.sampled_from([114, 0, 255]),
    mean=st.sampled_from([(0.0, 0.0, 0.0), IMAGENET["mean"]]),
    std=st.sampled_from([(1.0, 1.0, 1.0), IMAGENET["std"]]),
)  # fmt: skip
SEEDS = st.integers(0, 2**32 - 1)
PITCHES = st.sampled_from([0, 1, 16])


def random_plane(rng, shape, pitch=0):
    """(H, W, …) uint8 on the device, `pitch` bytes of something else behind each row."""
    row_bytes = int(np.prod(shape[1:]))
    memory = torch.from_numpy(rng.integers(0, 256, (shape[0], row_bytes + pitch), dtype=np.uint8)).to(DEVICE)
    return memory[:, :row_bytes].unflatten(1, shape[1:]) if len(shape) > 2 else memory[:, :row_bytes]


def expected(image, spec, dtype):
    canvas, geometry = letterbox(image, spec)
    return canvas if dtype == torch.uint8 else normalise(canvas, spec, DTYPES[dtype]), geometry


def slots_for(spec, dtype, batch=3):
    """An engine's input for a batch, filled with what no result holds."""
    h, w = spec.size_hw
    return torch.full((batch, h, w, 3) if dtype == torch.uint8 else (batch, 3, h, w), 77, dtype=dtype, device=DEVICE)


def assert_middle_slot(slots, tensor):
    np.testing.assert_array_equal(slots[1].cpu().numpy(), tensor, strict=True)
    assert (slots[::2] == 77).all()  # the neighbours are untouched


@settings(max_examples=50, deadline=None)
@given(
    image_hw=st.tuples(SIDES, SIDES), spec=SPECS, dtype=st.sampled_from(list(DTYPES)), pitch=PITCHES, seed=SEEDS,
)  # fmt: skip
@example(image_hw=(1, 1), spec=PreprocessSpec((32, 32)), dtype=torch.float16, pitch=0, seed=0)
@example(image_hw=(1, 5000), spec=PreprocessSpec((32, 160)), dtype=torch.float16, pitch=0, seed=0)
@example(image_hw=(5000, 1), spec=PreprocessSpec((160, 32)), dtype=torch.float16, pitch=1, seed=0)
@example(image_hw=(2, 65535), spec=PreprocessSpec((32, 160)), dtype=torch.float32, pitch=0, seed=0)  # scale of 409.6
@example(image_hw=(32, 64), spec=PreprocessSpec((32, 64), **IMAGENET), dtype=torch.float32, pitch=0, seed=0)  # as it is
@example(image_hw=(96, 192), spec=PreprocessSpec((32, 64)), dtype=torch.uint8, pitch=0, seed=0)  # one tap of four
@example(image_hw=(64, 128), spec=PreprocessSpec((32, 64)), dtype=torch.uint8, pitch=0, seed=0)  # ties everywhere
@example(image_hw=(16, 32), spec=PreprocessSpec((32, 64)), dtype=torch.uint8, pitch=0, seed=0)  # doubled
@example(image_hw=(333, 500), spec=PreprocessSpec((64, 64)), dtype=torch.float16, pitch=0, seed=0)
def test_rgb_is_the_definition(image_hw, spec, dtype, pitch, seed):
    source = random_plane(np.random.default_rng(seed), (*image_hw, 3), pitch)
    slots = slots_for(spec, dtype)
    tensor, geometry = expected(source.cpu().numpy(), spec, dtype)
    assert letterbox_rgb(source, slots[1], spec) == geometry
    assert_middle_slot(slots, tensor)


@settings(max_examples=30, deadline=None)
@given(
    image_hw=st.tuples(EVEN_SIDES, EVEN_SIDES), spec=SPECS, dtype=st.sampled_from(list(DTYPES)),
    y_pitch=PITCHES, uv_pitch=PITCHES, matrix=st.sampled_from(["bt601", "bt709"]), full_range=st.booleans(), seed=SEEDS,
)  # fmt: skip
@example((2, 2), PreprocessSpec((32, 32)), torch.float16, 0, 0, "bt601", False, 0)
@example((2, 5000), PreprocessSpec((32, 160)), torch.float16, 16, 0, "bt709", False, 0)
@example((32, 64), PreprocessSpec((32, 64), **IMAGENET), torch.float32, 0, 16, "bt601", False, 0)  # as it is
@example((96, 192), PreprocessSpec((32, 64)), torch.uint8, 0, 0, "bt709", True, 0)  # one tap of four
def test_nv12_is_the_definition(image_hw, spec, dtype, y_pitch, uv_pitch, matrix, full_range, seed):
    rng = np.random.default_rng(seed)
    y = random_plane(rng, image_hw, y_pitch)
    uv = random_plane(rng, (image_hw[0] // 2, image_hw[1] // 2, 2), uv_pitch)
    slots = slots_for(spec, dtype)
    colours = {"matrix": matrix, "full_range": full_range}
    tensor, geometry = expected(nv12_to_rgb(y.cpu().numpy(), uv.cpu().numpy(), **colours), spec, dtype)
    assert letterbox_nv12(y, uv, slots[1], spec, **colours) == geometry
    assert_middle_slot(slots, tensor)


@settings(max_examples=40, deadline=None)
@given(source=st.integers(1, 9000), target=st.sampled_from([32, 96, 127, 160, 384]), seed=SEEDS)
@example(source=3 * 160, target=160, seed=0)
@example(source=4096 + 3, target=384, seed=0)  # positions whose last bits are lost when they become float32
def test_positions_along_a_row(source, target, seed):
    image = np.random.default_rng(seed).integers(0, 256, (1, source, 3), dtype=np.uint8)
    spec = PreprocessSpec((1, target))
    out = torch.empty((1, target, 3), dtype=torch.uint8, device=DEVICE)
    letterbox_rgb(torch.from_numpy(image).to(DEVICE), out, spec)
    np.testing.assert_array_equal(out.cpu().numpy(), letterbox(image, spec)[0])


def test_photographs_as_on_the_cpu(photographs):
    spec = PreprocessSpec((96, 160), **IMAGENET)
    cpu, device = CpuPreprocessor(spec), DeviceLetterbox(spec, device=DEVICE)
    for photograph in photographs:
        image = decode_image(photograph)
        slot, planes = np.empty((1, 96, 160, 3), np.uint8), np.empty((1, 3, 96, 160), np.float16)
        geometry = cpu.write(image, slot[0])
        cpu.normalise(slot, planes)
        out = torch.empty(planes.shape, dtype=torch.float16, device=DEVICE)
        assert device.rgb(torch.from_numpy(image).to(DEVICE), out[0]) == geometry
        np.testing.assert_array_equal(out.cpu().numpy(), planes)


def test_rows_beyond_32_bits():
    rows, stride = 3, 1 << 30  # the last row begins at 2^31
    memory = torch.empty(2 * stride + 12, dtype=torch.uint8, device=DEVICE)  # of which three pages are touched
    source = memory.as_strided((rows, 4, 3), (stride, 3, 1))
    source.copy_(torch.arange(36, dtype=torch.uint8).reshape(3, 4, 3))
    spec = PreprocessSpec((3, 4))
    out = torch.empty((3, 4, 3), dtype=torch.uint8, device=DEVICE)
    letterbox_rgb(source, out, spec)
    assert out.flatten().tolist() == list(range(36))


@pytest.mark.parametrize("image_hw", [(1, 1), (1, 6), (6, 1)])
def test_a_side_of_one_needs_no_stride(image_hw):
    h, w = image_hw
    image = np.arange(h * w * 3, dtype=np.uint8).reshape(h, w, 3)
    source = torch.from_numpy(image).to(DEVICE).as_strided((h, w, 3), (1 if h == 1 else 3, 1 if w == 1 else 3, 1))
    spec = PreprocessSpec((8, 8))
    out = torch.empty((8, 8, 3), dtype=torch.uint8, device=DEVICE)
    letterbox_rgb(source, out, spec)
    np.testing.assert_array_equal(out.cpu().numpy(), letterbox(image, spec)[0])


# ---- what is refused -----------------------------------------------------------------------------------------


SPEC = PreprocessSpec((8, 16))
IMAGE, SLOT = torch.zeros((4, 6, 3), dtype=torch.uint8, device=DEVICE), torch.zeros((3, 8, 16), device=DEVICE)
LUMA, CHROMA = IMAGE[..., 0].contiguous(), IMAGE[:2, :3, :2].contiguous()
PLANAR_CHROMA = CHROMA.permute(2, 0, 1).contiguous().permute(1, 2, 0)


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        pytest.param(IMAGE[..., 0], SLOT, r"source: expected \(H, W, 3\) uint8, got \(4, 6\)", id="grey"),
        pytest.param(IMAGE.float(), SLOT, r"source: expected .* float32", id="float image"),
        pytest.param(IMAGE[:0], SLOT, r"source: expected .*\(0, 6, 3\)", id="no rows"),
        pytest.param(IMAGE[:, :0], SLOT, r"source: expected .*\(4, 0, 3\)", id="no columns"),
        pytest.param(
            IMAGE[:, ::2], SLOT, "source: expected rows of adjacent pixels .* strides", id="every other pixel"
        ),
        pytest.param(IMAGE.new_zeros(3, 4, 6).permute(1, 2, 0), SLOT, "source: expected rows of", id="planar image"),
        pytest.param(IMAGE.to("meta"), SLOT, "source: expected .* on (cpu|cuda:0), got meta", id="elsewhere"),
        pytest.param(IMAGE, SLOT[None], r"out: expected \(3, 8, 16\).*got \(1, 3, 8, 16\)", id="the whole batch"),
        pytest.param(IMAGE, SLOT.mT, r"out: expected .*got \(3, 16, 8\)", id="sides exchanged"),
        pytest.param(IMAGE, SLOT.byte(), r"out: expected .*\(8, 16, 3\) uint8, got \(3, 8, 16\) uint8", id="planar u8"),
        pytest.param(IMAGE, SLOT.permute(1, 2, 0), r"out: .*got \(8, 16, 3\) float32", id="interleaved f32"),
        pytest.param(IMAGE, SLOT.double(), "out: expected .* float64", id="f64"),
        pytest.param(IMAGE, SLOT.bfloat16(), "out: expected .* bfloat16", id="bf16"),
        pytest.param(IMAGE, SLOT.new_zeros(3, 8, 32)[..., ::2], "out: expected a contiguous tensor", id="strided"),
        pytest.param(IMAGE, SLOT.to("meta"), "out: expected a contiguous tensor on .* meta", id="out elsewhere"),
    ],
)
def test_refuses(source, out, message):
    with pytest.raises(ShapeError, match=message) as caught:
        DeviceLetterbox(SPEC, device=DEVICE).rgb(source, out)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("y", "uv", "message"),
    [
        pytest.param(LUMA[:3], CHROMA, "y: expected .* even sides", id="odd"),
        pytest.param(LUMA, CHROMA[:1], r"uv: expected \(2, 3, 2\) uint8 .* got \(1, 3, 2\)", id="short"),
        pytest.param(LUMA.mT.contiguous().mT, CHROMA, "y: expected rows of adjacent pixels", id="columns first"),
        pytest.param(LUMA, PLANAR_CHROMA, "uv: expected rows", id="planar"),
        pytest.param(LUMA, CHROMA.to("meta"), "uv: expected rows .* meta", id="elsewhere"),
    ],
)  # fmt: skip
def test_refuses_planes(y, uv, message):
    with pytest.raises(ShapeError, match=message):
        DeviceLetterbox(SPEC, device=DEVICE).nv12(y, uv, SLOT)


def test_refuses_an_unknown_matrix():
    with pytest.raises(OptionError, match="bt601, bt709"):
        letterbox_nv12(LUMA, CHROMA, SLOT, SPEC, matrix="rec2020")


def test_a_refused_frame_leaves_the_slot_as_it_was():
    slots = slots_for(SPEC, torch.float16)
    with pytest.raises(ShapeError):
        letterbox_rgb(IMAGE.float(), slots[1], SPEC)
    assert (slots == 77).all()


def test_one_object_takes_frames_of_every_size_and_type():
    rng = np.random.default_rng(0)
    spec = replace(SPEC, **IMAGENET)
    device = DeviceLetterbox(spec, device=DEVICE)
    for image_hw, dtype in (((4, 6), torch.float16), ((30, 7), torch.uint8), ((4, 6), torch.float32)):
        source = random_plane(rng, (*image_hw, 3))
        slots = slots_for(spec, dtype)
        tensor, geometry = expected(source.cpu().numpy(), spec, dtype)
        assert device.rgb(source, slots[1]) == geometry
        assert_middle_slot(slots, tensor)


# ---- compiled ------------------------------------------------------------------------------------------------


def compiled(code, tmp_path):
    """Runs `code` in a process whose kernels are compiled, not interpreted; what it prints as JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


COMPILE = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from visionfast.preprocess.kernels import ahead_of_time

texts = {}
for name, kernel, signature, constexprs, options in ahead_of_time():
    types = {n: "constexpr" if n in constexprs else signature[n] for n in kernel.arg_names}
    source = ASTSource(kernel, types, dict(constexprs))
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))
    texts[name] = [built.asm["ptx"], built.asm["ttgir"]]
print(json.dumps(texts))
"""


def test_compiled_arithmetic_rounds_where_the_definition_rounds(tmp_path):
    texts = compiled(COMPILE, tmp_path)
    assert list(texts) == ["letterbox_rgb_fp16", "letterbox_rgb_fp32", "letterbox_rgb_u8", "letterbox_nv12_fp16"]
    for ptx, layouts in texts.values():
        assert "fma." not in ptx
        assert "mul.rn.f64" in ptx
        assert "add.rn.f64" in ptx
        # A warp's threads are neighbours in x; see the comment at `_SIZES`.
        assert layouts.count("#ttg.blocked<{") == layouts.count("sizePerThread = [1, 1], threadsPerWarp = [1, 32]")


@pytest.mark.skipif(DEVICE == "cuda", reason="here is a CUDA device")
def test_a_cpu_without_the_interpreter_is_refused(tmp_path):
    code = """
import json
from visionfast.errors import BackendUnavailableError
from visionfast.preprocess.kernels import DeviceLetterbox
from visionfast.types import PreprocessSpec
try:
    DeviceLetterbox(PreprocessSpec((32, 32)), device="cpu")
except BackendUnavailableError as error:
    print(json.dumps(str(error)))
"""
    assert compiled(code, tmp_path) == "DeviceLetterbox: expected a CUDA device, got cpu: use CpuPreprocessor"
