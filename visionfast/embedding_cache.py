"""The embedding cache: an image is encoded once, however many ask for it, and kept while there is room.

What prefix caching is to a language model: the expensive part of an answer depends on the image alone, so every click
after the first costs the decoder only. In memory, least recently used first to go, over an optional folder on disk.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

from visionfast.embedding import Embedding, check_key
from visionfast.embedding_store import EmbeddingStore, StoreStats
from visionfast.errors import OptionError

__all__ = ["DEFAULT_FOLDER_BYTES", "CacheStats", "EmbeddingCache", "Transfer"]

DEFAULT_FOLDER_BYTES = 4 << 30
"""A thousand images of SAM's 4 MiB, 250 of SAM 2's 16 MiB."""

_Outcome: TypeAlias = Literal["memory", "coalesced", "disk", "miss", "failure"]


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """How features that are not host arrays get to the disk and back: `tensor.cpu().numpy()` and its reverse.

    Attributes:
        to_host: a tensor of the features as an array, complete when the call returns.
        to_device: the array as such a tensor again, complete when the call returns.
    """

    to_host: Callable[[Any], npt.NDArray[Any]]
    to_device: Callable[[npt.NDArray[Any]], Any]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was made, and what it holds. Every `get` is one hit, miss or failure, once it ends.

    Attributes:
        hits: answered without a call of `make`.
        misses: answered by calling `make`.
        failures: ended in an exception, the maker's and each waiter's.
        coalesced: of the hits, those that waited for another thread to make or load it.
        disk_hits: of the hits, those that loaded it from disk.
        evictions: entries that left the memory to make room.
        too_large: entries that were handed out and not kept: larger than the bound by themselves.
        entries, bytes: in memory now.
        max_bytes: that it may hold.
        disk: of the folder; `None` where there is none.
    """

    hits: int
    misses: int
    failures: int
    coalesced: int
    disk_hits: int
    evictions: int
    too_large: int
    entries: int
    bytes: int
    max_bytes: int
    disk: StoreStats | None


