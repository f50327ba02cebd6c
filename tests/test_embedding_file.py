"""A file is the embedding that was saved, to the byte, or it is none."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from small_embeddings import PLACED, embedding_of, key_of, path_of, same

from visionfast.embedding import Embedding
from visionfast.embedding_store import EmbeddingStore


@pytest.fixture
def store(tmp_path: Path) -> EmbeddingStore:
    return EmbeddingStore(tmp_path / "cache", 1 << 20)


# ---- round trip -------------------------------------------------------------------------------------------

_DTYPES = st.sampled_from(["float16", "float32", "float64", "int8", "int64", "uint8", "uint16", "bool", ">f4", ">i2"])
_SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=5), arrays(_DTYPES, _SHAPES), max_size=4))
def test_whatever_is_saved_is_loaded(features: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddingStore(folder, 1 << 20)
        assert store.save(key_of(1), Embedding(features, PLACED))
        got = store.load(key_of(1))
    expected = {name: array.astype(array.dtype.newbyteorder("<")) for name, array in features.items()}
    assert same(got, Embedding(expected, PLACED))


@pytest.mark.parametrize("order", ["F", "transposed", "0-d"])
def test_in_c_order_whatever_the_strides(store: EmbeddingStore, order: str) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    array = {"F": np.asfortranarray(array), "transposed": array.T, "0-d": np.full((), 7, np.float32)}[order]
    store.save(key_of(1), Embedding({"x": array}, PLACED))
    got = store.load(key_of(1))
    assert got is not None
    np.testing.assert_array_equal(got.features["x"], array)
    assert got.features["x"].flags.c_contiguous
    assert got.features["x"].flags.owndata


# ---- damage -----------------------------------------------------------------------------------------------


def _missed(store: EmbeddingStore, content: bytes) -> None:
    path = path_of(store, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    before = store.stats().damaged
    assert store.load(key_of(1)) is None
    assert not path.exists()
    assert store.stats().damaged == before + 1


@pytest.fixture
def content(store: EmbeddingStore) -> bytes:
    store.save(key_of(1), embedding_of(1))
    return path_of(store, 1).read_bytes()


def test_every_byte_counts(store: EmbeddingStore, content: bytes) -> None:
    for position in range(len(content)):
        for flip in (0x01, 0x80, 0xFF):
            changed = bytearray(content)
            changed[position] ^= flip
            _missed(store, bytes(changed))


def test_every_length_counts(store: EmbeddingStore, content: bytes) -> None:
    for length in range(len(content)):
        _missed(store, content[:length])
    for more in (b"\0", b"\n", content):
        _missed(store, content + more)


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
def test_foreign_content(foreign: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _missed(EmbeddingStore(folder, 1 << 20), foreign)
        _missed(EmbeddingStore(folder, 1 << 20), b"visionfast embedding 1\r\n" + foreign)


def test_an_entry_under_another_key_is_none(store: EmbeddingStore) -> None:
    store.save(key_of(2), embedding_of(2))
    _missed(store, path_of(store, 2).read_bytes())


def _signed(header: bytes, payload: bytes = b"") -> bytes:
    """A file whose sha256 agrees, whatever it says."""
    rest = struct.pack("<I", len(header)) + header
    return b"visionfast embedding 1\r\n" + hashlib.sha256(rest + payload).digest() + rest + payload


def _header(shape: Any, dtype: Any = "uint8", **changed: Any) -> bytes:
    placed = {"image_hw": [1, 1], "size_hw": [1, 1], "resized_hw": [1, 1], "top": 0, "left": 0, "gain": 1.0}
    tensors = [{"name": "x", "dtype": dtype, "shape": shape}]
    return json.dumps({"key": key_of(1), "placed": placed, "tensors": tensors, **changed}).encode()


def test_a_header_that_is_signed_and_right(store: EmbeddingStore) -> None:
    path_of(store, 1).parent.mkdir(parents=True)
    path_of(store, 1).write_bytes(_signed(_header([2, 3]), b"abcdef"))
    got = store.load(key_of(1))
    assert got is not None
    assert got.features["x"].tobytes() == b"abcdef"


@pytest.mark.parametrize(
    "header",
    [
        _header([1 << 50]),
        _header([1 << 70, 1 << 70]),
        _header([0, 1 << 62]),
        _header([0, 1 << 70]),
        _header([1] * 100 + [6]),
        _header([-2, -3]),
        _header([-6]),
        _header(
            [],
            tensors=[
                {"name": n, "dtype": "uint8", "shape": [size]} for n, size in (("x", 1 << 60), ("y", 6 - (1 << 60)))
            ],
        ),
        _header([6.0]),
        _header([True, 6]),
        _header("6"),
        _header([6], "object"),
        _header([6], "O"),
        _header([6], "uint7"),
        _header([6], None),
        _header([6], key=key_of(2)),
        _header([6], key=7),
        _header([6], placed={}),
        _header([6], placed=None),
        _header([6], tensors=None),
        _header([6], tensors=[]),
        _header([6], more=1),
        b"[" * 60_000,
        b"1" * 60_000,
        b"null",
        b"\xff",
        b"",
        b"{" + b" " * (1 << 16) + b"}",
    ],
    ids=lambda header: header[-60:].decode(errors="replace").strip()[:60] or "empty",
)
def test_a_header_that_is_signed_and_wrong(store: EmbeddingStore, header: bytes) -> None:
    _missed(store, _signed(header, b"abcdef"))


def test_nothing_is_allocated_on_a_files_word(store: EmbeddingStore) -> None:
    tracemalloc.start()
    try:
        _missed(store, b"visionfast embedding 1\r\n" + bytes(32) + b"\xff\xff\xff\xff" + b"{}")
        _missed(store, _signed(_header([1 << 30]), b"abcdef"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_what_is_no_regular_file(store: EmbeddingStore, content: bytes, tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", path_of(store, 1)
    elsewhere.write_bytes(content)
    path.unlink()
    path.symlink_to(elsewhere)
    assert store.load(key_of(1)) is None
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == content

    path.symlink_to(elsewhere)
    assert store.save(key_of(1), embedding_of(1))  # the link is replaced, not followed
    assert elsewhere.read_bytes() == content
    assert not path.is_symlink()

    path.unlink()
    os.mkfifo(path)
    assert store.load(key_of(1)) is None  # at once: nobody writes to it
    assert not path.exists()

    path.mkdir()
    assert store.load(key_of(1)) is None
    assert path.is_dir()
    assert not store.save(key_of(1), embedding_of(1))
    assert not list(store.folder.glob("partial-*"))
