"""The nearest vectors of a table, held to the definition applied to all of them at once."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast import embedding_search
from visionfast.embed_table import Row, TableInfo, write_table
from visionfast.embedding_search import Hit, Nearest, cosines, rows_of, search, table_info, vectors_by_sha256
from visionfast.errors import ArtifactError, OptionError, ShapeError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.types import PreprocessSpec

Vectors = npt.NDArray[np.float32]


def info(dim: int) -> TableInfo:
    return TableInfo("m", "a", "", "engine", "m/v", PreprocessSpec((8, 8)), DecodeLimits(), dim, False, None, ".", "0")


def written(path: Path, vectors: Sequence[Vectors | None], dim: int) -> Path:
    """A table: row i is `i.jpg`, its sha256 is 64 times the last digit of i; one without a vector has an error."""
    rows = [
        Row(b"%06d.jpg" % i, 1, 2, str(i % 10) * 64, None if vector is not None else "truncated", vector)
        for i, vector in enumerate(vectors)
    ]
    write_table(path, info(dim), rows)
    return path


def by_definition(vectors: Vectors, query: Vectors, k: int) -> list[tuple[int, float]]:
    similarity = cosines(vectors, query)
    rows = [i for i in range(len(vectors)) if not np.isnan(similarity[i])]
    return [(i, float(similarity[i])) for i in sorted(rows, key=lambda i: -similarity[i])[:k]]


def shown(nearest: Nearest, vectors: Vectors, sizes: Sequence[int]) -> list[list[tuple[int, float]]]:
    first = 0
    for size in [*sizes, len(vectors)]:
        some = vectors[first : first + size]
        nearest.add(some, lambda i, similarity, first=first: Hit("", similarity, first + i))
        first += len(some)
    return [[(hit.row, hit.similarity) for hit in hits] for hits in nearest.found()]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Vectors, Vectors]:
    """(N, D) vectors and (Q, D) queries, full of ties, multiples, zeros and what is not finite."""
    n, d, q = draw(st.integers(0, 60)), draw(st.integers(1, 40)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vectors = rng.normal(size=(n, d)).astype(np.float32)
    if draw(st.booleans()):  # all alike, as an untrained network has them
        vectors = (1 + 1e-4 * vectors).astype(np.float32)
    for i in range(n):
        kind = draw(st.sampled_from(["as it is", "copy", "scaled", "opposite", "zero", "nan", "inf", "huge", "tiny"]))
        other = vectors[int(rng.integers(n))]
        with np.errstate(over="ignore", under="ignore"):
            vectors[i] = {
                "copy": other,
                "scaled": other * np.float32(2.0**-3),
                "opposite": -other,
                "zero": 0 * np.nan_to_num(other),
                "huge": np.clip(other, -1, 1) * np.float32(3e38),
                "tiny": other * np.float32(1e-38),
            }.get(kind, vectors[i])
        if kind in ("nan", "inf"):
            vectors[i, int(rng.integers(d))] = float(kind)
    queries = rng.normal(size=(q, d)).astype(np.float32)
    if n and draw(st.booleans()):
        queries[0] = np.nan_to_num(vectors[0], nan=0, posinf=1, neginf=1)
    return vectors, queries


@settings(deadline=None, max_examples=300)
@given(tables(), st.integers(1, 70), st.lists(st.integers(0, 25), max_size=4))
def test_the_nearest_are_those_of_the_definition(table: tuple[Vectors, Vectors], k: int, sizes: Sequence[int]) -> None:
    vectors, queries = table
    assert shown(Nearest(queries, k), vectors, sizes) == [by_definition(vectors, query, k) for query in queries]


def test_more_queries_than_are_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_search, "_QUERIES", 3)
    vectors, queries = (np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32) for n in (40, 7))
    assert shown(Nearest(queries, 4), vectors, [9]) == [by_definition(vectors, query, 4) for query in queries]


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_equal_vectors_have_one_similarity_wherever_they_lie(dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(50, dim)).astype(np.float32)
    vectors[[3, 17, 49]] = vectors[20]
    query = rng.normal(size=dim).astype(np.float32)
    together = cosines(vectors, query)
    assert len({float(value) for value in together[[3, 17, 20, 49]]}) == 1
    assert float(cosines(vectors[20:21], query)[0]) == float(together[20])


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32 - 1), st.sampled_from([1e-20, 1e-3, 1, 1e3, 1e20]))
def test_a_vector_is_like_itself(dim: int, seed: int, scale: float) -> None:
    vector = (np.random.default_rng(seed).normal(size=(1, dim)) * scale).astype(np.float32)
    assert cosines(vector, vector[0]).tolist() == [1.0]
    assert cosines(-vector, vector[0]).tolist() == [-1.0]


def test_zero_is_like_nothing() -> None:
    vectors = np.array([[0, 0], [1, 0], [-1, 0]], np.float32)
    assert cosines(vectors, np.array([1, 0])).tolist() == [0.0, 1.0, -1.0]
    assert cosines(vectors, np.zeros(2)).tolist() == [0.0, 0.0, 0.0]


def test_the_definition_is_the_cosine() -> None:
    rng = np.random.default_rng(0)
    vectors, query = rng.normal(size=(20, 7)), rng.normal(size=7)
    expected = [v @ query / np.linalg.norm(v) / np.linalg.norm(query) for v in vectors]
    np.testing.assert_allclose(cosines(vectors, query), expected, rtol=1e-6)


# ---- a table ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of 3 rows a group, read 2 at a time."""
    monkeypatch.setattr("visionfast.embed_table._ROW_GROUP_BYTES", 3 * 4 * 6)
    monkeypatch.setattr(embedding_search, "_BATCH_BYTES", 2 * 4 * 6)


