"""One image's request and its answer, whatever carries them: sources as encoded bytes, a server's words as errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from visionfast.errors import DeadlineError, ImageError, OptionError, QueueFullError, ServerError, VisionfastError
from visionfast.preprocess.decode import read_image_file
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.serving.wire import WireTensor, fault_of, inputs_of, pack_options
from visionfast.sessions import ImageSource, pixels_of

__all__ = [
    "Answer",
    "Options",
    "Priority",
    "PromptOptions",
    "Request",
    "Terms",
    "as_json",
    "encoded_image",
    "just_large_enough",
    "kept",
    "late",
    "refusal",
    "shown_name",
]

Priority: TypeAlias = Literal["online", "offline"]
Answer: TypeAlias = "Detections | ImageError | ServerError"
"""One image's: what was found, what is wrong with the image, or why its request was refused."""

_LEVELS: dict[str, int] = {"online": 1, "offline": 2}  # the server answers level 1 first
_DEFAULT_LIMITS = DecodeLimits()


class Options(TypedDict, total=False):
    """What a call may ask for.

    Attributes:
        conf, iou, max_det, classes, class_agnostic: as for `Detector`; default: what the model was deployed with.
        priority: `online` requests are answered before `offline` ones; default: `online`.
        deadline_ms: milliseconds, from when an image is sent, after which its answer is of no use: the server does not
            begin with it any more then. Default: the client's `timeout`.
    """

    conf: float
    iou: float
    max_det: int
    classes: Sequence[int | str]
    class_agnostic: bool
    priority: Priority
    deadline_ms: float


class PromptOptions(TypedDict, total=False):
    """What a prompt segmenter may be asked about an image.

    Attributes:
        points, boxes, mask_input, logits: as for `PromptSegmenter.segment`.
        multimask: as there; default: what the model was deployed with.
        priority, deadline_ms: as in `Options`.
    """

    points: Any
    boxes: Any
    mask_input: npt.NDArray[np.float32] | None
    multimask: bool | None
    logits: bool
    priority: Priority
    deadline_ms: float | None


_OF_DETECTORS = tuple(Options.__annotations__)


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for every image of a call.

    Attributes:
        options: of `wire.pack_options`.
        priority: level, 1 before 2.
        patience_s: seconds after which an answer is of no use, counted from when the image is sent.
        raises: an image's error is raised, not returned.
        given: the options before they were packed.
    """

    options: bytes
    priority: int
    patience_s: float
    raises: bool
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def is_offline(self) -> bool:
        return self.priority == _LEVELS["offline"]

    @classmethod
    def of(
        cls, on_error: str, options: Mapping[str, Any], timeout: float, known: Sequence[str] = _OF_DETECTORS
    ) -> Terms:
        """The terms of a call with these options, which are among the known; `None` is as good as none.

        Raises:
            OptionError: no server could take them. What a model allows is for its server to say.
        """
        if on_error not in ("raise", "return"):
            raise OptionError(f"on_error: expected 'raise' or 'return', got {on_error!r}")
        if unknown := sorted(set(options) - set(known)):
            raise OptionError(f"option {unknown[0]!r}: expected one of {', '.join(known)}")
        asked = {name: _plain(value) for name, value in options.items() if value is not None}
        priority, deadline_ms = asked.pop("priority", "online"), asked.pop("deadline_ms", None)
        if not isinstance(priority, str) or priority not in _LEVELS:
            raise OptionError(f"priority: expected {' or '.join(map(repr, _LEVELS))}, got {priority!r}")
        patience_s = timeout if deadline_ms is None else min(timeout, _milliseconds(deadline_ms) / 1e3)
        if isinstance(classes := asked.get("classes"), (str, bytes)):
            raise OptionError(f"classes: expected a list of names or ids, got {classes!r}")
        try:
            if classes is not None:
                asked["classes"] = [_plain(c) for c in classes]
            return cls(pack_options(**asked), _LEVELS[priority], patience_s, on_error == "raise", asked)
        except TypeError as error:  # no iterable, or nothing that JSON has
            raise OptionError(f"options: expected numbers, class names and truth values; {error}") from None


def _milliseconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise OptionError(f"deadline_ms: expected more than 0 milliseconds, got {value!r}")
    return value


def _plain(value: Any) -> Any:
    """A NumPy scalar as Python's."""
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One image on its way.

    Attributes:
        arrays: of `wire.pack_image`.
        terms: of its call.
        tensors: what the arrays are.
        outputs: what of the answer is wanted; `None`: all of it.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    terms: Terms
    tensors: tuple[WireTensor, ...] = inputs_of("detect")
    outputs: tuple[str, ...] | None = None

    @property
    def queue_us(self) -> int:
        """Microseconds after which the server need not begin with it."""
        return max(1, round(self.terms.patience_s * 1e6))


