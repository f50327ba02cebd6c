"""Prototypes and coefficients → packed instance masks, on the device (definition: `postprocess.prototypes`).

`mask_stages` holds the four kernels, `postprocess.packed` the words' format and what the host makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from visionfast.errors import OptionError, ShapeError
from visionfast.kernel_device import check_tensor, kernel_device, launching_on
from visionfast.postprocess.kernels import mask_stages as stages
from visionfast.postprocess.kernels.layout import found_shape

__all__ = ["MaskKernels", "ahead_of_time"]

_GROUP = 16  # objects whose logits one program works out together: the prototypes are read once for all of them
_PIXELS = 128  # prototype pixels of one such program, four for each thread of its one warp
_TILE = 128  # image columns of one program of `pack`, likewise
_SCRATCH_BYTES = 64 << 20  # of logits
_PROGRAMS_PER_MULTIPROCESSOR = 24  # of `pack`: its registers let one multiprocessor hold 25 on compute 8.0 and 9.0
_ONE_WARP, _FOUR_WARPS = {"num_warps": 1}, {"num_warps": 4}


@dataclass(frozen=True, slots=True)
class _Shape:
    """All sizes that are fixed for a network, and what each kernel is compiled with."""

    batch: int
    num_classes: int
    anchors: int
    prototypes: tuple[int, int, int]
    stride: int
    max_det: int
    capacity_words: int

    @property
    def padded(self) -> int:
        """Objects of one image, rounded up to whole groups."""
        return -(-self.max_det // _GROUP) * _GROUP

    @property
    def images_of_a_pass(self) -> int:
        """Images whose logits are held at a time: as many as the scratch takes, but at least one."""
        _, plane_h, plane_w = self.prototypes
        return min(self.batch, max(1, _SCRATCH_BYTES // (4 * self.max_det * plane_h * plane_w)))

    def plan(self) -> dict[str, int]:
        _, plane_h, plane_w = self.prototypes
        block = triton.next_power_of_2(self.max_det)
        sizes = {"MAX_DET": self.max_det, "BLOCK": block, "PLANE_H": plane_h, "PLANE_W": plane_w}
        return sizes | {"STRIDE": self.stride, "TILE": _TILE}

    def gather(self) -> dict[str, int]:
        m = self.prototypes[0]
        sizes = {"ROWS": 4 + self.num_classes + m, "ANCHORS": self.anchors, "FIRST_ROW": 4 + self.num_classes}
        blocks = {"M": m, "M_BLOCK": triton.next_power_of_2(m), "GROUP": _GROUP}
        return sizes | blocks | {"MAX_DET": self.max_det, "PADDED": self.padded}

    def multiply(self) -> dict[str, int]:
        m, plane_h, plane_w = self.prototypes
        sizes = {"M": m, "PLANE_H": plane_h, "PLANE_W": plane_w, "MAX_DET": self.max_det, "PADDED": self.padded}
        return sizes | {"GROUP": _GROUP, "PIXELS": _PIXELS}

    def pack(self) -> dict[str, int]:
        _, plane_h, plane_w = self.prototypes
        sizes = {"CAPACITY": self.capacity_words, "MAX_DET": self.max_det, "PLANE_H": plane_h, "PLANE_W": plane_w}
        return sizes | {"STRIDE": self.stride, "TILE": _TILE}


class MaskKernels:
    """The masks of a batch's objects, packed, on the device.

    Its buffers are allocated once and belong to one stream at a time. Beside `words` they are chiefly the logits of
    as many images as fit in 64 MiB, but of at least one: 4 × max_det × mh × mw bytes.

    Attributes:
        offsets: (B, max_det + 1) int64: object i of image b has the batch's words `offsets[b, i]` to
            `offsets[b, i + 1]`, and none where the image has no such object. `offsets[-1, -1]` is the number of all.
        words: (capacity_words,) int32: the batch's words from `first_word` on, as many as fit; the format is
            `postprocess.packed`'s. What lies after the last of them is undefined.
        longest_side: of an image, pixels: beyond it, positions do not fit in 32 bits and the masks are wrong.
    """

    def __init__(
        self,
        *,
        batch: int,
        num_classes: int,
        anchors: int,
        prototypes_shape: tuple[int, int, int],
        size_hw: tuple[int, int],
        max_det: int,
        capacity_words: int,
        device: torch.device | str,
    ) -> None:
        """Allocates.

        Args:
            batch: B, slots for images.
            num_classes: C.
            anchors: A.
            prototypes_shape: (M, mh, mw).
            size_hw: of the network's input, a whole multiple of (mh, mw).
            max_det: objects of one image at most.
            capacity_words: of `words`; a million are 32 million pixels of boxes.
            device: where the kernels run.

        Raises:
            OptionError: a number below 1.
            ShapeError: the prototypes do not divide the input.
            BackendUnavailableError: no CUDA device, or a CPU and not Triton's interpreter.
        """
        numbers = {"batch": batch, "num_classes": num_classes, "anchors": anchors, "max_det": max_det}
        for name, value in (numbers | {"capacity_words": capacity_words}).items():
            if value < 1:
                raise OptionError(f"{name}: expected at least 1, got {value}")
        _, plane_h, plane_w = prototypes_shape
        stride = size_hw[0] // plane_h if min(prototypes_shape) > 0 else 0
        if not stride or (plane_h * stride, plane_w * stride) != tuple(size_hw):
            raise ShapeError(
                f"prototypes: expected (M, mh, mw) that divide the input's {tuple(size_hw)}, got {prototypes_shape}"
            )
        shape = _Shape(batch, num_classes, anchors, prototypes_shape, stride, max_det, capacity_words)
        device = kernel_device(device, stages.plan, what="mask kernels")
        self.longest_side = (1 << 29) // max(size_hw)
        self.words = torch.zeros(capacity_words, dtype=torch.int32, device=device)
        self.offsets = torch.zeros((batch, max_det + 1), dtype=torch.int64, device=device)
        self._tiles = torch.zeros_like(self.offsets)
        self._extents = torch.zeros((batch, max_det + 1, 8), dtype=torch.int32, device=device)
        self._coefficients = torch.zeros((batch, prototypes_shape[0], shape.padded), dtype=torch.float32, device=device)
        planes = (shape.images_of_a_pass, max_det, plane_h, plane_w)
        self._logits = torch.empty(planes, dtype=torch.float32, device=device)
        self._shape = shape
        self._programs = 3  # in the interpreter
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            self._programs = multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
            # Whatever stream comes next finds the buffers filled. Waiting for all of the device would end another
            # session's capture.
            torch.cuda.current_stream(device).synchronize()

    def enqueue(
        self,
        predictions: torch.Tensor,
        prototypes: torch.Tensor,
        found: torch.Tensor,
        placement: torch.Tensor,
        *,
        first_word: int = 0,
    ) -> None:
        """Launches the kernels on torch's current stream; fills `offsets` and `words`.

        It neither allocates nor waits, and its grids do not depend on the images, so that a CUDA graph may hold it
        (after one call outside of the capture, which compiles the kernels).

        Args:
            predictions: (B, 4 + C + M, A) float32.
            prototypes: (B, M, mh, mw) float32 or float16.
            found: (B, 1 + max_det, 8) int32, see `layout`.
            placement: (B, 8) float32, see `layout`.
            first_word: of the batch's words, the one that comes first in `words`: 0, then in further rounds
                `capacity_words`, twice that, and so on, until all `offsets[-1, -1]` have been seen.

        Raises:
            ShapeError: a tensor's shape, dtype, device or memory layout is not the one above.
        """
        self._check(predictions, prototypes, found, placement)
        with launching_on(self.words.device):
            self._launch(predictions, prototypes, found, placement, first_word)

    def _launch(
        self,
        predictions: torch.Tensor,
        prototypes: torch.Tensor,
        found: torch.Tensor,
        placement: torch.Tensor,
        first_word: int,
    ) -> None:
        shape, groups = self._shape, self._shape.padded // _GROUP
        tiles_of_plane = triton.cdiv(shape.prototypes[1] * shape.prototypes[2], _PIXELS)
        where = (self._extents, self.offsets, self._tiles)
        stages.plan[(shape.batch,)](found, placement, *where, **shape.plan(), **_FOUR_WARPS)
        stages.gather[(shape.batch, groups)](predictions, found, self._coefficients, **shape.gather(), **_FOUR_WARPS)
        for first in range(0, shape.batch, shape.images_of_a_pass):
            images = min(shape.images_of_a_pass, shape.batch - first)
            product = (prototypes, self._coefficients, found, self._extents, self._logits)
            stages.multiply[(tiles_of_plane, groups, images)](*product, first, **shape.multiply(), **_ONE_WARP)
            stages.pack[(self._programs,)](
                self._logits, placement, *where, self.words, first, images, first_word, **shape.pack(), **_ONE_WARP
            )

    def fetch(
        self, predictions: torch.Tensor, prototypes: torch.Tensor, found: torch.Tensor, placement: torch.Tensor
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Waits for `enqueue`, and brings its results to the host, in as many rounds as `words` is too small for.

        Args:
            predictions, prototypes, found, placement: what `enqueue` was given, unchanged since.

        Returns:
            `offsets` (B, max_det + 1) int64 and all of the batch's words, (offsets[-1, -1],) int32.
        """
        offsets: npt.NDArray[np.int64] = self.offsets.cpu().numpy()
        total, capacity = int(offsets[-1, -1]), self._shape.capacity_words
        words = np.empty(total, np.int32)
        for first in range(0, total, capacity):
            if first:
                self.enqueue(predictions, prototypes, found, placement, first_word=first)
            window = words[first : first + capacity]
            window[:] = self.words[: len(window)].cpu().numpy()
        return offsets.copy(), words

    def _check(
        self, predictions: torch.Tensor, prototypes: torch.Tensor, found: torch.Tensor, placement: torch.Tensor
    ) -> None:
        shape = self._shape
        rows = 4 + shape.num_classes + shape.prototypes[0]
        for name, tensor, expected, dtypes in (
            ("predictions", predictions, (shape.batch, rows, shape.anchors), (torch.float32,)),
            ("prototypes", prototypes, (shape.batch, *shape.prototypes), (torch.float32, torch.float16)),
            ("found", found, found_shape(shape.batch, shape.max_det), (torch.int32,)),
            ("placement", placement, (shape.batch, 8), (torch.float32,)),
        ):
            check_tensor(name, tensor, expected, dtypes, self.words.device)


