# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Letterbox and normalise on the GPU, in the Triton language: raw frames on the device → the engine's input.

One launch and one pass, padding included: of the source only the pixels that have a weight are read, and each element
of the tensor is written once. The results are those of `preprocess.reference`, for video after `preprocess.nv12`, to
the bit:

- The positions are computed where they are used, in double precision as in the definition, and compiled without
  contraction: a fused multiply-add rounds once where the definition rounds twice. Tables of them would have to be
  made and uploaded for every new image size; this way a frame of a size never seen costs what any other does.
  Consumer cards do 64-bit arithmetic at 1/64 of their rate, so a thread computes a position for each row and column
  of its pixels, not for each pixel, and none in tiles of padding.
- The normalisation is a table of the definition's own 3 × 256 results.
- A tap of weight zero takes its neighbour's pixel again, out of the cache, instead of being masked: masks for four
  taps of four pixels outnumber the predicate registers. At an odd whole scale (1080p at 640: 3) three taps of four
  have no weight.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from visionfast.errors import ShapeError
from visionfast.kernel_device import kernel_device, launching_on
from visionfast.preprocess.nv12 import FRACTION_BITS, YuvMatrix, check_nv12, yuv_to_rgb
from visionfast.preprocess.reference import letterbox_geometry, normalise
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["DeviceLetterbox", "ahead_of_time", "letterbox_nv12", "letterbox_rgb"]

_TILE = {"tile_h": 4, "tile_w": 128}  # 4 pixels, 48 independent loads, for each of 128 threads; 640 = 5 × 128
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

# Compiled once for each kernel and output type: no image waits for the compiler because of its size or address.
# Nor would it pay to know that `out` is aligned: Triton would give a thread 8 adjacent pixels to store at once, and
# so spread the 32 byte loads of a warp over 256 pixels. As it is, a warp's threads are neighbours.
_SIZES = ("h", "w", "pad_value", "image_h", "image_w", "resized_h", "resized_w", "top", "left")
_SCALES = ("scale_y", "scale_x")  # the bits of a double: Triton rounds a Python float to 32 bits
_WEIGHTS = ("black", "luma", "v_to_red", "v_to_green", "u_to_green", "u_to_blue")  # the fields of nv12.YuvToRgb

_FRACTION_BITS = tl.constexpr(FRACTION_BITS)
_HALF = tl.constexpr(1 << FRACTION_BITS - 1)


@triton.jit
def _fixed(weight):
    """(weight · 2048) rounded half to even: from 2^23 on a float32 has no fraction, so adding that much rounds."""
    return ((weight * 2048.0 + 8388608.0) - 8388608.0).to(tl.int32)


@triton.jit
def _taps(index, scale, length, whole_at_edge: tl.constexpr):
    """For output pixels the two source pixels and their weights of 11 bits, as `reference.resize_bilinear` has them.

    Beyond the image's edge a column takes the edge pixel with its whole weight; a row takes it twice, in two parts,
    which truncates differently. Every pixel returned is inside the image, also for an index that is not.
    """
    position = ((index.to(tl.float32) + 0.5).to(tl.float64) * scale.to(tl.float64, bitcast=True) - 0.5).to(tl.float32)
    floor = tl.floor(position)
    part = position - floor
    before = floor.to(tl.int32)
    if whole_at_edge:
        part = tl.where((before < 0) | (before >= length - 1), 0.0, part)
    w_first, w_second = _fixed(1.0 - part), _fixed(part)
    first = tl.minimum(tl.maximum(before, 0), length - 1)
    second = tl.minimum(tl.maximum(tl.where(w_second > 0, before + 1, before), 0), length - 1)
    return first, second, w_first, w_second


@triton.jit
def _blend(above_left, above_right, below_left, below_right, w_above, w_below, w_left, w_right):
    """OpenCV's fixed-point bilinear: four taps 0..255 → levels, (tile_h, tile_w) int32."""
    above = (above_left * w_left + above_right * w_right) >> 4
    below = (below_left * w_left + below_right * w_right) >> 4
    return (((above * w_above) >> 16) + ((below * w_below) >> 16) + 2) >> 2


@triton.jit
def _store(out, tables, level, channel, y, x, h, w):
    """One channel of the tile through its table, planar; without tables the level itself, interleaved."""
    inside = (y < h) & (x < w)
    if tables is None:
        tl.store(out + (y * w + x) * 3 + channel, level.to(tl.uint8), mask=inside)
    else:
        tl.store(out + (channel * h + y) * w + x, tl.load(tables + channel * 256 + level), mask=inside)