@pytest.fixture
def vectors() -> list[Vectors | None]:
    """Of 6 channels: 14 images, some of them bad."""
    rng = np.random.default_rng(0)
    made: list[Vectors | None] = list(rng.normal(size=(14, 6)).astype(np.float32))
    made[0] = made[3] = made[8] = None
    made[5] = np.full(6, np.nan, np.float32)
    made[9] = made[2]
    return made


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("k", [1, 3, 10, 1000])
def test_search(tmp_path: Path, vectors: list[Vectors | None], k: int) -> None:
    table = written(tmp_path / "t.parquet", vectors, 6)
    assert pq.ParquetFile(table).num_row_groups == 5
    dense = np.array([np.full(6, np.nan) if v is None else v for v in vectors], np.float32)
    queries = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    expected = [
        [Hit(f"{row:06d}.jpg", similarity, row) for row, similarity in by_definition(dense, query, k)]
        for query in queries
    ]
    assert search(table, queries, k) == expected
    assert len(expected[0]) == min(k, 10)


@pytest.mark.usefixtures("small_groups")
def test_an_image_of_the_table_comes_first_and_its_copy_next(tmp_path: Path, vectors: list[Vectors | None]) -> None:
    table = written(tmp_path / "t.parquet", vectors, 6)
    (hits,) = search(table, np.array([vectors[9]]), 3)
    assert [(hit.row, hit.similarity) for hit in hits[:2]] == [(2, 1.0), (9, 1.0)]
    assert hits[2].similarity < 1


