"""Decode, letterbox and normalise as one DALI graph: the GPU's way, and on the CPU the same for the tests.

Facts that shaped it (DALI 2.4): the decoder's `ANY_DATA` output crashes the process on a grey JPEG, so only
RGB is asked for. One corrupt image raises for its whole batch; the next run is right again only with the
default executor and a prefetch depth of 1 (with 2, results shift by one image). `mode="not_larger"` with a
centred crop is not the letterbox; the size and the corner computed in the graph are.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from visionfast.errors import BackendUnavailableError, ImageError, OptionError
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.preprocess.decode import DecodeLimits, decode_image
from visionfast.preprocess.formats import png_essentials, read_jpeg_header, sniff
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["DaliPreprocessor", "letterbox_pipeline"]

_ENCODED = "encoded"  # the graph's input
_DTYPES = ("uint8", "float32", "float16")


def letterbox_pipeline(
    spec: PreprocessSpec,
    *,
    batch: int,
    device: Literal["cpu", "mixed"] = "cpu",
    dtype: Literal["uint8", "float32", "float16"] = "uint8",
    threads: int = 2,
    device_id: int | None = None,
) -> Any:
    """An unbuilt `nvidia.dali.Pipeline`: encoded bytes in, network input out.

    Its input is the external source `"encoded"`, a batch of 1 to `batch` 1-D uint8 arrays on the CPU. Its
    outputs are the images, (h, w, 3) uint8, or (3, h, w) float normalised by `spec`; and (2,) int64, the
    original `(H, W)` after orientation.

    Args:
        spec: the letterbox and the normalisation.
        batch: images at most in a run.
        device: `cpu`; `mixed` decodes on the GPU `device_id` and leaves the images there.
        dtype: of the images; `uint8` for engines that normalise inside.
        threads: CPU threads for decoding.
        device_id: the GPU for `mixed`.

    Raises:
        BackendUnavailableError: DALI is not installed.
        OptionError: a device or dtype that does not exist.
    """
    if device not in ("cpu", "mixed"):
        raise OptionError(f"device: expected cpu or mixed, got {device!r}")
    if dtype not in _DTYPES:
        raise OptionError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    try:  # by import_module: DALI's stubs know neither its types' names nor what it re-exports
        dali, fn, math, types = (
            cast(Any, importlib.import_module("nvidia.dali" + part)) for part in ("", ".fn", ".math", ".types")
        )
    except ImportError as error:
        raise BackendUnavailableError(f"DALI cannot be imported ({error}); install visionfast[dali]") from error

    pipeline = dali.Pipeline(
        batch_size=batch,
        num_threads=threads,
        device_id=(device_id or 0) if device == "mixed" else None,
        prefetch_queue_depth=1,
    )
    h, w = spec.size_hw
    with pipeline:
        encoded = fn.external_source(name=_ENCODED, device="cpu", dtype=types.UINT8, ndim=1)
        image = fn.decoders.image(encoded, device=device, output_type=types.RGB)

        # As reference.letterbox_geometry, in double precision. Half the padding is rounded down: that is what
        # `round(padding / 2 - 0.1)` comes to.
        image_hw = fn.slice(fn.peek_image_shape(encoded), [0], [2], axes=[0])  # (2,) i64
        sides = fn.cast(image_hw, dtype=types.FLOAT64)
        gain = math.min(h / sides[0], w / sides[1])
        resized = [math.max(_round_half_even(sides[axis] * gain, math), 1.0) for axis in (0, 1)]
        corner = [math.floor((side - length) / 2) for side, length in zip((h, w), resized, strict=True)]

        image = fn.resize(
            image,
            size=fn.cast(fn.stack(*resized), dtype=types.FLOAT),
            interp_type=types.INTERP_LINEAR,
            antialias=False,
        )
        image = fn.slice(
            image,
            start=fn.cast(-fn.stack(*corner), dtype=types.INT32),
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
        pipeline.set_outputs(image, image_hw)
    return pipeline


def _round_half_even(value: Any, math: Any) -> Any:
    """Python's `round` of a non-negative number, as a DALI expression: DALI has only floor and ceil."""
    nearest = math.floor(value + 0.5)
    is_half = (nearest - value) == 0.5
    is_odd = (nearest - 2 * math.floor(nearest / 2)) == 1
    return nearest - is_half * is_odd


