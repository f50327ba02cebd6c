"""A batch's predictions → the objects in each image, on the GPU, without a word to the host.

Four launches of fixed grids and fixed buffers, so that a CUDA graph can hold them; what depends on the data, the
number of candidates, stays on the device. `candidates` has the first two, `suppress` the others:

    select    each anchor's best class, and those that are confident enough
    rank      sorts them, by descending confidence, ties by ascending anchor
    overlap   which of them overlap too much, all pairs at once
    suppress  who stays; boxes in original pixels; what `layout` calls Found

The results are those of `select_candidates`, `nms` and `unletterbox_boxes` to the last bit (-0.0 may be 0.0).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from visionfast.errors import OptionError, ShapeError
from visionfast.kernel_device import kernel_device, launching_on
from visionfast.postprocess.boxes import MAX_CANDIDATES
from visionfast.postprocess.detections import check_options
from visionfast.postprocess.kernels.candidates import rank, select
from visionfast.postprocess.kernels.layout import COLUMNS, found_shape
from visionfast.postprocess.kernels.suppress import overlap, suppress
from visionfast.postprocess.nms import _float32_at_most

__all__ = ["DetectionKernels", "ahead_of_time"]

_BLOCK = 256  # candidates that one step of the suppression settles
_MAX_SIDE = 4096  # candidates all of whose pairs are compared ahead of the suppression: 2 MiB of bits a slot


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How the work is cut up, which changes no result.

    Attributes:
        programs: of a kernel that shares its work out, over all slots.
        scores: of `select`'s tile; at least 32 anchors of it lie side by side in memory.
        mine, others: candidates of `rank`'s tile, and those they are compared with.
        rows: candidates of `overlap`'s tile, within one block, which are compared with a block.
        words: of kept candidates' bits, which `suppress` looks up at once.
        judges: kept candidates that it compares with a block at once.
    """

    programs: int
    scores: int
    mine: int
    others: int
    rows: int
    words: int
    judges: int


