"""One image and its options, on their way to the server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, ImageTooLargeError, OptionError
from visionfast.serving.wire.tensors import pack_rows

__all__ = ["BUCKET", "pack_image", "pack_options", "unpack_image", "unpack_options"]

BUCKET = 1 << 16
"""Bytes."""

_OPTIONS_BUCKET = 64  # so that requests with options of about one length are put together too

_MOST_BYTES = 2**31 - 1 - BUCKET  # `length` is an int32, and so is the size of a gRPC message


def pack_image(encoded: bytes, options: bytes = b"") -> dict[str, npt.NDArray[Any]]:
    """One image as a request of one: `image` (1, n), `length` (1, 1), and `options` (1, m) from `pack_options`.

    Raises:
        ImageTooLargeError: 2 GiB do not fit into a message.
    """
    if len(encoded) > _MOST_BYTES:
        raise ImageTooLargeError("bytes", f"expected at most {_MOST_BYTES} bytes, got {len(encoded)}; shrink the file")
    return {
        "image": pack_rows([encoded], BUCKET),
        "length": np.array([[len(encoded)]], np.int32),
        "options": pack_rows([options], _OPTIONS_BUCKET),
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
    """Every option that is not `None`, as JSON; nothing for none.

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
