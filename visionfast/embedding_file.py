"""One encoded image as a file. It holds its own sha256, its sizes are checked before they are believed; no pickle.

Little-endian:

    24 bytes   "visionfast embedding 1\\r\\n"
    32 bytes   sha256 of all that follows
     4 bytes   length of the header
    header     JSON: key, placed, and each tensor's name, dtype and shape
    payload    the tensors one after the other, C order
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from visionfast.embedding import Embedding
from visionfast.errors import ArtifactError, ManifestError
from visionfast.strict_json import decode
from visionfast.types import Letterbox

__all__ = ["pack", "read"]

_MAGIC = b"visionfast embedding 1\r\n"
_PREFIX = struct.Struct("<24s32sI")
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 1 << 16

_Dtype: TypeAlias = Literal[
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"
]
_Buffer = TypeVar("_Buffer", bytearray, memoryview)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: _Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class _Header:
    key: str
    placed: Letterbox
    tensors: tuple[_Tensor, ...]


def pack(key: str, embedding: Embedding) -> list[bytes | memoryview] | None:
    """The file's content in parts; `None` where the features are not host arrays of a plain dtype."""
    tensors: list[_Tensor] = []
    payload: list[memoryview] = []
    for name, array in embedding.features.items():
        if not isinstance(array, np.ndarray) or array.dtype.name not in get_args(_Dtype):
            return None
        tensor = _Tensor(name, array.dtype.name, array.shape)
        tensors.append(tensor)
        payload.append(_memory(np.asarray(array, _stored(tensor))))
    header = json.dumps(dataclasses.asdict(_Header(key, embedding.placed, tuple(tensors)))).encode()
    if len(header) > _MAX_HEADER_BYTES:
        return None
    digest = hashlib.sha256(_LENGTH.pack(len(header)) + header)
    for part in payload:
        digest.update(part)
    return [_PREFIX.pack(_MAGIC, digest.digest(), len(header)), header, *payload]


def read(path: Path, key: str) -> Embedding:
    """The embedding in a file, with arrays of its own; the file's time of change becomes now.

    Raises:
        ArtifactError: it is damaged, cut short, that of another key, or no file of ours: a link, a pipe.
        OSError: there is none, or it cannot be read.
    """
    with io.FileIO(path, "r", opener=_open_unfollowed) as file:
        try:
            embedding = _read(file, key)
        except (ValueError, OverflowError, RecursionError, ManifestError) as error:
            raise ArtifactError(f"{path}: expected the embedding {key:.12}…, got something else ({error})") from error
        with contextlib.suppress(OSError):  # in a folder that may only be read
            os.utime(file.fileno())
        return embedding


def _read(file: io.FileIO, key: str) -> Embedding:
    """Allocates nothing that the file's own size does not bear out."""
    size = os.fstat(file.fileno()).st_size
    magic, expected, header_bytes = _PREFIX.unpack(_filled(file, bytearray(_PREFIX.size)))
    if magic != _MAGIC or header_bytes > min(size, _MAX_HEADER_BYTES):
        raise ValueError("another format")
    encoded = _filled(file, bytearray(header_bytes))
    header: _Header = decode(_Header, json.loads(encoded), "header")
    if header.key != key:
        raise ValueError(f"the key {header.key:.80}")
    claimed = _PREFIX.size + header_bytes + sum(tensor.nbytes for tensor in header.tensors)
    if claimed != size or any(n < 0 for tensor in header.tensors for n in tensor.shape):
        raise ValueError(f"{size} bytes for tensors that make it {claimed}")
    digest = hashlib.sha256(_LENGTH.pack(header_bytes) + encoded)
    features = {}
    for tensor in header.tensors:
        features[tensor.name] = array = np.empty(tensor.shape, _stored(tensor))
        digest.update(_filled(file, _memory(array)))
    if digest.digest() != expected:
        raise ValueError("another sha256")
    return Embedding(features, header.placed)


def _filled(file: io.FileIO, buffer: _Buffer) -> _Buffer:
    """Reads as much as the buffer takes."""
    rest = memoryview(buffer)
    while rest:
        if not (count := file.readinto(rest)):
            raise ValueError("the end of the file in the middle")
        rest = rest[count:]
    return buffer


def _memory(array: npt.NDArray[Any]) -> memoryview:
    """An array's own memory byte by byte, also where there is none; of one that is not C-contiguous, a copy's."""
    return array.reshape(-1).view(np.uint8).data


def _stored(tensor: _Tensor) -> np.dtype[Any]:
    return np.dtype(tensor.dtype).newbyteorder("<")


def _open_unfollowed(path: str, flags: int) -> int:
    """Neither follows a link at the path's end nor waits for a pipe's writer.

    A pipe or a device is found out by what it gives.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if Path(path).is_symlink():
            raise ArtifactError(f"{path}: expected a file, got a symbolic link") from error
        raise
