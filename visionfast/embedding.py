"""An encoded image as it is cached, and the keys that tell one from another.

A key is the sha256 of everything that the features depend on: the image as it was handed over, and the model with all
that stands in front of it. One changed byte in either is another key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from visionfast._version import __version__
from visionfast.errors import ImageFormatError, OptionError
from visionfast.preprocess.decode import read_image_file
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.nv12 import Nv12Frame
from visionfast.types import EngineManifest, Letterbox, ModelSpec

if TYPE_CHECKING:
    from visionfast.sessions import ImageSource
    from visionfast.sessions.prompts import Features

__all__ = ["Embedding", "KeyedImage", "check_key", "embedding_key", "image_key", "model_key"]


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """One image, encoded.

    Arrays become read-only. One that does not own its memory is copied: what is counted is then what is held, and
    nobody else can write to it.

    Attributes:
        features: the encoder's outputs by name: arrays on the host, or tensors on a device. Never live buffers.
        placed: where the image lies in the network's input.
    """

    features: Features
    placed: Letterbox

    def __post_init__(self) -> None:
        kept = {name: _frozen(tensor) for name, tensor in self.features.items()}
        object.__setattr__(self, "features", MappingProxyType(kept))

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(tensor.nbytes for tensor in self.features.values())


def _frozen(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        tensor = tensor if tensor.flags.owndata else tensor.copy()
        tensor.setflags(write=False)
    return tensor


class KeyedImage(NamedTuple):
    """An image's key, and the image to decode: what was read and hashed, where a path was given."""

    key: str
    source: ImageSource


_DEFAULT_LIMITS = DecodeLimits()


def image_key(source: ImageSource, *, limits: DecodeLimits = _DEFAULT_LIMITS, name: str | None = None) -> KeyedImage:
    """The sha256 of an image as it was handed over.

    Of an encoded image its bytes, the same for a path and for what is in the file. Of an array its shape, dtype and
    pixels; of a frame of video its planes, matrix and range. The three never share a key.

    Args:
        source: a path, which is read here and only once; an encoded image; an array or a frame on the host.
        limits: what the image may cost.
        name: `ImageError.source` of the errors; otherwise the path, `"bytes"`, or the type's name.

    Returns:
        The key, 64 hex digits, and the source with a path or a buffer replaced by its bytes, so that what is decoded
        is what was hashed.

    Raises:
        ImageNotFoundError, ImageTooLargeError, ImageFormatError: the path cannot be read, there are too many bytes,
            or it is none of these kinds.
    """
    if isinstance(source, (str, os.PathLike)):
        source = read_image_file(source, limits=limits, name=name)
    elif isinstance(source, (bytes, bytearray, memoryview)):
        source = bytes(source)  # what others can write to is copied: it may change before it is decoded
        limits.check_bytes(len(source), name or "bytes")
    if isinstance(source, bytes):
        return KeyedImage(_digest("encoded", source), source)
    if isinstance(source, np.ndarray):
        return KeyedImage(_digest(f"array {_described(source, name or 'array')}", source), source)
    if isinstance(source, Nv12Frame):
        name = name or "frame"
        planes = f"{_described(source.y, f'{name}: y')} {_described(source.uv, f'{name}: uv')}"
        frame = f"nv12 {source.matrix!r} {bool(source.full_range)} {planes}"
        return KeyedImage(_digest(frame, source.y, source.uv), source)
    kind = type(source).__name__
    raise ImageFormatError(
        name or kind,
        f"expected a path, encoded bytes or a uint8 RGB array, got {kind}; numpy.asarray(image.convert('RGB')) makes "
        "an array of a Pillow image",
    )


def model_key(
    manifest: EngineManifest | None, spec: ModelSpec, limits: DecodeLimits = _DEFAULT_LIMITS, *, where: str = ""
) -> str:
    """The sha256 of all that turns an image into features, the image apart.

    The weights, the ONNX and the compiled files by their hashes; backend, its version, precision and device; the
    preprocessing; `limits`, under which an image may be refused or patched up; and visionfast's own version, whose
    decoding and resizing may be mended in the next one.

    Args:
        manifest: the engine's. With `None` nothing says what the weights are, and every call gives another key.
        spec: the model.
        limits: what an image may cost.
        where: the device that the features are on, `cuda:1`, so that no other is handed them; empty for the host.
    """
    parts: dict[str, Any] = {
        "visionfast": __version__,
        "family": spec.family,
        "architecture": spec.architecture,
        "preprocess": dataclasses.asdict(spec.preprocess),
        "limits": dataclasses.asdict(limits),
        "where": where,
    }
    if manifest is None:
        parts["unknown weights"] = secrets.token_hex(32)
    else:
        for field in ("backend", "precision", "device", "runtime_version", "weights_sha256"):
            parts[field] = getattr(manifest, field)
        for field in ("onnx_sha256", "sha256"):
            parts[field] = dict(getattr(manifest, field))
    return _digest("model", json.dumps(parts, sort_keys=True).encode())


def embedding_key(model: str, image: str) -> str:
    """The key of one image as one model encodes it, from `model_key` and `image_key`."""
    return _digest("embedding", f"{model} {image}".encode())


def check_key(key: str) -> None:
    """Raises `OptionError` unless `key` is as `embedding_key` makes it: it becomes a file's name."""
    if not isinstance(key, str) or re.fullmatch("[0-9a-f]{64}", key) is None:
        raise OptionError(f"key: expected 64 lower-case hex digits, got {key!r:.80}; embedding_key makes one")


def _digest(kind: str, *contents: bytes | npt.NDArray[Any]) -> str:
    """`kind` ends with the first zero byte and says how long every content is but the last, so none run together."""
    digest = hashlib.sha256(f"visionfast {kind}\0".encode())
    for content in contents:
        # One that is not contiguous is copied into C order; an empty one has no memory to look at, and flat it has.
        digest.update(content if isinstance(content, bytes) else np.ascontiguousarray(content).reshape(-1).data)
    return digest.hexdigest()


def _described(pixels: Any, name: str) -> str:
    if not isinstance(pixels, np.ndarray):
        raise ImageFormatError(name, f"expected a numpy.ndarray on the host, got {type(pixels).__name__}")
    if pixels.dtype != np.uint8:
        raise ImageFormatError(name, f"expected a uint8 array, got {pixels.shape} {pixels.dtype}")
    return str(pixels.shape)