# About as many programs as a large GPU holds at once; tiles of 16 or 32 elements a thread.
_GPU = _Tiles(programs=1024, scores=2048, mine=8, others=256, rows=16, words=32, judges=8)
# The interpreter's time goes by the number of operations, not by their width, and programs run one after another.
_INTERPRETER = _Tiles(programs=2, scores=1 << 16, mine=256, others=1024, rows=256, words=128, judges=64)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the kernels are compiled for."""

    anchors: int
    num_classes: int
    coefficients: int
    max_det: int = 300
    filtered: bool = False
    class_agnostic: bool = False
    max_candidates: int = MAX_CANDIDATES
    tiles: _Tiles = _GPU

    @property
    def rows(self) -> int:
        """Of one image's predictions."""
        return 4 + self.num_classes + self.coefficients

    @property
    def class_bits(self) -> int:
        return (self.num_classes - 1).bit_length()

    @property
    def capacity(self) -> int:
        """Candidates that are sorted."""
        return min(self.anchors, self.max_candidates)

    @property
    def side(self) -> int:
        """Of the square of pairs: whole blocks."""
        return min(_MAX_SIDE, -(-self.capacity // _BLOCK) * _BLOCK)

    def constexprs(self) -> dict[str, dict[str, Any]]:
        """Of each kernel."""
        tiles, class_tile = self.tiles, min(64, 1 << self.class_bits)
        raw = {"ANCHORS": self.anchors, "ROWS": self.rows, "CLASS_BITS": self.class_bits}
        pairs = {"CAPACITY": self.capacity, "SIDE": self.side, "BLOCK": _BLOCK}
        return {
            "select": {
                **raw,
                "CLASSES": self.num_classes,
                "FILTER": self.filtered,
                "CLASS_TILE": class_tile,
                "BLOCK": min(tiles.scores // class_tile, tiles.scores // 8),
            },
            "rank": {
                **raw,
                "CAPACITY": self.capacity,
                "AGNOSTIC": self.class_agnostic,
                "MINE": tiles.mine,
                "OTHERS": tiles.others,
            },
            "overlap": {**pairs, "TILE": min(tiles.rows, _BLOCK)},
            "suppress": {
                **pairs,
                "CLASS_BITS": self.class_bits,
                "MAX_DET": self.max_det,
                "WORDS": tiles.words,
                "JUDGES": tiles.judges,
            },
        }

    def grids(self, batch: int) -> dict[str, tuple[int, ...]]:
        """Of each kernel."""
        tiles, programs = self.tiles, max(1, self.tiles.programs // batch)
        comparisons = triton.cdiv(self.capacity, min(tiles.rows, _BLOCK)) * triton.cdiv(self.capacity, _BLOCK)
        return {
            "select": (triton.cdiv(self.anchors, self.constexprs()["select"]["BLOCK"]), batch),
            "rank": (min(programs, triton.cdiv(self.anchors, tiles.mine)), batch),
            "overlap": (min(programs, comparisons), batch),
            "suppress": (batch,),
        }


_KERNELS = {"select": select, "rank": rank, "overlap": overlap, "suppress": suppress}
_EXACT = {"enable_fp_fusion": False}  # a fused multiply-add rounds once where NumPy rounds twice
_OPTIONS: dict[str, dict[str, Any]] = {
    "select": {"num_warps": 4, **_EXACT},
    "rank": {"num_warps": 4, **_EXACT},
    "overlap": {"num_warps": 4, **_EXACT},
    # One program a slot, so registers are plenty; unasked, ptxas spills some to make room for a second one beside it.
    "suppress": {"num_warps": 8, "maxnreg": 255, **_EXACT},
}
_TYPES = {
    "predictions": "*fp32",
    "placement": "*fp32",
    "wanted": "*u8",
    "keys": "*i64",
    "counts": "*i32",
    "conf": "fp32",
    "sorted_keys": "*i64",
    "boxes": "*fp32",
    "labels": "*i32",
    "square": "*i32",
    "diagonal": "*i32",
    "kept": "*i32",
    "kept_bits": "*i32",
    "found": "*i32",
    "iou": "fp32",
}  # of the kernels' arguments, which have one name wherever they occur


class DetectionKernels:
    """Finds the objects of a batch; holds the buffers, allocated once.

    Attributes:
        found: (B, 1 + max_det, 8) int32, as `layout` says: of the last `enqueue`, once the stream is that far.
    """

    def __init__(
        self,
        *,
        batch: int,
        anchors: int,
        num_classes: int,
        coefficients: int,
        conf: float,
        iou: float,
        max_det: int = 300,
        classes: Sequence[int] | None = None,
        class_agnostic: bool = False,
        device: str | torch.device = "cuda",
        max_candidates: int = MAX_CANDIDATES,
    ) -> None:
        """Allocates the buffers, and compiles and loads the kernels, which a graph's capture must find loaded.

        Args:
            batch: B, slots.
            anchors: A.
            num_classes: C.
            coefficients: M, mask coefficients below the scores, which are passed over; 0 for a detector.
            conf, iou, max_det, classes, class_agnostic: as for `postprocess.postprocess`.
            device: of all tensors. `cpu` is Triton's interpreter: slow, and right to the bit.
            max_candidates: the most confident ones, at most so many.

        Raises:
            OptionError: an option is out of its range, or the predictions are too large for one slot.
            BackendUnavailableError: no CUDA device, or a CPU and not Triton's interpreter.
        """
        for name, value, least in (
            ("batch", batch, 1),
            ("anchors", anchors, 1),
            ("num_classes", num_classes, 1),
            ("coefficients", coefficients, 0),
            ("max_candidates", max_candidates, 1),
        ):
            if value < least:
                raise OptionError(f"{name}: expected at least {least}, got {value}")
        check_options(num_classes=num_classes, conf=conf, iou=iou, max_det=max_det, classes=classes)
        self._batch, self._device = batch, kernel_device(device, select, what="detection kernels")
        self._sizes = sizes = _Sizes(
            anchors=anchors,
            num_classes=num_classes,
            coefficients=coefficients,
            max_det=max_det,
            filtered=classes is not None,
            class_agnostic=class_agnostic,
            max_candidates=max_candidates,
            tiles=_INTERPRETER if self._device.type == "cpu" else _GPU,
        )
        if max(anchors << sizes.class_bits, anchors * sizes.rows) > 2**31 - 1:
            raise OptionError(
                f"anchors: expected anchors × classes below 2^31 (and anchors × rows), got {anchors} anchors, "
                f"{num_classes} classes, {sizes.rows} rows: use a smaller input"
            )
        constexprs, grids = sizes.constexprs(), sizes.grids(batch)
        self._kernels = {name: kernel[grids[name]] for name, kernel in _KERNELS.items()}
        self._keywords = {name: constexprs[name] | _OPTIONS[name] for name in _KERNELS}
        self._conf = float(np.float32(conf))
        self._iou = float(_float32_at_most(iou))

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((batch, *shape), dtype=dtype, device=self._device)

        self.found = torch.zeros(found_shape(batch, max_det), dtype=torch.int32, device=self._device)
        wanted = torch.tensor([classes is None or c in classes for c in range(num_classes)], dtype=torch.uint8)
        self._wanted = wanted.to(self._device)  # (C,)
        self._counts = torch.zeros(batch, dtype=torch.int32, device=self._device)
        self._keys = empty(anchors, dtype=torch.int64)
        self._sorted_keys = empty(sizes.capacity, dtype=torch.int64)
        self._boxes = empty(4, sizes.capacity, dtype=torch.float32)
        self._labels = empty(sizes.capacity, dtype=torch.int32)
        self._square = empty(sizes.side, sizes.side // 32, dtype=torch.int32)
        self._diagonal = empty(sizes.capacity, _BLOCK // 32, dtype=torch.int32)
        self._kept = empty(max_det, dtype=torch.int32)
        self._kept_bits = empty(sizes.side // 32, dtype=torch.int32)

        no_images = torch.zeros((batch, COLUMNS), dtype=torch.float32, device=self._device)
        self._launch(self._boxes, no_images)  # without images no kernel reads its predictions
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # whatever stream comes next finds the buffers filled

    def enqueue(self, predictions: torch.Tensor, placement: torch.Tensor) -> None:
        """Puts the work on the device's current stream: no allocation, no wait, nothing that depends on the data.

        Args:
            predictions: (B, 4 + C + M, A) float32, contiguous.
            placement: (B, 8) float32, contiguous, as `layout` says; a slot of zeros has no image, and no objects.

        Raises:
            ShapeError: a tensor's shape, dtype, device, strides or alignment are not those.
        """
        rows, anchors = self._sizes.rows, self._sizes.anchors
        for name, tensor, shape in (
            ("predictions", predictions, (self._batch, rows, anchors)),
            ("placement", placement, (self._batch, COLUMNS)),
        ):
            if (
                tuple(tensor.shape) != shape
                or tensor.dtype != torch.float32
                or tensor.device != self._device
                or not tensor.is_contiguous()
                or tensor.data_ptr() % 16  # a launch would compile the kernels anew for such an address
            ):
                raise ShapeError(
                    f"{name}: expected {shape} torch.float32 on {self._device}, contiguous, at a multiple of 16 bytes, "
                    f"got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {tensor.stride()}, "
                    f"at {tensor.data_ptr() % 16} bytes after one"
                )
        self._launch(predictions, placement)

    def _launch(self, predictions: torch.Tensor, placement: torch.Tensor) -> None:
        pairs = (self._boxes, self._labels, self._counts, self._square, self._diagonal)
        arguments = {
            "select": (predictions, placement, self._wanted, self._keys, self._counts, self._conf),
            "rank": (predictions, self._keys, self._counts, self._sorted_keys, self._boxes, self._labels),
            "overlap": (*pairs, self._iou),
            "suppress": (self._sorted_keys, *pairs, placement, self._kept, self._kept_bits, self.found, self._iou),
        }
        with launching_on(self._device):
            try:
                for name, kernel in self._kernels.items():
                    kernel(*arguments[name], **self._keywords[name])
            except BaseException:  # Ctrl-C among them: the last kernel would have set the counts back
                with contextlib.suppress(Exception):
                    self._counts.zero_()
                raise


def ahead_of_time() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """For `visionfast.cubins`: each kernel, in sizes that matter: (name, kernel, signature, constexprs, options)."""
    for case, anchors, num_classes, coefficients, filtered, class_agnostic in (
        ("8400x80", 8400, 80, 0, False, False),
        ("8400x80+32", 8400, 80, 32, True, False),
        ("33600x80", 33600, 80, 0, False, True),
        ("8400x1000", 8400, 1000, 0, False, False),
        ("2100x1", 2100, 1, 0, False, False),
    ):
        sizes = _Sizes(anchors, num_classes, coefficients, filtered=filtered, class_agnostic=class_agnostic)
        for name, constexprs in sizes.constexprs().items():
            kernel = _KERNELS[name]
            signature = {argument: _TYPES[argument] for argument in kernel.arg_names if argument not in constexprs}
            yield f"detections {name} {case}", kernel, signature, constexprs, _OPTIONS[name]