def test_lengths_do_not_matter(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    units = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    plain, unit = (written(tmp_path / f"{i}.parquet", list(some), 6) for i, some in enumerate((vectors, units)))
    queries = np.random.default_rng(1).normal(size=(2, 6)).astype(np.float32)
    for of_plain, of_unit in zip(search(plain, queries, 20), search(unit, 7 * queries, 20), strict=True):
        assert [hit.row for hit in of_plain] == [hit.row for hit in of_unit]
        np.testing.assert_allclose([h.similarity for h in of_plain], [h.similarity for h in of_unit], atol=1e-6)


def test_no_queries(tmp_path: Path) -> None:
    table = written(tmp_path / "t.parquet", [np.ones(6, np.float32)], 6)
    assert search(table, np.zeros((0, 6), np.float32), 3) == []


def test_memory_does_not_grow_with_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visionfast.embed_table._ROW_GROUP_BYTES", 64 << 10)
    monkeypatch.setattr(embedding_search, "_BATCH_BYTES", 64 << 10)
    rng = np.random.default_rng(0)
    peaks = []
    for n in (1_000, 20_000):  # 256 KB and 5 MB of vectors
        table = written(tmp_path / f"{n}.parquet", list(rng.normal(size=(n, 64)).astype(np.float32)), 64)
        before = pa.default_memory_pool().max_memory()
        tracemalloc.start()
        search(table, np.ones((1, 64), np.float32), 5)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        arrow = pa.default_memory_pool().max_memory() - before
        assert arrow < 3_000_000
    assert peaks[1] < peaks[0] + 200_000


# ---- by sha256 --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_groups")
def test_vectors_by_sha256(tmp_path: Path, vectors: list[Vectors | None]) -> None:
    table = written(tmp_path / "t.parquet", vectors, 6)
    found = vectors_by_sha256(table, {"7" * 64, "2" * 64, "8" * 64, "5" * 64, "x" * 64})
    # 8 has an error, 5 is not finite; of two files with the same bytes, here 2 and 12, the first one's.
    assert set(found) == {"7" * 64, "2" * 64}
    np.testing.assert_array_equal(found["7" * 64], vectors[7])
    np.testing.assert_array_equal(found["2" * 64], vectors[2])
    assert vectors_by_sha256(table, set()) == {}


# ---- what is no table -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sets(st.integers(0, 19)), min_size=1, max_size=3), st.integers(1, 25), st.integers(0, 2**32 - 1))
def test_rows_that_are_left_out(
    tmp_path_factory: pytest.TempPathFactory, exclude: list[set[int]], k: int, seed: int
) -> None:
    vectors = np.random.default_rng(seed).integers(-1, 2, (20, 3)).astype(np.float32)  # full of ties
    path = tmp_path_factory.getbasetemp() / "excluded.parquet"
    table = written(path, list(vectors), 3)
    queries = np.ones((len(exclude), 3), np.float32)
    every = by_definition(vectors, queries[0], 20)
    for hits, own in zip(search(str(table), queries, k, exclude=exclude), exclude, strict=True):
        assert [(hit.row, hit.similarity) for hit in hits] == [hit for hit in every if hit[0] not in own][:k]


def test_rows_to_leave_out_are_of_each_query(tmp_path: Path) -> None:
    table = written(tmp_path / "t.parquet", [np.ones(6, np.float32)], 6)
    with pytest.raises(ShapeError, match=r"^exclude: expected rows for each of 2 queries, got them for 1"):
        search(table, np.ones((2, 6), np.float32), 1, exclude=[set()])
    assert search(table, np.ones((1, 6), np.float32), 1, exclude=[{0}]) == [[]]


@pytest.mark.usefixtures("small_groups")
def test_rows_of(tmp_path: Path, vectors: list[Vectors | None]) -> None:
    table = written(tmp_path / "t.parquet", vectors, 6)
    count = len(vectors)
    found = rows_of(table, ["3" * 64, "no hash", "4" * 64, "3" * 64], [None, "000007.jpg", "000005.jpg", "gone.jpg"])
    threes = set(range(3, count, 10))
    assert found == [threes, {7}, set(range(4, count, 10)) | {5}, threes]


def _bad_table(path: Path, kind: str) -> str:
    """Writes it; what the message says."""
    if kind == "missing":
        return "no such file; `visionfast embed ENGINE DIR -o "
    if kind == "unfinished":
        path.with_name(f"{path.name}.journal").touch()
        return "not finished yet; run the same `visionfast embed` again"
    if kind == "folder":
        path.mkdir()
        return "not a file"
    if kind == "pipe":
        os.mkfifo(path)
        return "not a file"
    if kind in ("empty", "text"):
        path.write_bytes(b"" if kind == "empty" else b"file,vector\n" * 99)
        return "something else"
    good = written(path, list(np.ones((5000, 6), np.float32)), 6).read_bytes()
    if kind in ("first half", "last byte gone"):
        path.write_bytes(good[: len(good) // 2] if kind == "first half" else good[:-1])
        return "damaged; delete it"
    table = pq.read_table(path)
    if kind == "of another kind":
        pq.write_table(table.replace_schema_metadata({}), path)
        return "Parquet file of another kind"
    if kind == "without a column":
        pq.write_table(table.drop_columns(["sha256"]), path)
        return "expected the columns"
    if kind == "another dim":
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(5000 * 5, np.float32)), 5)
        pq.write_table(table.set_column(5, "vector", vectors), path)
        return "expected the columns"
    if kind == "lists":
        column = pa.array([[1.0] * 6] * 5000, pa.list_(pa.float32()))
        pq.write_table(table.set_column(5, "vector", column), path)
        return "expected the columns"
    if kind == "damaged metadata":
        pq.write_table(table.replace_schema_metadata({"visionfast": "{"}), path)
        return "damaged"
    if kind == "no rows":
        written(path, [], 6)
        return "got none in 0 rows"
    assert kind == "all bad"
    written(path, [None] * 7, 6)
    return "got none in 7 rows"


_BAD = ["missing", "unfinished", "folder", "pipe", "empty", "text", "first half", "last byte gone", "of another kind"]
_BAD += ["without a column", "another dim", "lists", "damaged metadata", "no rows", "all bad"]


@pytest.mark.parametrize("kind", _BAD)
def test_what_is_no_table_is_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t.parquet"
    words = _bad_table(path, kind)
    with pytest.raises(ArtifactError) as caught:
        search(path, np.ones((1, 6), np.float32), 3)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 0.99])