class EmbeddingCache:
    """Embeddings by key, for any number of threads, models and images at once: the key tells them apart.

    Args:
        max_bytes: that the embeddings in memory have together, at every moment: others go before one comes in. What
            is being made, and what callers hold on to, is beside it. 0 keeps nothing and still lets those who ask
            for one image at the same time share it.
        folder: a second tier on disk, which outlives the process and may be shared with others.
        max_folder_bytes: that the folder may hold; `None`: `DEFAULT_FOLDER_BYTES`.

    Raises:
        OptionError: a bound is negative, or there is one for a folder that is not given.
    """

    def __init__(
        self, max_bytes: int, *, folder: str | os.PathLike[str] | None = None, max_folder_bytes: int | None = None
    ) -> None:
        if not isinstance(max_bytes, int) or max_bytes < 0:
            raise OptionError(f"max_bytes: expected a whole number of bytes, at least 0, got {max_bytes!r}")
        if folder is None and max_folder_bytes is not None:
            raise OptionError(f"max_folder_bytes {max_folder_bytes}: expected with a folder only; name the folder too")
        self.max_bytes = max_bytes
        folder_bytes = DEFAULT_FOLDER_BYTES if max_folder_bytes is None else max_folder_bytes
        self._store = None if folder is None else EmbeddingStore(folder, folder_bytes)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Embedding] = OrderedDict()  # the least recently used comes first
        self._flights: dict[str, _Flight] = {}
        self._ended: dict[_Outcome, int] = {"memory": 0, "coalesced": 0, "disk": 0, "miss": 0, "failure": 0}
        self._evictions = 0
        self._too_large = 0

    def get(self, key: str, make: Callable[[], Embedding], *, transfer: Transfer | None = None) -> Embedding:
        """The embedding of that key: from memory, from whoever is making it, from disk, or from `make`.

        It is shared with all who ask for it.

        Args:
            key: `visionfast.embedding.embedding_key`.
            make: encodes the image. It runs without a lock, in one thread at a time for a key, and returns when the
                features are complete: other threads read them at once. It must not ask this cache for its own key.
            transfer: for features on a device; without it they stay out of the folder.

        Raises:
            OptionError: `key` is not 64 hex digits.
            Exception: what `make` raised, in every thread that waited for it, each with an exception of its own.
                Nothing is kept, and the next to come tries again. Where it is not an `Exception` (Ctrl-C), it is the
                maker's alone, and one of the waiters makes it.
        """
        check_key(key)
        outcome: _Outcome = "failure"
        try:
            embedding, outcome = self._find(key, make, transfer)
            return embedding
        finally:
            with self._lock:
                self._ended[outcome] += 1

    def kept(self, key: str) -> Embedding | None:
        """The embedding of that key if it is in memory, which is a hit; otherwise nothing is counted."""
        with self._lock:
            if (embedding := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                self._ended["memory"] += 1
            return embedding

    def __contains__(self, key: str) -> bool:
        """Whether it is in memory now; counts as no use of it."""
        with self._lock:
            return key in self._kept

    def stats(self) -> CacheStats:
        """Exact as of one moment, but for `disk`, for which the folder is walked."""
        disk = None if self._store is None else self._store.stats()
        with self._lock:
            ended = self._ended
            return CacheStats(
                hits=ended["memory"] + ended["coalesced"] + ended["disk"],
                misses=ended["miss"],
                failures=ended["failure"],
                coalesced=ended["coalesced"],
                disk_hits=ended["disk"],
                evictions=self._evictions,
                too_large=self._too_large,
                entries=len(self._kept),
                bytes=self._bytes(),
                max_bytes=self.max_bytes,
                disk=disk,
            )

    def clear(self, *, disk: bool = False) -> None:
        """Empties the memory, and with `disk` the folder. What is being made now is kept when it is done."""
        with self._lock:
            self._kept.clear()
        if disk and self._store is not None:
            self._store.clear()

    def _find(self, key: str, make: Callable[[], Embedding], transfer: Transfer | None) -> tuple[Embedding, _Outcome]:
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept, "memory"
            flight = self._flights.setdefault(key, _Flight())
        # Whoever gets the turn first makes it; the others find it made. A maker that Ctrl-C took leaves the flight as
        # it was, and the next in turn makes it: nobody waits for a thread that is gone.
        with flight.turn:
            if flight.embedding is not None:
                return flight.embedding, "coalesced"
            if flight.error is not None:
                raise _copied(flight.error)
            outcome: _Outcome = "disk"
            try:
                if (embedding := self._load(key, transfer)) is None:
                    embedding, outcome = make(), "miss"
            except Exception as error:
                self._land(key, flight, None)
                flight.error = _copied(error)
                raise
            self._land(key, flight, embedding)
            flight.embedding = embedding
        if outcome == "miss":
            self._save(key, embedding, transfer)  # the others are answered by now
        return embedding, outcome

    def _land(self, key: str, flight: _Flight, embedding: Embedding | None) -> None:
        """From here on the key is found in memory, or is nobody's: those who wait have the flight itself."""
        with self._lock:
            if embedding is not None:
                self._keep(key, embedding)
            if self._flights.get(key) is flight:
                del self._flights[key]

    def _keep(self, key: str, embedding: Embedding) -> None:
        if (size := embedding.nbytes) > self.max_bytes:
            self._too_large += 1
            return
        self._kept.pop(key, None)
        held = self._bytes()
        while held + size > self.max_bytes:
            held -= self._kept.popitem(last=False)[1].nbytes
            self._evictions += 1
        self._kept[key] = embedding

    def _bytes(self) -> int:
        # Summed up, not carried along: a total that Ctrl-C cuts off from its entries would be wrong for good.
        return sum(embedding.nbytes for embedding in self._kept.values())

    def _load(self, key: str, transfer: Transfer | None) -> Embedding | None:
        stored = None if self._store is None else self._store.load(key)
        if stored is None or transfer is None:
            return stored
        return Embedding({name: transfer.to_device(array) for name, array in stored.features.items()}, stored.placed)

    def _save(self, key: str, embedding: Embedding, transfer: Transfer | None) -> None:
        if self._store is None:
            return
        if transfer is not None:
            on_host = {name: transfer.to_host(tensor) for name, tensor in embedding.features.items()}
            embedding = Embedding(on_host, embedding.placed)
        self._store.save(key, embedding)


class _Flight:
    """One key that is being made: whoever holds `turn` looks what became of it, and if nothing did, makes it."""

    __slots__ = ("embedding", "error", "turn")

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.embedding: Embedding | None = None
        self.error: Exception | None = None


def _copied(error: Exception) -> Exception:
    """The same type and message, without the traceback: one exception raised in two threads mixes theirs up.

    A traceback also holds the maker's frames, and with them the image's pixels.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # its type cannot be made from its arguments
        return error
    return copied if type(copied) is type(error) and str(copied) == str(error) else error