def encoded_image(source: ImageSource, index: int | None = None, *, limits: DecodeLimits = _DEFAULT_LIMITS) -> bytes:
    """A source as a file's bytes: of a path or of bytes as they are, of pixels as a binary PPM.

    PPM is lossless, and next to nothing to write and read: a picture of 1280×720 takes 0.4 ms and 3 ms where PNG at its
    lowest level takes 44 ms and 29 ms; it is three times as large (2.8 MB to 0.9 MB).

    Args:
        source: a path, an encoded image, a uint8 RGB array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), or an
            `Nv12Frame`.
        index: of the image in what the caller gave, for the errors; `None` where it is the only one.
        limits: what the image may cost; of pixels only their number counts, not what they take as a PPM.

    Raises:
        ImageError: the file cannot be read, the array is no image, or it is over the limits.
    """
    if isinstance(source, (str, os.PathLike)):
        return read_image_file(source, limits=limits)
    name = shown_name(source, index)
    if isinstance(source, (bytes, bytearray, memoryview)):
        encoded = bytes(source)
        limits.check_bytes(len(encoded), name)
        return encoded
    pixels = pixels_of(source, limits=limits, name=name)  # (H, W, 3) u8 RGB
    height, width = pixels.shape[:2]
    return b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()


def just_large_enough(encoded: bytes) -> DecodeLimits:
    """Limits for an image that was held to the model's already: as a PPM it may be larger than a file may be."""
    return DecodeLimits(max_bytes=len(encoded))


def shown_name(source: ImageSource, index: int | None) -> str:
    """What errors call an image: its path, else its place in what the caller gave, or `image` where it is the only
    one."""
    if isinstance(source, (str, os.PathLike)):
        return os.fsdecode(source)
    return "image" if index is None else f"image {index}"


def kept(error: ImageError | ServerError, terms: Terms) -> ImageError | ServerError:
    """An error that is one request's, to be returned in its image's place; raises it where it is not, or by the terms.

    That one request was refused or late says nothing of the next one; that there is no server does.
    """
    if terms.raises or not isinstance(error, (ImageError, QueueFullError, DeadlineError)):
        raise error
    return error


def refusal(where: str, model: str, text: str | None) -> VisionfastError:
    """A server's error text as the error to raise.

    Args:
        where: the server's address.
        model: its name there.
        text: as Triton 2.51 words it, or a stage of ours by `wire.fault_text`.
    """
    line = " ".join((text or "it gave no reason").split())
    if (fault := fault_of(line)) is not None:
        return (
            type(fault)(f"{where}: {model}: {fault}") if isinstance(fault, (QueueFullError, DeadlineError)) else fault
        )
    if "Exceeds maximum queue size" in line:
        return QueueFullError(f"{where}: {model}: too many requests wait already; send fewer at a time, or try later")
    if "Request timeout expired" in line:
        return DeadlineError(f"{where}: {model}: the request's time ran out while it waited for its turn")
    if "has no available versions" in line:
        line = f"the server is ending, or does not serve it any more ({line})"
    return ServerError(f"{where}: {model}: {line}")


def late(where: str, model: str, patience_s: float) -> DeadlineError:
    """No answer came in time."""
    return DeadlineError(f"{where}: {model}: no answer within {patience_s * 1e3:g} ms")


def as_json(text: str) -> Any:
    """Raises `ValueError`; hostile depths are one as well."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