def test_damage_inside_is_one_line_or_harmless(tmp_path: Path, place: float) -> None:
    path = written(tmp_path / "t.parquet", list(np.ones((5000, 6), np.float32)), 6)
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    content[at : at + 64] = bytes(64)
    path.write_bytes(content)
    complaint = ""
    try:
        (hits,) = search(path, np.ones((1, 6), np.float32), 3)
    except ArtifactError as error:
        complaint, hits = str(error), []
    # Nothing checks the vectors' own bytes; anything else that is hit is noticed.
    assert len(hits) == 3 or complaint.startswith(f"{path}: ")
    assert "\n" not in complaint


@pytest.mark.parametrize("k", [0, -1])
def test_no_neighbours(tmp_path: Path, k: int) -> None:
    table = written(tmp_path / "t.parquet", [np.ones(6, np.float32)], 6)
    with pytest.raises(OptionError, match=r"^k: expected at least 1"):
        search(table, np.ones((1, 6), np.float32), k)


@pytest.mark.parametrize(
    ("queries", "words"),
    [
        (np.ones((1, 5), np.float32), r"expected \(Q, 6\) as .* has them, got \(1, 5\)"),
        (np.ones(6, np.float32), r"expected \(Q, D\), got \(6,\)"),
        (np.full((2, 6), np.nan), "expected finite numbers"),
    ],
)
def test_queries_that_fit_no_table(tmp_path: Path, queries: npt.NDArray[Any], words: str) -> None:
    table = written(tmp_path / "t.parquet", [np.ones(6, np.float32)], 6)
    with pytest.raises(ShapeError, match=f"^queries: {words}"):
        search(table, queries, 1)


def test_table_info(tmp_path: Path) -> None:
    assert table_info(written(tmp_path / "t.parquet", [], 6)) == info(6)