@triton.jit
def _in_image(y, x, resized_h, resized_w, top, left):
    return (y >= top) & (y < top + resized_h) & (x >= left) & (x < left + resized_w)


@triton.jit
def _is_padding(row, column, resized_h, resized_w, top, left, tile_h: tl.constexpr, tile_w: tl.constexpr):
    """Whether the tile with this corner has no pixel of the image."""
    beside = (column + tile_w <= left) | (column >= left + resized_w)
    return (row + tile_h <= top) | (row >= top + resized_h) | beside


@triton.jit(do_not_specialize=["stride", *_SIZES, *_SCALES], do_not_specialize_on_alignment=["source", "out", "tables"])
def _letterbox_rgb(
    source, stride, out, tables, h, w, pad_value, image_h, image_w, resized_h, resized_w, top, left, scale_y, scale_x,
    tile_h: tl.constexpr, tile_w: tl.constexpr,
):  # fmt: skip
    """`source` (H, W, 3) u8, rows `stride` bytes apart → `out` (3, h, w), or (h, w, 3) u8 without tables."""
    row, column = tl.program_id(1) * tile_h, tl.program_id(0) * tile_w
    y, x = (row + tl.arange(0, tile_h))[:, None], (column + tl.arange(0, tile_w))[None, :]
    if _is_padding(row, column, resized_h, resized_w, top, left, tile_h, tile_w):
        for channel in tl.static_range(3):
            _store(out, tables, pad_value, channel, y, x, h, w)
    else:
        above, below, w_above, w_below = _taps(y - top, scale_y, image_h, False)
        before, after, w_left, w_right = _taps(x - left, scale_x, image_w, True)
        in_image = _in_image(y, x, resized_h, resized_w, top, left)
        upper, lower = source + above.to(tl.int64) * stride, source + below.to(tl.int64) * stride
        # 64 bits also within a row: a channel then becomes the load's constant offset and costs no instruction.
        before, after = before.to(tl.int64) * 3, after.to(tl.int64) * 3
        for channel in tl.static_range(3):
            level = _blend(
                tl.load(upper + before + channel).to(tl.int32),
                tl.load(upper + after + channel).to(tl.int32),
                tl.load(lower + before + channel).to(tl.int32),
                tl.load(lower + after + channel).to(tl.int32),
                w_above, w_below, w_left, w_right,
            )  # fmt: skip
            _store(out, tables, tl.where(in_image, level, pad_value), channel, y, x, h, w)


@triton.jit
def _rgb_of(y_row, uv_row, column, black, luma, v_to_red, v_to_green, u_to_green, u_to_blue):
    """One tap of each pixel of the tile: NV12 → red, green, blue in 0..255, as `nv12.nv12_to_rgb` has them.

    `y_row`, `uv_row` point to the taps' rows. U and V of columns 2k and 2k + 1 are bytes 2k and 2k + 1.
    """
    grey = tl.maximum(tl.load(y_row + column).to(tl.int32) - black, 0) * luma + _HALF
    u = tl.load(uv_row + (column & -2)).to(tl.int32) - 128
    v = tl.load(uv_row + (column & -2) + 1).to(tl.int32) - 128
    red = (grey + v * v_to_red) >> _FRACTION_BITS
    green = (grey + v * v_to_green + u * u_to_green) >> _FRACTION_BITS
    blue = (grey + u * u_to_blue) >> _FRACTION_BITS
    return (
        tl.minimum(tl.maximum(red, 0), 255),
        tl.minimum(tl.maximum(green, 0), 255),
        tl.minimum(tl.maximum(blue, 0), 255),
    )


