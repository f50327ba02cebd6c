"""The table: what goes in comes out, and what is none is told apart."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast import embed_table
from visionfast.embed_table import COLUMNS, Row, TableInfo, read_info, read_rows, write_table
from visionfast.embedding_search import rows_of, search
from visionfast.errors import ArtifactError, ManifestError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.types import PreprocessSpec

INFO = TableInfo(
    model="small",
    architecture="dinov2_vits14",
    license="Apache-2.0",
    engine="0" * 64,
    engine_name="small/openvino",
    preprocess=PreprocessSpec((28, 28)),
    limits=DecodeLimits(),
    dim=3,
    normalised=False,
    patches=None,
    folder="photos",
    visionfast="0",
)


def _row(path: bytes, vector: Any = (1, 2, 3), **fields: Any) -> Row:
    made = Row(path, 5, 7, "ab", None, None if vector is None else np.asarray(vector, np.float32))
    return dataclasses.replace(made, **fields)


def _plain(rows: Any) -> list[Any]:
    """For `==`; vectors by their bits."""
    return [
        (
            *dataclasses.astuple(dataclasses.replace(row, vector=None)),
            None if row.vector is None else row.vector.tobytes(),
        )
        for row in rows
    ]


_ROWS = st.dictionaries(
    st.binary(min_size=1, max_size=6),
    st.builds(
        Row,
        st.just(b""),
        st.integers(0, 2**63 - 1),
        st.integers(1 - 2**63, 2**63 - 1),
        st.none() | st.just("ab"),
        st.none() | st.text(st.characters(exclude_categories=["Cs"])),
        st.lists(st.floats(width=32), min_size=3, max_size=3).map(lambda v: np.asarray(v, np.float32)),
    ),
    max_size=9,
).map(
    lambda found: [
        dataclasses.replace(row, path=path, vector=None if row.error is not None else row.vector)
        for path, row in sorted(found.items())
    ]
)


@settings(deadline=None)
@given(rows=_ROWS, group=st.integers(1, 4))
def test_what_goes_in_comes_out(tmp_path_factory: pytest.TempPathFactory, rows: list[Row], group: int) -> None:
    path = tmp_path_factory.getbasetemp() / "table.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embed_table, "_ROW_GROUP_BYTES", 4 * 3 * group)
        write_table(path, INFO, iter(rows))
        first = path.read_bytes()
        assert _plain(read_rows(path)) == _plain(rows)
        assert _plain(read_rows(path, vectors=False)) == _plain(dataclasses.replace(row, vector=None) for row in rows)
        assert read_info(path) == INFO
        write_table(path, INFO, read_rows(path))  # while it is being read
        assert path.read_bytes() == first
        assert pq.ParquetFile(path).num_row_groups == -(-len(rows) // group)


def test_a_reader_holds_a_few_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = dataclasses.replace(INFO, dim=1000)
    monkeypatch.setattr(embed_table, "_ROW_GROUP_BYTES", 40_000)
    path = tmp_path / "table.parquet"
    write_table(path, info, (_row(b"%06d" % i, np.full(1000, i)) for i in range(1000)))
    assert path.stat().st_size > 4_000_000
    before = pa.total_allocated_bytes()
    assert max(pa.total_allocated_bytes() - before for _ in read_rows(path)) < 400_000


def test_as_others_read_it(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, INFO, [_row(b"a.jpg"), _row(b"b\xff.jpg", None, sha256=None, error="no such file")])
    table = pq.read_table(path)
    assert tuple(table.column_names) == COLUMNS
    assert table["vector"].type == pa.list_(pa.field("element", pa.float32(), nullable=False), 3)
    assert table.drop_columns(["vector"]).to_pylist() == [
        {"file": "a.jpg", "bytes": 5, "modified_ns": 7, "sha256": "ab", "error": None},
        {"file": "b\\xff.jpg", "bytes": 5, "modified_ns": 7, "sha256": None, "error": "no such file"},
    ]
    np.testing.assert_array_equal(table["vector"].to_pylist(), [[1, 2, 3], [np.nan] * 3])
    assert json.loads(table.schema.metadata[b"visionfast"])["dim"] == 3


def test_nothing_else_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    (tmp_path / ".table.parquet.partial").write_bytes(b"of a writer that was killed")
    write_table(path, INFO, [_row(b"a")])
    assert os.listdir(tmp_path) == ["table.parquet"]  # noqa: PTH208

    def failing() -> Any:
        yield _row(b"b")
        raise RuntimeError("in the middle")

    before = path.read_bytes()
    with pytest.raises(RuntimeError):
        write_table(path, INFO, failing())
    assert (os.listdir(tmp_path), path.read_bytes()) == (["table.parquet"], before)  # noqa: PTH208


def _says(path: Path, *words: str) -> None:
    for read in (read_info, lambda path: list(read_rows(path))):
        with pytest.raises(ArtifactError) as caught:
            read(path)
        said = str(caught.value)
        assert said.startswith(f"{path}: ")
        assert "\n" not in said
        for word in words:
            assert word in said


def test_what_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    _says(path, "no such file")
    path.write_bytes(b"")
    _says(path, "got something else")
    path.write_bytes(b"a text\n" * 100)
    _says(path, "got something else")
    pq.write_table(pa.table({"file": ["a"]}), path)
    _says(path, "a Parquet file of another kind")


def test_a_damaged_table(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, INFO, [_row(b"a"), _row(b"b")])
    whole = path.read_bytes()
    for length in (4, 20, len(whole) // 2, len(whole) - 20):
        path.write_bytes(whole[:length])
        _says(path, "damaged; delete it, and embed the images again")
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    path.write_bytes(whole[:footer] + b"\xff" * 40 + whole[footer + 40 :])
    _says(path, "damaged")
    for columns in (["file"], [*COLUMNS[:-1]]):
        pq.write_table(pq.read_table(pa.BufferReader(whole)).select(columns), path)
        _says(path, "expected the columns file string, bytes int64", "embed the images again")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ("nonsense", "metadata: damaged"),
        ("[]", "metadata: expected format 1"),
        ('{"format": 2}', "metadata: expected format 1"),
        ('{"format": 1}', "metadata: the key 'model' is missing"),
    ],
)
def test_metadata_of_another_kind(tmp_path: Path, metadata: str, words: str) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, INFO, [_row(b"a")])
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"visionfast": metadata.encode()}), path)
    _says(path, words)
    with pytest.raises(ManifestError, match=words):
        TableInfo.from_json(metadata)


def test_pages_that_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, INFO, [_row(b"%03d" % i) for i in range(100)])
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 60 + whole[64:])
    assert read_info(path) == INFO
    with pytest.raises(ArtifactError, match=r"table\.parquet: damaged; delete it, and embed the images again$"):
        list(read_rows(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 0}, "metadata: dim: expected 1 to 65536, got 0"),
        ({"dim": -1}, "metadata: dim: expected 1 to 65536, got -1"),
        ({"dim": 2**40}, "metadata: dim: expected 1 to 65536, got 1099511627776"),
        ({"folder": "a\ud800"}, r"metadata: folder: expected text, got \ud800 in it"),
        ({"engine_name": "a\0"}, r"metadata: engine_name: expected text, got \x00 in it"),
    ],
)
def test_claims_that_cannot_be(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, INFO, [_row(b"a")])
    metadata = {b"visionfast": dataclasses.replace(INFO, **change).to_json().encode()}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path)
    _says(path, words, "delete it, and embed the images again")


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, INFO, [_row(b"abcd")])
    table = pq.read_table(path)
    buffers = pa.array(["abcd"]).buffers()
    buffers[2] = pa.py_buffer(b"ab\xff\xfe")
    pq.write_table(table.set_column(0, table.schema[0], pa.Array.from_buffers(pa.string(), 1, buffers)), path)
    with pytest.raises(ArtifactError, match=r"table\.parquet: damaged; delete it, and embed the images again$"):
        list(read_rows(path))
    for ask in (
        lambda: search(path, np.ones((1, 3), np.float32), 1),
        lambda: rows_of(path, ["ab"], ["a"]),
    ):
        with pytest.raises(ArtifactError, match=r"table\.parquet: damaged; delete it, and embed the images again$"):
            ask()


def test_a_folder_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    info = dataclasses.replace(INFO, folder="f" * 5000)
    write_table(path, info, [_row(b"a")])
    assert read_info(path) == info


def test_rows_out_of_order(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    for names in ([b"b", b"a"], [b"a", b"a"]):
        write_table(path, INFO, [_row(name) for name in names])
        with pytest.raises(
            ArtifactError, match=r"expected the files in order, got 'a' out of it; delete it, and embed them again$"
        ):
            list(read_rows(path))


@pytest.mark.parametrize("change", [{"dim": 4}, {"engine": "1"}, {"patches": "float16"}, {"folder": "ü"}])
def test_a_description_leads_back(change: dict[str, Any]) -> None:
    info = dataclasses.replace(INFO, **change)
    assert TableInfo.from_json(info.to_json()) == info
