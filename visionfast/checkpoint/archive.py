"""The zip archive that `torch.save` writes: `<name>/data.pkl`, and the tensors' bytes in `<name>/data/<key>`.

The pickle is read as data; a tensor is made only when it is asked for, after its claims were held against the
bytes that are really there.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from visionfast.checkpoint.allowed import DTYPE_OF_STORAGE, REBUILD_TENSOR, is_allowed
from visionfast.checkpoint.pickled import Global, Inert, printable, read_pickle
from visionfast.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["StoredTensor", "TorchArchive"]

# A YOLOv8x checkpoint's pickle has 0.4 MB, one with an optimizer and a long training log a few.
_MAX_PICKLE_BYTES = 64 << 20
_MAX_DIMENSIONS = 8
_MAX_EMPTY_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a pickle claims about a tensor. Unchecked until `TorchArchive.tensor` makes it."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TorchArchive:
    """One open `torch.save` archive."""

    def __init__(self, file: IO[bytes], source: str) -> None:
        """Raises `CheckpointError` when it is damaged, compressed, or not what `torch.save` writes."""
        self._source = source
        self._storages: dict[str, bytearray] = {}
        try:
            self._zip = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise self._damaged(f"not a whole zip archive ({printable(error)})") from error
        entries = self._zip.infolist()
        names = {entry.filename for entry in entries}
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
            raise CheckpointError(
                f"{source}: a TorchScript program, which is code: expected weights; use the training's .pt"
            )
        if len(pickles) != 1:
            raise CheckpointError(
                f"{source}: a zip archive, but not one that torch.save wrote (it has {len(pickles)} "
                "data.pkl): expected a .pt, .pth or .safetensors weights file"
            )
        if len(names) != len(entries):
            raise self._damaged("two entries have one name")
        # torch.save stores without compression. So nothing here can unpack to more than the file itself
        # holds, not even by entries that lie on top of each other.
        file_bytes = file.seek(0, 2)
        if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
            raise self._damaged("its entries are compressed, which torch.save never does")
        if sum(e.file_size for e in entries) > file_bytes:
            raise self._damaged("its entries claim more bytes than the file has")
        self._prefix = pickles[0].removesuffix("data.pkl")
        if self._optional_record("byteorder") not in (b"", b"little"):
            raise CheckpointError(f"{source}: written on a big-endian machine: load and save it on this one")

    def read(self) -> Any:
        """What the pickle describes; tensors as `StoredTensor`, mappings as `dict`.

        Raises:
            UnsafeCheckpointError: it mentions a global that is not allowed.
            CheckpointError: it is damaged.
        """
        record = f"{self._prefix}data.pkl"
        if self._zip.getinfo(record).file_size > _MAX_PICKLE_BYTES:
            raise self._damaged(f"its pickle has more than {_MAX_PICKLE_BYTES >> 20} MiB")
        return read_pickle(
            self._record(record),
            source=self._source,
            is_allowed=is_allowed,
            make=_make,
            persistent=_storage,
        )

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """The tensor, as stored: a view of its storage, which it shares with the file's other tensors that do.

        So all tensors together take no more memory than the file has bytes.

        Raises:
            CheckpointError: it reaches beyond its storage, or the storage beyond the file.
        """
        import torch

        storage = stored.storage
        dtype: torch.dtype = getattr(torch, storage.dtype)
        if storage.key not in self._storages:
            self._storages[storage.key] = bytearray(self._record(f"{self._prefix}data/{storage.key}"))
        data = self._storages[storage.key]
        if storage.numel * dtype.itemsize != len(data):
            raise self._damaged(
                f"storage {printable(storage.key)} claims {storage.numel} × {storage.dtype}, and has {len(data)} bytes"
            )
        if 0 in stored.shape:
            if max(stored.shape) > _MAX_EMPTY_SIZE:
                raise self._damaged(f"an empty tensor has the shape {stored.shape}")
            return torch.empty(stored.shape, dtype=dtype)
        numel = math.prod(stored.shape)
        last = stored.offset + sum((n - 1) * step for n, step in zip(stored.shape, stored.stride, strict=True))
        # `numel`: an expanded tensor (stride 0) fits in a small storage and is huge as soon as it is copied.
        if last >= storage.numel or numel > storage.numel:
            raise self._damaged(f"a tensor of {numel} elements reaches beyond its storage of {storage.numel}")
        return torch.frombuffer(data, dtype=dtype).as_strided(stored.shape, stored.stride, stored.offset)

    def _record(self, name: str) -> bytes:
        try:
            return self._zip.read(name)
        except KeyError:
            raise self._damaged(f"record {printable(name)} is missing") from None
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise self._damaged(f"record {printable(name)}: {printable(error)}") from error

    def _optional_record(self, name: str) -> bytes:
        return self._record(self._prefix + name) if self._prefix + name in self._zip.NameToInfo else b""

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._source}: damaged or made up: {what}; fetch or save the file again")


def _make(name: str, args: tuple[Any, ...]) -> Any:
    """The few values that are made while the pickle is read; all else stays a record."""
    if name in REBUILD_TENSOR:
        return _stored_tensor(*args[:4])
    if name in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"):
        return args[0]
    if name == "collections.OrderedDict":
        return _ordered_dict(args)
    if name == "torch.Size":
        return tuple(_naturals(args[0])) if args else ()
    return Inert(name, args)


def _ordered_dict(args: tuple[Any, ...]) -> dict[Any, Any]:
    pairs = args[0] if args else []  # Python 2 gave its pairs to the constructor
    if not isinstance(pairs, list) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        raise TypeError("an OrderedDict is made from something that is not pairs")
    if not all(isinstance(key, (str, int)) for key, _ in pairs):
        raise TypeError("an OrderedDict's key is neither a name nor a number")
    return dict(pairs)


def _storage(persistent_id: Any) -> _Storage:
    kind, storage_type, key, _location, numel = persistent_id
    if kind != "storage" or not isinstance(storage_type, Global) or storage_type.name not in DTYPE_OF_STORAGE:
        raise ValueError("a persistent id is not a tensor's storage")
    if not isinstance(key, str):
        raise TypeError("a storage's key is not text")
    (count,) = _naturals([numel])
    return _Storage(key, DTYPE_OF_STORAGE[storage_type.name], count)


def _stored_tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> StoredTensor:
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor has no storage")
    (start,) = _naturals([offset])
    sizes, steps = tuple(_naturals(shape)), tuple(_naturals(stride))
    if len(sizes) != len(steps) or len(sizes) > _MAX_DIMENSIONS:
        raise ValueError("a tensor's shape and stride do not go together")
    return StoredTensor(storage, start, sizes, steps)


def _naturals(values: Iterable[Any]) -> list[int]:
    numbers = list(values)
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError("a size is not a natural number")
    return numbers
