"""Mask logits of a prompt decoder → bits at the image's resolution, on the device (definition: `postprocess.enlarge`).

`enlarge_stages` holds the two kernels. Enlarged logits are never stored: a mask leaves its bits, in the format of
`postprocess.packed` for a box as large as the image, or two counts.
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
from visionfast.postprocess.enlarge import Taps
from visionfast.postprocess.kernels import enlarge_stages as stages

__all__ = ["TAP_ROWS", "EnlargeKernels", "TapTable", "ahead_of_time", "write_taps"]

TAP_ROWS = 4
"""Of a tap table: the first tap, and the weights of three."""
_TILE = 128  # image columns of one program, four for each thread of its one warp
_ONE_WARP = {"num_warps": 1}
_MOST_PROGRAMS_ACROSS = 65_535  # CUDA's limit for the second and third dimension of a grid
_LONGEST_SIDE = 1 << 22  # pixels: the tiles of its columns are within that limit


@dataclass(frozen=True, slots=True, eq=False)
class TapTable:
    """How logits are enlarged to an image, on the device.

    Attributes:
        tensor: (4, H + W) int32, see `write_taps`.
        image_hw: H and W.
        used: taps of the three that have weights: 2 or 3.
    """

    tensor: torch.Tensor
    image_hw: tuple[int, int]
    used: int


def write_taps(rows: Taps, columns: Taps, out: npt.NDArray[np.int32]) -> int:
    """Writes both axes into `out` (4, H + W) int32, the image's rows first: each pixel's first tap, and the bits of its
    three float32 weights. Gives how many of the three are in use."""
    height, used = len(rows.first), int(rows.weight.shape[1])
    assert columns.weight.shape[1] == used < TAP_ROWS  # the kernels read as many along either axis
    out[1 + used :] = 0
    for axis, pixels in ((rows, out[:, :height]), (columns, out[:, height:])):
        pixels[0] = axis.first
        pixels[1 : 1 + used] = axis.weight.view(np.int32).T
    return used


class EnlargeKernels:
    """The masks of a decoder's logits, packed or counted, on the device.

    Its buffers are allocated once and belong to one stream at a time.

    Attributes:
        words: (capacity_words,) int32: what `pack` wrote.
        counts: (most_masks, 2) int64: what `count` counted, above `delta` and above `-delta`.
    """

    def __init__(
        self, *, plane_hw: tuple[int, int], capacity_words: int, most_masks: int, device: torch.device | str
    ) -> None:
        """Allocates.

        Args:
            plane_hw: h and w of a mask's logits.
            capacity_words: of `words`; a million are 32 million pixels.
            most_masks: that `count` takes in one call.
            device: where the kernels run.

        Raises:
            OptionError: a number below 1, or too many masks for one launch.
            BackendUnavailableError: no CUDA device, or a CPU and not Triton's interpreter.
        """
        numbers = {"plane": min(plane_hw), "capacity_words": capacity_words, "most_masks": most_masks}
        for name, value in numbers.items():
            if value < 1:
                raise OptionError(f"{name}: expected at least 1, got {value}")
        if most_masks > _MOST_PROGRAMS_ACROSS:
            raise OptionError(f"most_masks: expected at most {_MOST_PROGRAMS_ACROSS}, got {most_masks}")
        device = kernel_device(device, stages.pack_enlarged, what="mask kernels")
        self.words = torch.zeros(capacity_words, dtype=torch.int32, device=device)
        self.counts = torch.zeros((most_masks, 2), dtype=torch.int64, device=device)
        self._plane_hw = plane_hw

    def pack(self, logits: torch.Tensor, chosen: torch.Tensor, table: TapTable, *, begin: int = 0) -> int:
        """Fills `words`, on torch's current stream; it neither allocates nor waits.

        Args:
            logits: (M, h, w) float32 or float16.
            chosen: (K,) int32, which of the M masks; each is below M.
            table: of the image.
            begin: of the K × W columns of the chosen masks, all in a row, the first that is packed.

        Returns:
            where the next call has to begin. As many columns as fit were packed, one after another, `ceil(H / 32)`
            words each; of all K masks together that is what `postprocess.packed` has for boxes of the image's size.

        Raises:
            ShapeError: a tensor's shape, dtype, device or memory layout is not the one above, the image has a side of
                more than 4 million pixels, or not one of its columns fits.
        """
        self._check(logits, chosen, table)
        height, width = table.image_hw
        words_high = -(-height // 32)
        fit = min(len(self.words) // words_high, _MOST_PROGRAMS_ACROSS * _TILE)
        columns = len(chosen) * width
        if not fit or columns >= 1 << 31:
            raise ShapeError(
                f"masks: expected fewer than 2**31 columns of at most {len(self.words)} words, got {columns} of "
                f"{words_high}; ask for fewer masks at a time"
            )
        end = min(columns, begin + fit)
        if begin < end:
            grid = (words_high, triton.cdiv(end - begin, _TILE))
            tensors = (logits, chosen, table.tensor, self.words)
            with launching_on(self.words.device):
                stages.pack_enlarged[grid](*tensors, begin, end, height, width, **self._constants(table), **_ONE_WARP)
        return end

    def count(self, logits: torch.Tensor, chosen: torch.Tensor, table: TapTable, *, delta: float) -> None:
        """Fills the first K rows of `counts`, on torch's current stream; it neither allocates nor waits.

        Arguments and errors as for `pack`; K is at most `most_masks`.
        """
        self._check(logits, chosen, table)
        if len(chosen) > len(self.counts):
            raise ShapeError(f"chosen: expected at most {len(self.counts)} masks, got {len(chosen)}")
        if not len(chosen):
            return
        height, width = table.image_hw
        grid = (triton.cdiv(height, 32), triton.cdiv(width, _TILE), len(chosen))
        tensors = (logits, chosen, table.tensor, self.counts)
        with launching_on(self.words.device):
            self.counts[: len(chosen)].zero_()
            stages.count_enlarged[grid](*tensors, height, width, delta, **self._constants(table), **_ONE_WARP)

    def _constants(self, table: TapTable) -> dict[str, int]:
        return {"TAPS": table.used, "PLANE_H": self._plane_hw[0], "PLANE_W": self._plane_hw[1], "TILE": _TILE}

    def _check(self, logits: torch.Tensor, chosen: torch.Tensor, table: TapTable) -> None:
        if not 1 <= min(table.image_hw) <= max(table.image_hw) <= _LONGEST_SIDE:
            raise ShapeError(f"image: expected sides of 1 to {_LONGEST_SIDE} pixels, got {table.image_hw}")
        for name, tensor, expected, dtypes in (
            ("logits", logits, (len(logits), *self._plane_hw), (torch.float32, torch.float16)),
            ("chosen", chosen, (chosen.numel(),), (torch.int32,)),
            ("taps", table.tensor, (TAP_ROWS, sum(table.image_hw)), (torch.int32,)),
        ):
            check_tensor(name, tensor, expected, dtypes, self.words.device)


def ahead_of_time() -> Iterator[tuple[str, Any, dict[str, str], dict[str, int], dict[str, int]]]:
    """For each kernel, of SAM 2 (2 taps) and SAM (3): name, kernel, signature, constexprs, options (see `cubins`)."""
    types = {"chosen": "*i32", "taps": "*i32", "words": "*i32", "counts": "*i64", "delta": "fp32"}
    types |= dict.fromkeys(("begin", "end", "height", "width"), "i32")
    for kernel in (stages.pack_enlarged, stages.count_enlarged):
        for dtype in ("fp32", "fp16"):
            for used in (2, 3):
                constants = {"TAPS": used, "PLANE_H": 256, "PLANE_W": 256, "TILE": _TILE}
                known = types | {"logits": f"*{dtype}"}
                signature = {argument: known[argument] for argument in kernel.arg_names if argument not in constants}
                yield f"{kernel.__name__}_{dtype}_{used}_taps", kernel, signature, constants, _ONE_WARP
