"""One image's request and its answer, whatever carries them: sources as encoded bytes, a server's words as errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from visionfast.errors import DeadlineError, ImageError, OptionError, QueueFullError, ServerError, VisionfastError
from visionfast.preprocess.decode import read_image_file
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.serving.wire import fault_of, pack_image, pack_options, unpack_answers
from visionfast.sessions import ImageSource, pixels_of, source_name
from visionfast.types import Task

__all__ = ["Answer", "Priority", "Request", "Terms", "answer_of", "encoded_image", "refusal", "request_of"]

Priority: TypeAlias = Literal["online", "offline"]
Answer: TypeAlias = "Detections | ImageError | ServerError"
"""One image's: what was found, what is wrong with the image, or why its request was refused."""

_LEVELS: dict[str, int] = {"online": 1, "offline": 2}  # the server answers level 1 first
_LIMITS = DecodeLimits()


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for every image of a call.

    Attributes:
        parameters: of `wire.pack_options`.
        priority: level, 1 before 2.
        patience_s: seconds after which an answer is of no use, counted from when the image is sent.
    """

    parameters: Mapping[str, str]
    priority: int
    patience_s: float

    @classmethod
    def of(
        cls,
        *,
        conf: float | None,
        iou: float | None,
        max_det: int | None,
        classes: Sequence[int | str] | None,
        class_agnostic: bool | None,
        priority: Priority,
        deadline_ms: float | None,
        timeout: float,
    ) -> Terms:
        """Raises `OptionError` for what no server could take; what a model allows is for its server to say."""
        if priority not in _LEVELS:
            raise OptionError(f"priority: expected {' or '.join(map(repr, _LEVELS))}, got {priority!r}")
        if deadline_ms is not None and not 0 < deadline_ms < float("inf"):
            raise OptionError(f"deadline_ms: expected more than 0 milliseconds, got {deadline_ms!r}")
        if isinstance(classes, str):
            raise OptionError(f"classes: expected a list of names or ids, got {classes!r}")
        options = {
            "conf": conf,
            "iou": iou,
            "max_det": max_det,
            "classes": None if classes is None else [_plain(c) for c in classes],
            "class_agnostic": class_agnostic,
        }
        try:
            parameters = pack_options(**{name: _plain(value) for name, value in options.items()})
        except TypeError as error:
            raise OptionError(f"options: expected numbers, names and truth values ({error})") from None
        patience_s = timeout if deadline_ms is None else min(timeout, deadline_ms / 1e3)
        return cls(parameters, _LEVELS[priority], patience_s)


def _plain(value: Any) -> Any:
    """A NumPy scalar as Python's."""
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One image on its way.

    Attributes:
        arrays: of `wire.pack_image`.
        terms: of its call.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    terms: Terms

    @property
    def queue_us(self) -> int:
        """Microseconds after which the server need not begin with it."""
        return max(1, round(self.terms.patience_s * 1e6))


def encoded_image(source: ImageSource, name: str | None = None) -> bytes:
    """A source as a file's bytes: of a path or of bytes as they are, of pixels as a binary PPM.

    PPM is lossless, and next to nothing to write and read: a picture of 1280×720 takes 0.4 ms and 3 ms where PNG at its
    lowest level takes 44 ms and 29 ms; it is three times as large (2.8 MB to 0.9 MB).

    Args:
        source: a path, an encoded image, a uint8 RGB array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), or an
            `Nv12Frame`.
        name: `ImageError.source` of the errors.

    Raises:
        ImageError: the file cannot be read, the array is no image, or it is over the default `DecodeLimits`.
    """
    if isinstance(source, (str, os.PathLike)):
        return read_image_file(source, name=name)
    if isinstance(source, (bytes, bytearray, memoryview)):
        encoded = bytes(source)
        _LIMITS.check_bytes(len(encoded), name or "bytes")
        return encoded
    pixels = pixels_of(source, limits=_LIMITS, name=name)  # (H, W, 3) u8 RGB
    height, width = pixels.shape[:2]
    return b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()


def request_of(source: ImageSource, index: int, terms: Terms) -> Request:
    """The request for the image `index` of a call.

    Raises:
        ImageError: as `encoded_image`; it is named as `Detector` names it.
    """
    name = source_name(source, index)
    encoded = encoded_image(source, name)
    try:
        return Request(pack_image(encoded), terms)
    except ImageError as error:
        raise type(error)(_shown(source, index), error.reason) from None


def answer_of(arrays: Mapping[str, npt.NDArray[Any]], task: Task, source: ImageSource, index: int) -> Answer:
    """The answer out of the server's arrays; what is wrong with the image bears its name here, not the server's.

    Raises:
        ServerError: the arrays are not a visionfast model's.
    """
    answers = unpack_answers(arrays, task)
    if len(answers) != 1:
        raise ServerError(f"expected the answer for one image, got {len(answers)}; is it a model of visionfast's?")
    (answer,) = answers
    if isinstance(answer, ImageError):
        return type(answer)(_shown(source, index), answer.reason)
    return answer


def _shown(source: ImageSource, index: int) -> str:
    return source_name(source, index) or os.fspath(source)  # type: ignore[arg-type]  # a path has no name of its own


def refusal(where: str, model: str, text: str | None) -> VisionfastError:
    """A server's error text as the error to raise.

    Args:
        where: the server's address.
        model: its name there.
        text: as Triton 2.51 words it, or a stage of ours by `wire.fault_text`.
    """
    line = " ".join((text or "it gave no reason").split())
    if (fault := fault_of(line)) is not None:
        return fault
    if "Exceeds maximum queue size" in line:
        return QueueFullError(f"{where}: {model}: too many requests wait already; send fewer at a time, or try later")
    if "Request timeout expired" in line:
        return DeadlineError(f"{where}: {model}: the request's time ran out while it waited for its turn")
    return ServerError(f"{where}: {model}: {line}")


def late(where: str, model: str, patience_s: float) -> DeadlineError:
    """No answer came in time."""
    return DeadlineError(f"{where}: {model}: no answer within {patience_s * 1e3:g} ms")


def parameter(config: Mapping[str, Any], key: str) -> str | None:
    """A text among a model's configuration parameters."""
    try:
        value = config["parameters"][key]["string_value"]
    except (KeyError, TypeError):
        return None
    return value if isinstance(value, str) else None


def as_json(text: str) -> Any:
    """Raises `ValueError`; hostile depths are one as well."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