@triton.jit(
    do_not_specialize=["y_stride", "uv_stride", *_SIZES, *_SCALES, *_WEIGHTS],
    do_not_specialize_on_alignment=["y_plane", "uv_plane", "out", "tables"],
)
def _letterbox_nv12(
    y_plane, y_stride, uv_plane, uv_stride, out, tables,
    h, w, pad_value, image_h, image_w, resized_h, resized_w, top, left, scale_y, scale_x,
    black, luma, v_to_red, v_to_green, u_to_green, u_to_blue,
    tile_h: tl.constexpr, tile_w: tl.constexpr,
):  # fmt: skip
    """`y_plane` (H, W) and `uv_plane` (H/2, W/2, 2) u8, rows so many bytes apart → `out` as in `_letterbox_rgb`."""
    row, column = tl.program_id(1) * tile_h, tl.program_id(0) * tile_w
    y, x = (row + tl.arange(0, tile_h))[:, None], (column + tl.arange(0, tile_w))[None, :]
    if _is_padding(row, column, resized_h, resized_w, top, left, tile_h, tile_w):
        for channel in tl.static_range(3):
            _store(out, tables, pad_value, channel, y, x, h, w)
    else:
        above, below, w_above, w_below = _taps(y - top, scale_y, image_h, False)
        before, after, w_left, w_right = _taps(x - left, scale_x, image_w, True)
        in_image = _in_image(y, x, resized_h, resized_w, top, left)
        before, after = before.to(tl.int64), after.to(tl.int64)
        weights = (black, luma, v_to_red, v_to_green, u_to_green, u_to_blue)
        y_row, uv_row = y_plane + above.to(tl.int64) * y_stride, uv_plane + (above >> 1).to(tl.int64) * uv_stride
        above_left, above_right = _rgb_of(y_row, uv_row, before, *weights), _rgb_of(y_row, uv_row, after, *weights)
        y_row, uv_row = y_plane + below.to(tl.int64) * y_stride, uv_plane + (below >> 1).to(tl.int64) * uv_stride
        below_left, below_right = _rgb_of(y_row, uv_row, before, *weights), _rgb_of(y_row, uv_row, after, *weights)
        for channel in tl.static_range(3):
            level = _blend(
                above_left[channel], above_right[channel], below_left[channel], below_right[channel],
                w_above, w_below, w_left, w_right,
            )  # fmt: skip
            _store(out, tables, tl.where(in_image, level, pad_value), channel, y, x, h, w)


class DeviceLetterbox:
    """Writes frames that are on the device into slots of an engine's input. One per stream's owner.

    Launches on torch's current stream, never waits for it, and allocates nothing after construction. The first
    launch of each kernel and output type compiles it. Equal to the bit to `preprocess.reference.letterbox` and
    `.normalise`, and for video to these after `preprocess.nv12.nv12_to_rgb`.

    Args:
        spec: the network's input.
        device: a CUDA device; the CPU with Triton's interpreter (`TRITON_INTERPRET=1`), for tests.

    Raises:
        BackendUnavailableError: kernels cannot run on this device.
    """

    def __init__(self, spec: PreprocessSpec, *, device: torch.device | str) -> None:
        self.device = kernel_device(device, _letterbox_rgb, what="DeviceLetterbox", instead="use CpuPreprocessor")
        self.spec = spec
        levels = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, axis=2)  # (1, 256, 3)
        self._tables = {
            dtype: torch.tensor(
                np.ascontiguousarray(normalise(levels, spec, name)[:, 0]), device=self.device
            )  # (3, 256)
            for dtype, name in ((torch.float32, np.float32), (torch.float16, np.float16))
        }
        h, w = spec.size_hw
        self._grid = (triton.cdiv(w, _TILE["tile_w"]), triton.cdiv(h, _TILE["tile_h"]))

    def rgb(self, source: torch.Tensor, out: torch.Tensor) -> Letterbox:
        """One image.

        Args:
            source: (H, W, 3) uint8; rows may lie further apart than their pixels need (pitched memory).
            out: (3, h, w) float16 or float32, normalised; or (h, w, 3) uint8, letterboxed only. Contiguous;
                every element is written.

        Raises:
            ShapeError: `source` or `out` is not of that shape, dtype, layout and device.
        """
        if source.ndim != 3 or source.shape[2] != 3 or source.dtype != torch.uint8 or source.numel() == 0:
            raise ShapeError(f"source: expected (H, W, 3) uint8, got {_words(source)}")
        self._check_layout(source, "source", pixel_stride=3)
        geometry = letterbox_geometry((source.shape[0], source.shape[1]), self.spec.size_hw)
        self._launch(_letterbox_rgb, (source, source.stride(0)), out, geometry)
        return geometry

    def nv12(
        self,
        y: torch.Tensor,
        uv: torch.Tensor,
        out: torch.Tensor,
        *,
        matrix: YuvMatrix = "bt601",
        full_range: bool = False,
    ) -> Letterbox:
        """One frame of decoded video.

        Args:
            y: luma (H, W) uint8, both sides even; rows may lie further apart.
            uv: chroma (H/2, W/2, 2) uint8; rows may lie further apart.
            out: as in `rgb`.
            matrix, full_range: as in `nv12.yuv_to_rgb`.

        Raises:
            ShapeError: a plane or `out` is not of that shape, dtype, layout and device.
            OptionError: an unknown matrix.
        """
        check_nv12(y.shape, _dtype(y), uv.shape, _dtype(uv))
        self._check_layout(y, "y", pixel_stride=1)
        self._check_layout(uv, "uv", pixel_stride=2)
        weights = yuv_to_rgb(matrix, full_range)
        geometry = letterbox_geometry((y.shape[0], y.shape[1]), self.spec.size_hw)
        self._launch(_letterbox_nv12, (y, y.stride(0), uv, uv.stride(0)), out, geometry, weights)
        return geometry

    def _launch(
        self,
        kernel: Any,
        source: tuple[Any, ...],
        out: torch.Tensor,
        geometry: Letterbox,
        weights: tuple[int, ...] = (),
    ) -> None:
        h, w = self.spec.size_hw
        planar = out.dtype in self._tables
        if out.shape != ((3, h, w) if planar else (h, w, 3)) or not (planar or out.dtype == torch.uint8):
            expected = f"(3, {h}, {w}) float16 or float32, or ({h}, {w}, 3) uint8"
            raise ShapeError(f"out: expected {expected}, got {_words(out)}")
        if out.device != self.device or not out.is_contiguous():
            got = f"{_words(out)} on {out.device} with strides {out.stride()}"
            raise ShapeError(f"out: expected a contiguous tensor on {self.device}, got {got}")
        (image_h, image_w), (resized_h, resized_w) = geometry.image_hw, geometry.resized_hw
        with launching_on(self.device):
            kernel[self._grid](
                *source, out, self._tables.get(out.dtype), h, w, self.spec.pad_value,
                image_h, image_w, resized_h, resized_w, geometry.top, geometry.left,
                _bits(image_h / resized_h), _bits(image_w / resized_w), *weights,
                **_TILE, **_OPTIONS,
            )  # fmt: skip

    def _check_layout(self, plane: torch.Tensor, name: str, pixel_stride: int) -> None:
        """`plane` (H, W) or (H, W, C) must be here, its pixels side by side; a side of one has no stride to check."""
        adjacent = plane.shape[1] == 1 or plane.stride(1) == pixel_stride
        adjacent &= plane.ndim == 2 or plane.stride(2) == 1
        if plane.device != self.device or not adjacent:
            got = f"{plane.device} with strides {plane.stride()}"
            raise ShapeError(f"{name}: expected rows of adjacent pixels on {self.device}, got {got}")


