"""What a served model takes and gives, in arrays: the one definition, for the client, the stages and config.pbtxt.

`B` requests' images that the server put together, `K` objects of the fullest image, at least one row. Only numbers go
over the wire: NVIDIA's Python stub for this server (pytriton 0.7.0) was built for NumPy 1, handles byte strings of
NumPy 2 wrongly, and refuses empty arrays.

An image goes as it is encoded, with zeros behind it up to a multiple of `BUCKET`, so that images of about one size have
one shape, which is what the server puts together. Options of a request (`conf`, `iou`, …) go as a tensor of their own,
not as the request's parameters: the server's cache (Triton 2.51) looks at tensors alone, and would give one request the
answer for another one's options. A fault of a whole request comes back as the text of the server's error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast import errors
from visionfast.errors import ImageError, ImageTooLargeError, OptionError, ServerError, VisionfastError
from visionfast.postprocess.masks import InstanceMasks, run_lengths
from visionfast.results import Detections
from visionfast.types import Task

__all__ = [
    "BUCKET",
    "OPTIONS",
    "STAGES",
    "WireTensor",
    "fault_of",
    "fault_text",
    "inputs_of",
    "outputs_of",
    "pack_answers",
    "pack_image",
    "pack_options",
    "pack_problems",
    "unpack_answers",
    "unpack_image",
    "unpack_options",
    "unpack_problem",
]

BUCKET = 1 << 16
"""Bytes."""

_OPTIONS_BUCKET = 64  # so that requests with options of about one length are put together too

STAGES = ("decode", "preprocess", "engine", "postprocess")
"""Columns of `stage_ns`; -1 where a stage was not reached."""

OPTIONS = ("conf", "iou", "max_det", "classes", "class_agnostic")
"""Of a request; what each means is said at `pipeline.Detector`."""

_MOST_BYTES = 2**31 - 1 - BUCKET  # `length` is an int32, and so is the size of a gRPC message

_KINDS: dict[str, type[ImageError]] = {
    error.kind: error
    for error in (
        ImageError,
        errors.ImageNotFoundError,
        errors.ImageFormatError,
        errors.ImageTruncatedError,
        errors.ImageTooLargeError,
    )
}

_DATATYPES = {"float16": "FP16", "float32": "FP32"}


@dataclass(frozen=True, slots=True)
class WireTensor:
    """One tensor of a served model.

    Attributes:
        name: as in config.pbtxt.
        dtype: NumPy's name.
        dims: without the batch, -1 where they vary.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]

    @property
    def datatype(self) -> str:
        """The server's name for the dtype: `FP32`."""
        return _DATATYPES.get(self.dtype, self.dtype.upper())


def inputs_of(task: Task) -> tuple[WireTensor, ...]:
    """What every served model takes.

    `image` (B, n) uint8; `length` (B, 1) int32, the bytes of it that count; `options` (B, m) uint8, JSON of `OPTIONS`,
    zeros behind it, all zeros for none; of one request, all rows are the same.
    """
    return (
        WireTensor("image", "uint8", (-1,)),
        WireTensor("length", "int32", (1,)),
        WireTensor("options", "uint8", (-1,)),
    )


def outputs_of(task: Task) -> tuple[WireTensor, ...]:
    """What a model of this task gives.

    `count` (B, 1) int32; `image_hw` (B, 2) int32; `xyxy` (B, K, 4) float32; `confidence` (B, K) float32; `class_id`
    (B, K) int32; `stage_ns` (B, S) int64 of `STAGES`; `problem` (B, m) uint8, what is wrong with the image as UTF-8 of
    JSON, zeros behind it, all zeros where nothing is. For `segment` also `mask` (B, m) uint8, the COCO run lengths of
    one object after the other, and `mask_ends` (B, K) int32, where each ends.
    """
    masks = (WireTensor("mask", "uint8", (-1,)), WireTensor("mask_ends", "int32", (-1,)))
    return (
        WireTensor("count", "int32", (1,)),
        WireTensor("image_hw", "int32", (2,)),
        WireTensor("xyxy", "float32", (-1, 4)),
        WireTensor("confidence", "float32", (-1,)),
        WireTensor("class_id", "int32", (-1,)),
        WireTensor("stage_ns", "int64", (len(STAGES),)),
        WireTensor("problem", "uint8", (-1,)),
        *(masks if task == "segment" else ()),
    )


# ---- requests -----------------------------------------------------------------------------------------------------


def pack_image(encoded: bytes, options: bytes = b"") -> dict[str, npt.NDArray[Any]]:
    """One image as a request of one: `image` (1, n), `length` (1, 1), and `options` (1, m) from `pack_options`.

    Raises:
        ImageTooLargeError: 2 GiB do not fit into a message.
    """
    if len(encoded) > _MOST_BYTES:
        raise ImageTooLargeError("bytes", f"expected at most {_MOST_BYTES} bytes, got {len(encoded)}; shrink the file")
    return {
        "image": _pack_bytes([encoded], BUCKET),
        "length": np.array([[len(encoded)]], np.int32),
        "options": _pack_bytes([options], _OPTIONS_BUCKET),
    }


