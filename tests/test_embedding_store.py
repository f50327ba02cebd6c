"""A folder within its bound, whatever is killed, stopped, removed or put there by others meanwhile."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_embeddings import PLACED, embedding_of, file_bytes, key_of, path_of, same

from visionfast import embedding_store
from visionfast.embedding import Embedding
from visionfast.embedding_store import EmbeddingStore
from visionfast.errors import OptionError


@pytest.fixture
def store(tmp_path: Path) -> EmbeddingStore:
    return EmbeddingStore(tmp_path / "cache", 1 << 20)


# ---- the folder -------------------------------------------------------------------------------------------


def test_entries_are_for_their_owner_only(store: EmbeddingStore) -> None:
    store.save(key_of(1), embedding_of(1))
    for path in (store.folder, *store.folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_what_is_not_made_of_host_arrays_is_not_kept(store: EmbeddingStore) -> None:
    for features in ({"x": [1, 2]}, {"x": np.array([1j])}, {"x": np.array(["text"])}, {"x": np.array([None])}):
        assert not store.save(key_of(1), Embedding(features, PLACED))
    assert not store.save(key_of(1), Embedding({"x" * (1 << 17): np.zeros(1)}, PLACED))  # a header over its bound
    assert (store.stats().not_kept, store.stats().entries) == (5, 0)


@pytest.mark.parametrize("key", ["../../escape", "a" * 63, "A" * 64, "a" * 64 + "\n", "a/" * 32, "." * 64])
def test_keys_are_no_paths(store: EmbeddingStore, key: str) -> None:
    for call in (lambda: store.load(key), lambda: store.save(key, embedding_of(1))):
        with pytest.raises(OptionError, match=r"^key: expected 64 lower-case hex digits"):
            call()
    assert not store.folder.exists()


# ---- the bound --------------------------------------------------------------------------------------------


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    size = file_bytes()
    store = EmbeddingStore(tmp_path, 16 * size)
    for number in range(16):
        assert store.save(key_of(number), embedding_of(number))
        os.utime(path_of(store, number), (1000 + number, 1000 + number))
    assert (store.stats().evictions, store.stats().bytes) == (0, 16 * size)
    assert same(store.load(key_of(0)), embedding_of(0))  # from now on the youngest
    assert store.save(key_of(16), embedding_of(16))  # one goes for it, and one of sixteen for the next
    assert [n for n in range(17) if path_of(store, n).exists()] == [0, *range(3, 17)]
    assert store.save(key_of(17), embedding_of(17))
    assert (store.stats().evictions, store.stats().written, store.stats().entries) == (2, 18, 16)


def test_more_than_the_bound_by_itself(tmp_path: Path) -> None:
    store = EmbeddingStore(tmp_path, file_bytes(50))
    assert store.save(key_of(1), embedding_of(1, 50))
    assert not store.save(key_of(2), embedding_of(2, 51))
    assert not EmbeddingStore(tmp_path / "none", 0).save(key_of(1), embedding_of(1))
    assert same(store.load(key_of(1)), embedding_of(1, 50))  # nothing had to go for what could not come


def test_what_may_not_be_removed_leaves_no_room(tmp_path: Path) -> None:
    size = file_bytes()
    path_of(EmbeddingStore(tmp_path, size), 1).mkdir(parents=True)
    (path_of(EmbeddingStore(tmp_path, size), 1) / "a folder under an entry's name").touch()
    store = EmbeddingStore(tmp_path, size)
    assert store.stats().bytes > 0
    assert not store.save(key_of(2), embedding_of(2))
    assert store.stats().not_kept == 1


@pytest.mark.parametrize("lock", [None, b"", b"rubbish" * 9, b"%020d" % 10**19, b"9" * 20, "directory", "link"])
def test_whatever_the_lock_says_the_bound_is_held(tmp_path: Path, lock: Any) -> None:
    size = file_bytes()
    first = EmbeddingStore(tmp_path, 100 * size)
    for number in range(10):
        first.save(key_of(number), embedding_of(number))
    (tmp_path / "lock").unlink()
    if lock == "directory":
        (tmp_path / "lock").mkdir()
    elif lock == "link":
        (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    elif lock is not None:
        (tmp_path / "lock").write_bytes(lock)
    second = EmbeddingStore(tmp_path, 5 * size)
    kept = second.save(key_of(20), embedding_of(20))
    assert kept == (not isinstance(lock, str))
    assert second.stats().bytes <= 5 * size if kept else second.stats().entries == 10
    assert not (tmp_path / "elsewhere").exists()


def test_what_others_put_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    others = [tmp_path / "holiday.jpg", tmp_path / "ab" / "notes.txt", tmp_path / "ab" / ("cd" * 32)]
    for path in others:
        path.write_bytes(bytes(1000))
    store = EmbeddingStore(tmp_path, 500)
    store.save(key_of(1), embedding_of(1))
    store.clear()
    assert all(path.exists() for path in others)
    assert (store.stats().entries, store.stats().bytes) == (0, 0)


def test_another_process_removes_entries(store: EmbeddingStore) -> None:
    done = threading.Event()

    def remove() -> None:
        dice = random.Random(0)
        while not done.is_set():
            path_of(store, dice.randrange(10)).unlink(missing_ok=True)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        outcomes = set()
        for turn in range(300):
            number = turn % 10
            assert store.save(key_of(number), embedding_of(number))
            got = store.load(key_of(number))
            assert got is None or same(got, embedding_of(number))
            outcomes.add(got is None)
    finally:
        done.set()
        remover.join()
    assert store.stats().damaged == 0
    assert outcomes == {True, False}


# ---- other processes --------------------------------------------------------------------------------------

_CHILD = """
import os, resource, signal, sys
from pathlib import Path
import numpy as np
from visionfast import embedding_store
from visionfast.embedding import Embedding
from visionfast.types import Letterbox
store = embedding_store.EmbeddingStore(sys.argv[1], int(sys.argv[2]))
def embedding(number, nbytes):
    features = {"image_embeddings": np.full(nbytes, number % 251, np.uint8)}
    return Embedding(features, Letterbox((30, 40), (1024, 1024), (768, 1024), 3, 5, 25.6))
