"""Small embeddings that are known by their number."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from visionfast import embedding_file
from visionfast.embedding import Embedding
from visionfast.embedding_cache import EmbeddingCache
from visionfast.embedding_store import EmbeddingStore
from visionfast.types import Letterbox

PLACED = Letterbox((30, 40), (1024, 1024), (768, 1024), 3, 5, 25.6)


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def embedding_of(number: int, nbytes: int = 8) -> Embedding:
    return Embedding({"image_embeddings": np.full(nbytes, number % 251, np.uint8)}, PLACED)


def path_of(store: EmbeddingStore, number: int) -> Path:
    return store.folder / key_of(number)[:2] / key_of(number)


def file_bytes(nbytes: int = 8) -> int:
    """Of the file of an embedding that has so many bytes itself."""
    parts = embedding_file.pack(key_of(0), embedding_of(0, nbytes))
    assert parts is not None
    return sum(map(len, parts))


def same(got: Embedding | None, expected: Embedding) -> bool:
    """To the byte."""
    return (
        got is not None
        and got.placed == expected.placed
        and list(got.features) == list(expected.features)
        and all(
            (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())
            for a, b in zip(got.features.values(), expected.features.values(), strict=True)
        )
    )


def refuses() -> Embedding:
    """For a key that is there."""
    raise AssertionError("made, though it was there")


class Watched(OrderedDict[str, Embedding]):
    """Looks at the bytes after every insertion."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: str, embedding: Embedding) -> None:
        super().__setitem__(key, embedding)
        assert sum(each.nbytes for each in self.values()) <= self.most


def watched(max_bytes: int, **options: Any) -> EmbeddingCache:
    """A cache that is looked at after every insertion: its bound is held at every moment."""
    cache = EmbeddingCache(max_bytes, **options)
    cache._kept = Watched(max_bytes)
    return cache