def unpack_image(image: npt.NDArray[np.uint8], length: npt.NDArray[np.int32]) -> bytes:
    """(n,) and (1,) → the encoded image.

    Raises:
        ImageError: the length is not within the image.
    """
    if image.ndim != 1 or image.dtype != np.uint8 or length.size != 1:
        raise ImageError("bytes", f"expected (n,) uint8 and one length, got {image.shape} {image.dtype.name}")
    size = int(length.reshape(-1)[0])
    if not 0 <= size <= len(image):
        raise ImageError("bytes", f"length: expected 0 to {len(image)}, the bytes that were sent, got {size}")
    return image[:size].tobytes()


def pack_options(**options: Any) -> bytes:
    """Every one of `OPTIONS` that is not `None`, as JSON; nothing for none.

    They are checked where the model is: a wrong one is that request's `OptionError`.

    Raises:
        TypeError: a value that JSON does not have.
    """
    given = {name: value for name, value in sorted(options.items()) if value is not None}
    if "classes" in given:
        given["classes"] = list(given["classes"])
    return json.dumps(given).encode() if given else b""


def unpack_options(options: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """(B, m) → what `pack_options` was given, not checked any further.

    Raises:
        OptionError: it is no JSON object, or the rows differ.
    """
    if (options[1:] != options[:1]).any():
        raise OptionError("options: expected the same for every image of a request, got several")
    text = options[0].tobytes().rstrip(b"\0")
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise OptionError(f'options: expected a JSON object, such as {{"conf": 0.5}}, got {text[:40]!r}')
    return given


def fault_text(error: VisionfastError) -> str:
    """What is wrong with a whole request, as the text of the server's error; `fault_of` reads it."""
    return f"visionfast.{type(error).__name__}: {error}"


def fault_of(text: str) -> VisionfastError | None:
    """The error that a stage gave as `fault_text`, out of the server's text round it; `None`: it is none of ours."""
    found = re.search(r"visionfast\.(\w+): (.*)", text, re.DOTALL)
    kind = getattr(errors, found[1], None) if found else None
    # The server's text may be any: a name in `errors` need not be a class.
    known = isinstance(kind, type) and issubclass(kind, VisionfastError) and not issubclass(kind, ImageError)
    if found is None or kind is None or not known:
        return None
    made: VisionfastError = kind(found[2])
    return made


# ---- answers ------------------------------------------------------------------------------------------------------


def pack_answers(answers: Sequence[Detections | ImageError], task: Task) -> dict[str, npt.NDArray[Any]]:
    """The answers for B images, as the model gives them; every array owns its memory and none is empty."""
    assert answers, "the server asks for at least one image"
    b = len(answers)
    k = max(1, *(len(answer) if isinstance(answer, Detections) else 0 for answer in answers), 1)
    packed: dict[str, npt.NDArray[Any]] = {
        "count": np.zeros((b, 1), np.int32),
        "image_hw": np.zeros((b, 2), np.int32),
        "xyxy": np.zeros((b, k, 4), np.float32),
        "confidence": np.zeros((b, k), np.float32),
        "class_id": np.zeros((b, k), np.int32),
        "stage_ns": np.full((b, len(STAGES)), -1, np.int64),
        "problem": pack_problems([answer if isinstance(answer, ImageError) else None for answer in answers]),
    }
    for i, answer in enumerate(answers):
        if isinstance(answer, ImageError):
            continue
        n = len(answer)
        packed["count"][i] = n
        packed["image_hw"][i] = answer.image_hw
        packed["xyxy"][i, :n] = answer.xyxy
        packed["confidence"][i, :n] = answer.confidence
        packed["class_id"][i, :n] = answer.class_id
        packed["stage_ns"][i] = [answer.stage_ns.get(stage, -1) for stage in STAGES]
    if task == "segment":
        packed |= _pack_masks([_counts(answer) for answer in answers], k)
    return packed


def _counts(answer: Detections | ImageError) -> tuple[bytes, ...]:
    if isinstance(answer, ImageError):
        return ()
    assert answer.mask is not None, "a segmenter's objects have masks"
    return answer.mask.counts


def _pack_masks(counts: Sequence[tuple[bytes, ...]], k: int) -> dict[str, npt.NDArray[Any]]:
    joined = [b"".join(some) for some in counts]
    ends = np.zeros((len(counts), k), np.int32)
    for row, some in zip(ends, counts, strict=True):
        row[: len(some)] = np.cumsum([len(one) for one in some])
    return {"mask": _pack_bytes(joined), "mask_ends": ends}


def pack_problems(problems: Sequence[ImageError | None]) -> npt.NDArray[np.uint8]:
    """(B, m) uint8: `problem`, for B images; `unpack_problem` reads one row."""
    return _pack_bytes(
        [
            b""
            if error is None
            else json.dumps({"kind": error.kind, "source": error.source, "reason": error.reason}).encode()
            for error in problems
        ]
    )


def _pack_bytes(rows: Sequence[bytes], bucket: int = 1) -> npt.NDArray[np.uint8]:
    """(B, m) uint8, m the least multiple of `bucket`, but 0; zeros behind each."""
    size = max(1, *(-(-len(row) // bucket) for row in rows), 1) * bucket
    packed = np.zeros((len(rows), size), np.uint8)
    for row, content in zip(packed, rows, strict=True):
        row[: len(content)] = np.frombuffer(content, np.uint8)
    return packed


def unpack_answers(arrays: Mapping[str, npt.NDArray[Any]], task: Task) -> list[Detections | ImageError]:
    """The inverse of `pack_answers`: the same values to the bit, and errors of the same type and text.

    Raises:
        ServerError: the arrays contradict one another: they are not a visionfast model's.
    """
    _check_arrays(arrays, task)
    return [
        unpack_problem(arrays["problem"][i]) or _unpack_objects(arrays, i, task) for i in range(len(arrays["count"]))
    ]


def unpack_problem(row: npt.NDArray[np.uint8]) -> ImageError | None:
    """One image's row of `problem`.

    Raises:
        ServerError: it is not what `pack_problems` writes.
    """
    text = row.tobytes().rstrip(b"\0")
    if not text:
        return None
    try:
        told = json.loads(text)
        kind, source, reason = told["kind"], told["source"], told["reason"]
        if not isinstance(source, str) or not isinstance(reason, str):
            raise TypeError("expected text")
        return _KINDS[kind](source, reason)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ServerError(f"problem: expected kind, source and reason as JSON, got {text[:40]!r}; {_OURS}") from error


_OURS = "is it a model that `visionfast deploy` wrote, of this release?"


def _check_arrays(arrays: Mapping[str, npt.NDArray[Any]], task: Task) -> None:
    """Names, dtypes and shapes: one B for all, one K for all that have one."""
    b = k = None
    for tensor in outputs_of(task):
        if (array := arrays.get(tensor.name)) is None:
            raise ServerError(f"{tensor.name}: expected it among the answers, got {', '.join(sorted(arrays))}; {_OURS}")
        b = len(array) if b is None and array.ndim else b
        if tensor.name == "xyxy" and array.ndim == 3:
            k = array.shape[1]
        free = array.shape[1:2] if tensor.name in ("problem", "mask") else (k,)
        expected = (b, *(free[0] if size == -1 and free else size for size in tensor.dims))
        if array.dtype.name != tensor.dtype or array.shape != expected:
            shown = f"({', '.join('…' if size is None else str(size) for size in expected)})"
            raise ServerError(
                f"{tensor.name}: expected {shown} {tensor.dtype}, got {array.shape} {array.dtype.name}; {_OURS}"
            )


def _unpack_objects(arrays: Mapping[str, npt.NDArray[Any]], i: int, task: Task) -> Detections:
    n, k = int(arrays["count"][i, 0]), arrays["xyxy"].shape[1]
    height, width = (int(pixels) for pixels in arrays["image_hw"][i])
    if not 0 <= n <= k:
        raise ServerError(f"count: expected 0 to {k}, the objects that were sent, got {n}; {_OURS}")
    if height < 1 or width < 1:
        raise ServerError(f"image_hw: expected at least 1×1 pixels, got {width}×{height}; {_OURS}")
    # Copies: what the client library gives may be a view of a message, read-only.
    return Detections(
        xyxy=arrays["xyxy"][i, :n].copy(),
        confidence=arrays["confidence"][i, :n].copy(),
        class_id=arrays["class_id"][i, :n].astype(np.int64),
        image_hw=(height, width),
        mask=_unpack_masks(arrays["mask"][i], arrays["mask_ends"][i, :n], (height, width))
        if task == "segment"
        else None,
        stage_ns={stage: int(ns) for stage, ns in zip(STAGES, arrays["stage_ns"][i], strict=True) if ns >= 0},
    )


def _unpack_masks(
    joined: npt.NDArray[np.uint8], ends: npt.NDArray[np.int32], image_hw: tuple[int, int]
) -> InstanceMasks:
    starts = np.concatenate(([0], ends))[:-1]
    if len(ends) and (np.any(ends <= starts) or ends[-1] > len(joined)):
        raise ServerError(f"mask_ends: expected rising ends within the {len(joined)} bytes of mask; {_OURS}")
    counts = tuple(joined[start:end].tobytes() for start, end in zip(starts, ends, strict=True))
    if not all(_covers(one, image_hw[0] * image_hw[1]) for one in counts):
        raise ServerError(f"mask: expected run lengths of an image of {image_hw[1]}×{image_hw[0]} pixels; {_OURS}")
    return InstanceMasks(counts, image_hw)


def _covers(counts: bytes, pixels: int) -> bool:
    """Whether these are run lengths that make up so many pixels."""
    symbols = np.frombuffer(counts, np.uint8)
    if symbols.min() < 48 or symbols.max() > 111 or symbols[-1] >= 80:  # its last number goes on
        return False
    lengths = run_lengths(counts)
    if lengths.min() < 0 or lengths.max() > pixels:
        return False
    ends = np.cumsum(lengths)  # one that passed 64 bits would have been negative first
    return bool(ends.min() >= 0 and ends[-1] == pixels)