class DaliPreprocessor:
    """Encoded images → network inputs through `letterbox_pipeline` on the CPU, each image on its own feet.

    Only kinds that DALI decodes as the definition does reach it: intact 8-bit JPEGs and opaque 8-bit PNGs,
    within the limits. All others, and those that DALI refuses after all, go through `decode_image` and
    `CpuPreprocessor`, or come back as the error that says what is wrong. One thing is looser here: damage inside
    a JPEG's scan that libjpeg only warns of is `ImageTruncatedError` to `decode_image`, and unnoticed by DALI.
    Not for several threads at once.
    """

    def __init__(
        self,
        spec: PreprocessSpec,
        *,
        batch: int = 8,
        threads: int = 2,
        limits: DecodeLimits | None = None,
    ) -> None:
        self.spec = spec
        self.batch = batch
        self.limits = limits or DecodeLimits()
        self._cpu = CpuPreprocessor(spec)
        self._pipeline = letterbox_pipeline(spec, batch=batch, threads=threads)
        self._pipeline.build()

    def __call__(self, images: Sequence[bytes]) -> list[tuple[npt.NDArray[np.uint8], Letterbox] | ImageError]:
        """For each image, in order: canvas (h, w, 3) uint8 and its place in it, or what is wrong with it."""
        answers: dict[int, tuple[npt.NDArray[np.uint8], Letterbox] | ImageError] = {}
        admitted = []
        for index, data in enumerate(images):
            try:
                if self._is_for_dali(data, f"bytes[{index}]"):
                    admitted.append(index)
                else:
                    answers[index] = self._without_dali(data, index)
            except ImageError as error:
                answers[index] = error
        for start in range(0, len(admitted), self.batch):
            chunk = admitted[start : start + self.batch]
            answers |= self._run(chunk, images)
        return [answers[index] for index in range(len(images))]

    def _is_for_dali(self, data: bytes, name: str) -> bool:
        """Raises `ImageError` for what is refused by its header already."""
        self.limits.check_bytes(len(data), name)
        kind = sniff(data, name)
        if kind == "JPEG":
            header = read_jpeg_header(data, name)
            self.limits.check_pixels(header.image_hw, name)
            # A JPEG without its end marker may be cut short, which DALI may not mention.
            return header.ordinary and data.rstrip(b"\0").endswith(b"\xff\xd9")
        if kind == "PNG":
            essentials, image_hw, orientation = png_essentials(data, name, allow_truncated=self.limits.allow_truncated)
            self.limits.check_pixels(image_hw, name)
            depth, colour_type = data[24], data[25]
            opaque = colour_type in (0, 2) and b"tRNS" not in essentials
            return depth == 8 and opaque and orientation == 1
        return False

    def _run(
        self, indices: list[int], images: Sequence[bytes]
    ) -> dict[int, tuple[npt.NDArray[np.uint8], Letterbox] | ImageError]:
        """One run; where it fails, a run for each image, so that the bad one fails alone."""
        self._pipeline.feed_input(_ENCODED, [np.frombuffer(images[index], np.uint8) for index in indices])
        try:
            canvases, sizes_hw = self._pipeline.run()
        except RuntimeError:
            if len(indices) == 1:
                return {indices[0]: self._without_dali(images[indices[0]], indices[0])}
            alone = [self._run([index], images) for index in indices]
            return {index: answer for run in alone for index, answer in run.items()}
        answers: dict[int, tuple[npt.NDArray[np.uint8], Letterbox] | ImageError] = {}
        for position, index in enumerate(indices):
            height, width = (int(side) for side in sizes_hw.at(position))
            geometry = letterbox_geometry((height, width), self.spec.size_hw)
            answers[index] = (
                np.array(canvases.at(position)),
                geometry,
            )  # a copy: the next run takes the buffer
        return answers

    def _without_dali(self, data: bytes, index: int) -> tuple[npt.NDArray[np.uint8], Letterbox] | ImageError:
        try:
            pixels = decode_image(data, limits=self.limits, name=f"bytes[{index}]")
        except ImageError as error:
            return error
        canvas = np.empty((*self.spec.size_hw, 3), np.uint8)
        return canvas, self._cpu.write(pixels, canvas)