"""


def _child(store: EmbeddingStore, code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD + code, str(store.folder), str(store.max_bytes)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


_KILLED = {
    "while it writes": """
class Half:
    def __init__(self, handle, mode): self.handle = handle
    def __enter__(self): return self
    def __exit__(self, *exc): pass
    def writelines(self, parts):
        content = b"".join(parts)
        os.write(self.handle, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
embedding_store.os.fdopen = Half
""",
    "before it renames": "Path.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)\n",
}


@pytest.mark.parametrize("when", _KILLED)
def test_a_writer_is_killed(store: EmbeddingStore, when: str) -> None:
    store.save(key_of(2), embedding_of(2))
    child = _child(store, _KILLED[when] + f"store.save({key_of(1)!r}, embedding(1, 5000))")
    assert child.wait(60) == -signal.SIGKILL
    child.communicate()
    (partial,) = store.folder.glob("partial-*")
    assert partial.stat().st_size > 2000
    assert store.load(key_of(1)) is None
    assert same(store.load(key_of(2)), embedding_of(2))
    assert store.save(key_of(1), embedding_of(1))  # the lock went with the process
    assert EmbeddingStore(store.folder, store.max_bytes).save(key_of(3), embedding_of(3))
    assert not list(store.folder.glob("partial-*"))
    assert (store.stats().entries, store.stats().damaged) == (3, 0)


def test_a_writer_that_stands_still_stops_nobody(store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_store, "_LOCK_PATIENCE_S", 0.05)
    child = _child(store, "with store._writing():\n print('held', flush=True)\n sys.stdin.read()")
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    assert not store.save(key_of(1), embedding_of(1))
    child.communicate()
    assert store.save(key_of(1), embedding_of(1))


def test_a_disk_without_room(store: EmbeddingStore) -> None:
    code = f"""
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
print(store.save({key_of(1)!r}, embedding(1, 5000)), store.save({key_of(2)!r}, embedding(2, 8)))
print(store.stats().not_kept)
"""
    out, err = _child(store, code).communicate(timeout=60)
    assert (out, err) == ("False True\n1\n", "")
    assert not list(store.folder.glob("partial-*"))
    assert store.load(key_of(1)) is None
    assert same(store.load(key_of(2)), embedding_of(2))


def test_a_folder_that_may_only_be_read(store: EmbeddingStore) -> None:
    store.save(key_of(1), embedding_of(1))
    closed = [store.folder / "lock", path_of(store, 1).parent, store.folder]
    for path in closed:
        path.chmod(0o500)
    try:
        if os.access(store.folder, os.W_OK):
            pytest.skip("this user may write everywhere")
        assert same(store.load(key_of(1)), embedding_of(1))
        assert not store.save(key_of(2), embedding_of(2))
        store.clear()
        assert (store.stats().entries, store.stats().not_kept) == (1, 1)
    finally:
        for path in reversed(closed):
            path.chmod(0o700)


def test_several_processes_share_one_bound(store: EmbeddingStore) -> None:
    shared = EmbeddingStore(store.folder, 20 * file_bytes(500))
    code = """
import hashlib, random
dice, hits = random.Random(os.getpid()), 0
for turn in range(300):
    number = dice.randrange(40)
    key = hashlib.sha256(str(number).encode()).hexdigest()
    got = store.load(key)
    if got is not None:
        assert (got.features["image_embeddings"] == number).all()
        hits += 1
        continue
    assert store.save(key, embedding(number, 500))
    with store._writing() as lock:
        total = sum(path.stat().st_size for path in store.folder.glob("*/*"))
        assert total + sum(path.stat().st_size for path in store.folder.glob("partial-*")) <= store.max_bytes
        assert total <= embedding_store._recorded(lock) <= store.max_bytes
print(hits, store.stats().damaged, store.stats().not_kept)
"""
    children = [_child(shared, code) for _ in range(3)]
    for child in children:
        out, err = child.communicate(timeout=120)
        assert err == ""
        hits, damaged, not_kept = map(int, out.split())
        assert hits > 0
        assert (damaged, not_kept) == (0, 0)
    stats = shared.stats()
    assert 10 <= stats.entries <= 20
    assert stats.bytes <= shared.max_bytes


def test_it_is_killed_again_and_again(store: EmbeddingStore) -> None:
    shared = EmbeddingStore(store.folder, 3 << 20)
    code = """
import hashlib, itertools
print("ready", flush=True)
for number in itertools.count():
    store.save(hashlib.sha256(str(number % 8).encode()).hexdigest(), embedding(number % 8, 1 << 19))
"""
    dice = random.Random(0)
    for _ in range(4):
        child = _child(shared, code)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.02 + dice.random() * 0.05)
        child.kill()
        child.communicate()
        for number in range(8):
            got = shared.load(key_of(number))
            assert got is None or same(got, embedding_of(number, 1 << 19))
        with shared._writing():
            assert sum(path.stat().st_size for path in store.folder.rglob("*") if path.name != "lock") <= 3 << 20
    assert shared.stats().damaged == 0


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(OptionError, match=r"photo\.jpg': expected a folder for encoded images"):
        EmbeddingStore(tmp_path / "photo.jpg", 1 << 20)