def ahead_of_time() -> Iterator[tuple[str, Any, dict[str, str], dict[str, int], dict[str, int]]]:
    """For each kernel and typical network: name, kernel, signature, constexprs, options (`visionfast.cubins`)."""
    types = {"found": "*i32", "placement": "*fp32", "extents": "*i32", "offsets": "*i64", "tiles": "*i64"}
    types |= {"predictions": "*fp32", "coefficients": "*fp32", "logits": "*fp32", "words": "*i32"}
    types |= {"first_image": "i32", "images": "i32", "first_word": "i64"}
    for side, anchors in ((640, 8400), (1280, 33600)):
        shape = _Shape(1, 80, anchors, (32, side // 4, side // 4), 4, 300, 1 << 20)
        for name, kernel, constants, options in (
            ("plan", stages.plan, shape.plan(), _FOUR_WARPS),
            ("gather", stages.gather, shape.gather(), _FOUR_WARPS),
            ("multiply_fp32", stages.multiply, shape.multiply(), _ONE_WARP),
            ("multiply_fp16", stages.multiply, shape.multiply(), _ONE_WARP),
            ("pack", stages.pack, shape.pack(), _ONE_WARP),
        ):
            known = types | {"prototypes": "*fp16" if name.endswith("fp16") else "*fp32"}
            signature = {argument: known[argument] for argument in kernel.arg_names if argument not in constants}
            yield f"masks_{name}_{side}", kernel, signature, constants, options
