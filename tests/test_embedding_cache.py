"""Least recently used first, never a byte over the bound, every count exact; over a folder."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from small_embeddings import PLACED, embedding_of, key_of, refuses, watched

from visionfast import embedding_cache
from visionfast.embedding import Embedding
from visionfast.embedding_cache import EmbeddingCache, Transfer
from visionfast.errors import OptionError

# ---- one thread -------------------------------------------------------------------------------------------


class _AgainstAModel(RuleBasedStateMachine):
    """Least recently used first, bounded in bytes: an ordered dict, and counts by hand."""

    @initialize(max_bytes=st.integers(0, 40))
    def start(self, max_bytes: int) -> None:
        self.cache = watched(max_bytes)
        self.max_bytes = max_bytes
        self.kept: OrderedDict[int, int] = OrderedDict()
        self.counts = Counter[str]()

    @rule(number=st.integers(0, 7), nbytes=st.integers(0, 24))
    def get(self, number: int, nbytes: int) -> None:
        there = number in self.kept
        got = self.cache.get(key_of(number), refuses if there else lambda: embedding_of(number, nbytes))
        assert (got.features["image_embeddings"] == number).all()
        if there:
            self.counts["hits"] += 1
            self.kept.move_to_end(number)
            return
        self.counts["misses"] += 1
        if nbytes > self.max_bytes:
            self.counts["too_large"] += 1
            return
        while sum(self.kept.values()) + nbytes > self.max_bytes:
            self.kept.popitem(last=False)
            self.counts["evictions"] += 1
        self.kept[number] = nbytes

    @rule(number=st.integers(0, 7))
    def fail(self, number: int) -> None:
        if number not in self.kept:
            with pytest.raises(ZeroDivisionError):
                self.cache.get(key_of(number), lambda: 1 // 0)  # type: ignore[arg-type, return-value]
            self.counts["failures"] += 1

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.kept.clear()

    @invariant()
    def agrees(self) -> None:
        stats = self.cache.stats()
        for name in ("hits", "misses", "failures", "evictions", "too_large"):
            assert getattr(stats, name) == self.counts[name], name
        assert list(self.cache._kept) == [key_of(number) for number in self.kept]
        assert (stats.entries, stats.bytes) == (len(self.kept), sum(self.kept.values()))
        assert (stats.coalesced, stats.disk_hits, stats.disk) == (0, 0, None)
        assert not self.cache._flights


TestAgainstAModel = _AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_options() -> None:
    with pytest.raises(OptionError, match=r"^max_bytes: expected a whole number of bytes, at least 0, got -1"):
        EmbeddingCache(-1)
    with pytest.raises(OptionError, match=r"^max_folder_bytes 5: expected with a folder only"):
        EmbeddingCache(1, max_folder_bytes=5)
    with pytest.raises(OptionError, match=r"^max_folder_bytes: expected at least 0, got -1"):
        EmbeddingCache(1, folder="x", max_folder_bytes=-1)
    cache = EmbeddingCache(1)
    with pytest.raises(OptionError, match=r"^key: expected 64 lower-case hex digits"):
        cache.get("../escape", refuses)


# ---- the folder -------------------------------------------------------------------------------------------


def test_what_one_process_made_the_next_one_loads(tmp_path: Path) -> None:
    first = EmbeddingCache(100, folder=tmp_path)
    first.get(key_of(1), lambda: embedding_of(1))
    second = EmbeddingCache(100, folder=tmp_path)
    loaded = second.get(key_of(1), refuses)
    assert loaded.features["image_embeddings"].tolist() == [1] * 8
    assert loaded.placed == PLACED
    assert not loaded.features["image_embeddings"].flags.writeable
    assert second.get(key_of(1), refuses) is loaded
    stats = second.stats()
    assert (stats.hits, stats.disk_hits, stats.misses, stats.bytes) == (2, 1, 0, 8)
    assert stats.disk is not None
    assert (stats.disk.entries, stats.disk.max_bytes) == (1, embedding_cache.DEFAULT_FOLDER_BYTES)

    second.clear()
    assert second.stats().entries == 0
    second.get(key_of(1), refuses)
    second.clear(disk=True)
    assert second.get(key_of(1), lambda: embedding_of(2)).features["image_embeddings"][0] == 2


def test_what_memory_has_no_room_for_is_still_kept_on_disk(tmp_path: Path) -> None:
    cache = EmbeddingCache(0, folder=tmp_path)
    cache.get(key_of(1), lambda: embedding_of(1))
    cache.get(key_of(1), refuses)
    assert cache.stats().disk_hits == 1


def test_device_tensors_go_to_the_folder_by_way_of_the_host(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="device tensors are torch's: pip install 'visionfast[gpu]'")

    def make() -> Embedding:
        return Embedding({"x": torch.arange(6, dtype=torch.float16).reshape(2, 3)}, PLACED)

    transfer = Transfer(lambda tensor: tensor.cpu().numpy(), lambda array: torch.tensor(array))
    cache = EmbeddingCache(100, folder=tmp_path)
    cache.get(key_of(1), make, transfer=transfer)
    cache.clear()
    loaded = cache.get(key_of(1), refuses, transfer=transfer).features["x"]
    assert isinstance(loaded, torch.Tensor)
    assert torch.equal(loaded, make().features["x"])

    cache.get(key_of(2), make)  # without a way to the host it is kept in memory only
    stats = cache.stats()
    assert stats.disk is not None
    assert (stats.entries, stats.disk.entries, stats.disk.not_kept) == (2, 1, 1)


def test_a_folder_that_cannot_be_written_only_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = EmbeddingCache(100, folder=tmp_path / "file" / "folder")
    cache.get(key_of(1), lambda: embedding_of(1))
    cache.get(key_of(1), refuses)
    stats = cache.stats()
    assert stats.disk is not None
    assert (stats.misses, stats.hits, stats.disk.not_kept, stats.disk.entries) == (1, 1, 1, 0)