@functools.lru_cache(maxsize=16)
def _letterbox_of(spec: PreprocessSpec, device: torch.device) -> DeviceLetterbox:
    return DeviceLetterbox(spec, device=device)


def letterbox_rgb(source: torch.Tensor, out: torch.Tensor, spec: PreprocessSpec) -> Letterbox:
    """`DeviceLetterbox.rgb` on the source's device; the tables of the last few specs are kept."""
    return _letterbox_of(spec, source.device).rgb(source, out)


def letterbox_nv12(
    y: torch.Tensor,
    uv: torch.Tensor,
    out: torch.Tensor,
    spec: PreprocessSpec,
    *,
    matrix: YuvMatrix = "bt601",
    full_range: bool = False,
) -> Letterbox:
    """`DeviceLetterbox.nv12` on the luma's device; the tables of the last few specs are kept."""
    return _letterbox_of(spec, y.device).nv12(y, uv, out, matrix=matrix, full_range=full_range)


def ahead_of_time() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """For `visionfast.cubins`: each kernel and output type: (name, kernel, signature, constexprs, options)."""
    frame = dict.fromkeys(_SIZES, "i32") | dict.fromkeys(_SCALES, "i64")
    for dtype in ("fp16", "fp32"):
        rgb = {"source": "*u8", "stride": "i32", "out": f"*{dtype}", "tables": f"*{dtype}"}
        yield f"letterbox_rgb_{dtype}", _letterbox_rgb, rgb | frame, _TILE, _OPTIONS
    rgb = {"source": "*u8", "stride": "i32", "out": "*u8"}
    yield "letterbox_rgb_u8", _letterbox_rgb, rgb | frame, _TILE | {"tables": None}, _OPTIONS
    planes = dict.fromkeys(("y_plane", "uv_plane"), "*u8") | dict.fromkeys(("y_stride", "uv_stride"), "i32")
    nv12 = planes | dict.fromkeys(("out", "tables"), "*fp16") | frame | dict.fromkeys(_WEIGHTS, "i32")
    yield "letterbox_nv12_fp16", _letterbox_nv12, nv12, _TILE, _OPTIONS


def _bits(value: float) -> int:
    """Of a double, as a signed integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _words(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {_dtype(tensor)}"
