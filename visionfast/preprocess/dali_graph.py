"""Decode, resize and normalise as one DALI graph: on the GPU (`mixed`), and on the CPU the same for the tests.

Facts that shaped it (DALI 2.4):

- The decoder's `ANY_DATA` output crashes the process on a grey JPEG, so only RGB is asked for.
- `mode="not_larger"` with a centred crop is not the letterbox; the size and the corner computed beforehand are.
- Its cubic filter is Pillow's, in real numbers (weights within 1e-3). Both passes in one operator keep what overshoots
  black and white between them, where Pillow clips it to 8 bits: noise in black and white came out 30 levels off. An
  operator for each pass is within 2 levels of the definition. But where the filter reaches beyond the image DALI
  repeats the edge, and Pillow leaves out what is not there: the outermost two pixels of a reduction, which a
  `centre-crop` cuts off and a `stretch` shows, differ by a twelfth of the contrast at worst, twice that in a corner.
- Computing size and corner in the graph takes forty small operators, more than the rest of the graph's own overhead, so
  whoever has read the header already tells them (`trailer`).
- After a batch that fails, a second external source may stay one batch behind the first. So there is one, and
  what belongs to an image travels inside its bytes.
- After a failed batch the next run is right only with the default executor and a prefetch depth of 1 (with 2,
  results shift by one image).
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from visionfast.errors import BackendUnavailableError, OptionError
from visionfast.preprocess.antialias import geometry
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["ENCODED", "DaliDevice", "DaliDtype", "input_pipeline", "placement", "trailer"]

DaliDevice: TypeAlias = Literal["cpu", "mixed"]
DaliDtype: TypeAlias = Literal["uint8", "float32", "float16"]

ENCODED = "encoded"  # the graph's input
_DEVICES = ("cpu", "mixed")
_DTYPES = ("uint8", "float32", "float16")
_TRAILER = np.dtype("<i4")  # each of: serial, resized height and width, -top, -left
_TRAILER_BYTES = 5 * _TRAILER.itemsize
_PREALLOCATED_PIXELS = 2**26  # of a whole batch: about 200 MB


def placement(image_hw: tuple[int, int], spec: PreprocessSpec) -> Letterbox:
    """Where the graph puts an image of `image_hw` pixels.

    Raises:
        OptionError: the graph has no such resize: it has the letterbox, and DINO's two.
    """
    if (spec.resize, spec.interpolation) == ("letterbox", "bilinear"):
        return letterbox_geometry(image_hw, spec.size_hw)
    if spec.interpolation == "bicubic-antialias":
        return geometry(image_hw, spec)
    raise OptionError(
        "DALI: expected letterbox with bilinear, or centre-crop or stretch with bicubic-antialias, "
        f"got {spec.resize} with {spec.interpolation}; the CPU's preprocessors have it"
    )


def trailer(serial: int, letterbox: Letterbox) -> npt.NDArray[np.int32]:
    """(5,) int32: what goes, as little-endian bytes, behind an image's own for a pipeline with `with_trailer`.

    JPEG and PNG say where they end; decoders read no further.
    """
    (resized_h, resized_w), top, left = letterbox.resized_hw, letterbox.top, letterbox.left
    return np.array([serial, resized_h, resized_w, -top, -left], _TRAILER)


def input_pipeline(
    spec: PreprocessSpec,
    *,
    batch: int,
    device: DaliDevice = "cpu",
    dtype: DaliDtype = "uint8",
    threads: int = 2,
    device_id: int | None = None,
    with_trailer: bool = False,
    hw_decoder_load: float = 0.65,
    expected_hw: tuple[int, int] = (1080, 1920),
) -> Any:
    """An unbuilt `nvidia.dali.Pipeline`: encoded bytes in, network input out.

    Its input is the external source `"encoded"`, a batch of 1 to `batch` 1-D uint8 arrays on the CPU. Its
    outputs are the images, (h, w, 3) uint8, or (3, h, w) float normalised by `spec`, on the CPU or for `mixed`
    on the GPU; and (2,) int64 on the CPU, the original `(H, W)` after orientation, as DALI reads it.

    Args:
        spec: the resize, `letterbox`, or `centre-crop` or `stretch` with `bicubic-antialias`; and the normalisation.
        batch: images at most in a run.
        device: `cpu`; `mixed` decodes on the GPU and leaves the images there.
        dtype: of the images; `uint8` for engines that normalise inside.
        threads: CPU threads for decoding.
        device_id: the GPU for `mixed`; None for the one that is current when the pipeline is built.
        with_trailer: every image's bytes end with its `trailer`. Size and place are then those that it says,
            and it comes out as a third output, (5,) int32 on the CPU.
        hw_decoder_load: the share of a batch that goes to the hardware JPEG decoder, where the GPU has one; the
            rest is decoded beside it. DALI's default; 0 for none.
        expected_hw: the image that the hardware decoder's memory is sized for in advance, pixels. A larger
            one works, and allocates when it comes; where `batch` of them would pass 64 megapixels, it is less.

    Raises:
        BackendUnavailableError: DALI is not installed.
        OptionError: a device, dtype, load, size or resize that does not exist.
    """
    placement((1, 1), spec)
    if device not in _DEVICES:
        raise OptionError(f"device: expected cpu or mixed, got {device!r}")
    if dtype not in _DTYPES:
        raise OptionError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    if batch < 1 or threads < 1:
        raise OptionError(f"batch, threads: expected at least 1, got {batch} and {threads}")
    if not 0 <= hw_decoder_load <= 1:
        raise OptionError(f"hw_decoder_load: expected 0 to 1, got {hw_decoder_load}")
    if min(expected_hw) < 1:
        raise OptionError(f"expected_hw: expected sides of at least 1 pixel, got {expected_hw}")
    dali, fn, math, types = _dali()

    pipeline = dali.Pipeline(
        batch_size=batch,
        num_threads=threads,
        device_id=device_id if device == "mixed" else None,
        prefetch_queue_depth=1,
    )
    h, w = spec.size_hw
    expected_w = min(expected_hw[1], max(1, _PREALLOCATED_PIXELS // batch))
    with pipeline:
        encoded = fn.external_source(name=ENCODED, device="cpu", dtype=types.UINT8, ndim=1)
        image = fn.decoders.image(
            encoded,
            device=device,
            output_type=types.RGB,
            jpeg_fancy_upsampling=True,  # chroma as libjpeg-turbo makes it, which is the definition's
            affine=False,  # pinned threads of several sessions would share the same few cores
            hw_decoder_load=hw_decoder_load,
            preallocate_width_hint=expected_w,
            preallocate_height_hint=min(expected_hw[0], max(1, _PREALLOCATED_PIXELS // (batch * expected_w))),
        )
        image_hw = fn.slice(fn.peek_image_shape(encoded), [0], [2], axes=[0])  # (2,) i64
        if with_trailer:
            told = fn.reinterpret(encoded[-_TRAILER_BYTES:], dtype=types.INT32)  # (5,)
            resized_hw, start = fn.cast(told[1:3], dtype=types.FLOAT), told[3:5]
        else:
            resized_hw, start = _geometry(image_hw, spec, fn, math, types)
        if spec.resize == "letterbox":
            image = fn.resize(image, size=resized_hw, interp_type=types.INTERP_LINEAR, antialias=False)
        else:
            rows_only = fn.stack(fn.cast(image_hw[0], dtype=types.FLOAT), resized_hw[1])
            for passed_hw in (rows_only, resized_hw):
                image = fn.resize(image, size=passed_hw, interp_type=types.INTERP_CUBIC, antialias=True)
        image = fn.slice(
            image,
            start=start,
            shape=[h, w],
            axes=[0, 1],
            out_of_bounds_policy="pad",
            fill_values=spec.pad_value,
        )
        if dtype != "uint8":
            image = fn.crop_mirror_normalize(
                image,
                dtype=types.FLOAT if dtype == "float32" else types.FLOAT16,
                output_layout="CHW",
                mean=[255 * mean for mean in spec.mean],
                std=[255 * std for std in spec.std],
            )
        pipeline.set_outputs(image, image_hw, *([told] if with_trailer else []))
    return pipeline


def _dali() -> tuple[Any, Any, Any, Any]:
    """The modules `nvidia.dali`, `.fn`, `.math`, `.types`."""
    try:  # by import_module: DALI's stubs know neither its types' names nor what it re-exports
        dali, fn, math, types = (
            cast(Any, importlib.import_module("nvidia.dali" + part)) for part in ("", ".fn", ".math", ".types")
        )
    except ImportError as error:
        raise BackendUnavailableError(f"DALI cannot be imported ({error}); install visionfast[dali]") from error
    return dali, fn, math, types


def _geometry(image_hw: Any, spec: PreprocessSpec, fn: Any, math: Any, types: Any) -> tuple[Any, Any]:
    """`placement` as a DALI expression: (2,) f32 resized `(h, w)`, (2,) i32 `(-top, -left)`. In double precision."""
    if spec.resize == "stretch":
        return fn.constant(fdata=list(map(float, spec.size_hw))), fn.constant(idata=[0, 0])
    sides = fn.cast(image_hw, dtype=types.FLOAT64)
    if spec.resize == "letterbox":
        gain = math.min(spec.size_hw[0] / sides[0], spec.size_hw[1] / sides[1])
        resized = [math.max(_round_half_even(sides[axis] * gain, math), 1.0) for axis in (0, 1)]
        # Half the padding is rounded down: that is what `round(padding / 2 - 0.1)` comes to.
        corner = [-math.floor((side - length) / 2) for side, length in zip(spec.size_hw, resized, strict=True)]
    else:
        assert spec.cover_hw is not None  # `placement` has seen to it
        cover_h, cover_w = spec.cover_hw
        resized = [
            math.max(math.floor(cover_w * sides[0] / sides[1]), float(cover_h)),
            math.max(math.floor(cover_h * sides[1] / sides[0]), float(cover_w)),
        ]
        corner = [
            _round_half_even((length - side) / 2, math) for side, length in zip(spec.size_hw, resized, strict=True)
        ]
    return fn.cast(fn.stack(*resized), dtype=types.FLOAT), fn.cast(fn.stack(*corner), dtype=types.INT32)


def _round_half_even(value: Any, math: Any) -> Any:
    """Python's `round` of a non-negative number: DALI has only floor and ceil."""
    nearest = math.floor(value + 0.5)
    is_half = (nearest - value) == 0.5
    is_odd = (nearest - 2 * math.floor(nearest / 2)) == 1
    return nearest - is_half * is_odd
