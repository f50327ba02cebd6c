"""The table that `visionfast embed` writes: a Parquet file with a row for each image file, in the order of their paths.

    file          string             path below the folder that was embedded, `/` between; see `image_files.shown_name`
    bytes         int64              the file's size
    modified_ns   int64              when it was last written, nanoseconds since 1970
    sha256        string or null     of the file's bytes, hex; null where it could not be read
    error         string or null     what is wrong with it, one line
    vector        float32[D]         NaN where there is an error

No vector is null: Arrow reads null lists of a fixed size from Parquet only since 2026 (apache/arrow#35692), and the
table is for other readers, too. Under the key `visionfast` the schema's metadata holds a `TableInfo` as JSON. The bytes
are those of the same rows whichever way they were come by: no time of day is in them, and no trace of interruptions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from visionfast.errors import ArtifactError, ManifestError
from visionfast.image_files import name_bytes, shown_name
from visionfast.preprocess.limits import DecodeLimits
from visionfast.strict_json import decode
from visionfast.terminal import one_line
from visionfast.types import EngineManifest, PreprocessSpec

__all__ = [
    "COLUMNS",
    "Row",
    "TableInfo",
    "engine_identity",
    "open_table",
    "read_info",
    "read_rows",
    "write_table",
]

COLUMNS = ("file", "bytes", "modified_ns", "sha256", "error", "vector")
_MAGIC = b"PAR1"
"""The first bytes of a Parquet file."""
_METADATA_KEY = b"visionfast"
_FORMAT = 1
_DIM_MOST = 1 << 16
"""Of the networks that are known, the widest has 4,096 channels; what a file claims is memory."""
_ROW_GROUP_BYTES = 16 << 20
"""Of vectors. It sets how much memory a reader or a writer needs, and it belongs to the bytes of the file."""


_TEXTS = ("model", "architecture", "license", "engine", "engine_name", "folder", "visionfast")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""No path, and no file of UTF-8, has it."""


@dataclass(frozen=True, slots=True)
class TableInfo:
    """What a table says of itself.

    Attributes:
        model, architecture, license: of the `ModelSpec`.
        engine: `engine_identity`: vectors of one table, and a query's, come from engines that have the same.
        engine_name: where the engine was, `<model>/<variant>`; for people, and to find it again.
        preprocess: what stood in front of the engine.
        limits: what an image might claim.
        dim: D.
        normalised: whether vectors have a length of 1.
        patches: dtype of the dense features beside the table; `None` where there are none.
        folder: the folder that was embedded, seen from the table's own.
        visionfast: the version that wrote the table last.
    """

    model: str
    architecture: str
    license: str
    engine: str
    engine_name: str
    preprocess: PreprocessSpec
    limits: DecodeLimits
    dim: int
    normalised: bool
    patches: Literal["float32", "float16"] | None
    folder: str
    visionfast: str

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> TableInfo:
        """Raises `ManifestError` where it is no such thing."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"metadata: damaged ({error})") from error
        if not isinstance(document, dict) or document.pop("format", None) != _FORMAT:
            raise ManifestError(f"metadata: expected format {_FORMAT}")
        info: TableInfo = decode(cls, document, "metadata")
        if not 1 <= info.dim <= _DIM_MOST:
            raise ManifestError(f"metadata: dim: expected 1 to {_DIM_MOST}, got {info.dim}")
        for name in _TEXTS:
            if (found := _NO_TEXT.search(getattr(info, name))) is not None:
                raise ManifestError(f"metadata: {name}: expected text, got {one_line(found[0])} in it")
        return info


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One image file.

    Attributes:
        path: below the folder; the bytes of its name.
        n_bytes, modified_ns, sha256, error: as in the table.
        vector: (D,) float32; `None` where there is an error.
    """

    path: bytes
    n_bytes: int
    modified_ns: int
    sha256: str | None
    error: str | None
    vector: npt.NDArray[np.float32] | None


def engine_identity(manifest: EngineManifest) -> str:
    """The sha256 of what turns an image into a vector: weights, graph, compiled files, backend and preprocessing.

    Unlike `embedding.model_key` it leaves out visionfast's version: a table of a million images outlives a release.
    """
    parts: dict[str, Any] = {
        name: getattr(manifest, name) for name in ("backend", "precision", "device", "runtime_version")
    }
    parts |= {"weights": manifest.weights_sha256, "onnx": dict(manifest.onnx_sha256), "files": dict(manifest.sha256)}
    parts["preprocess"] = dataclasses.asdict(manifest.spec.preprocess)
    return hashlib.sha256(b"visionfast embed engine\0" + json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ---- reading ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_table(path: Path) -> Iterator[pq.ParquetFile]:
    """The Parquet file; inside, what Arrow says of it becomes one line.

    Raises:
        ArtifactError: it is not there, cannot be read, is damaged, or no Parquet file.
    """
    try:
        # pyarrow's pre_buffer, on by default, holds on to all that was read.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except pa.ArrowException as error:
        raise _unusable(path) from error
    except FileNotFoundError as error:
        raise ArtifactError(f"{path}: no such file") from error
    except OSError as error:
        if error.errno is None:  # Arrow's word for bytes that are no Thrift, which goes on for lines
            raise _unusable(path) from error
        raise ArtifactError(f"{path}: cannot be read ({os.strerror(error.errno)})") from error


def _unusable(path: Path) -> ArtifactError:
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(_MAGIC)) == _MAGIC:
            return ArtifactError(f"{path}: damaged; delete it, and embed the images again")
    return ArtifactError(f"{path}: expected a table of `visionfast embed`, got something else")


def read_info(path: Path) -> TableInfo:
    """What a table says of itself.

    Raises:
        ArtifactError: it is not there, cannot be read, is damaged, or no table that `visionfast embed` wrote.
    """
    with open_table(path) as file:
        return _info(path, file.schema_arrow)


def _info(path: Path, schema: pa.Schema) -> TableInfo:
    content = (schema.metadata or {}).get(_METADATA_KEY)
    if content is None:
        raise ArtifactError(f"{path}: expected a table of `visionfast embed`, got a Parquet file of another kind")
    try:
        info = TableInfo.from_json(content)
    except ManifestError as error:
        raise ArtifactError(f"{path}: {error}; delete it, and embed the images again") from None
    expected = _schema(info)
    if not schema.equals(expected):
        got = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise ArtifactError(
            f"{path}: expected the columns {', '.join(f'{field.name} {field.type}' for field in expected)}, got {got}; "
            "delete it, and embed the images again"
        )
    return info


def read_rows(path: Path, *, vectors: bool = True) -> Iterator[Row]:
    """A table's rows, in order, in constant memory.

    Args:
        path: of the table.
        vectors: with `False` they are left unread, and `Row.vector` is `None` everywhere.

    Raises:
        ArtifactError: as `read_info`, or its rows are not in order.
    """
    with open_table(path) as file:
        info = _info(path, file.schema_arrow)
        last = b""
        columns = COLUMNS if vectors else COLUMNS[:-1]
        for batch in file.iter_batches(batch_size=_rows_a_group(info.dim), columns=list(columns), use_threads=False):
            batch.validate(full=True)  # text is UTF-8, and what should have a value has one
            names, *plain, errors = (batch.column(name).to_pylist() for name in COLUMNS[:-1])
            found = _dense(batch.column("vector"), info.dim) if vectors else [None] * len(batch)
            for name, n_bytes, modified_ns, sha256, error, vector in zip(names, *plain, errors, found, strict=True):
                if name is None or n_bytes is None or modified_ns is None:
                    raise _unusable(path)
                row = Row(name_bytes(name), n_bytes, modified_ns, sha256, error, None if error is not None else vector)
                if row.path <= last:
                    raise ArtifactError(
                        f"{path}: expected the files in order, got {name!r} out of it; delete it, and embed them again"
                    )
                last = row.path
                yield row


def _dense(column: pa.Array, dim: int) -> npt.NDArray[np.float32]:
    """(rows, D) f32."""
    values: npt.NDArray[np.float32] = column.values.slice(column.offset * dim, len(column) * dim).to_numpy()
    return values.reshape(len(column), dim)


# ---- writing ----------------------------------------------------------------------------------------------


def write_table(path: Path, info: TableInfo, rows: Iterable[Row]) -> None:
    """Writes a table beside its place and renames it into it: a reader sees the old one or the new one, whole.

    Args:
        path: of the table. What a killed writer left of an earlier one is overwritten: there is one writer at a time.
        info: what it says of itself.
        rows: in the order of their paths.

    Raises:
        ArtifactError: it cannot be written; the one that was there is untouched.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        try:
            with partial.open("xb") as file:
                _write(file, info, rows)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written ({_reason(error)}); nothing half-written was left") from error


def _write(file: Any, info: TableInfo, rows: Iterable[Row]) -> None:
    schema = _schema(info)
    with pq.ParquetWriter(
        file,
        schema,
        # Vectors are noise to a compressor; plain, they are read at the speed of the disk.
        compression=dict.fromkeys(COLUMNS[:-1], "zstd") | {"vector.list.element": "none"},
        use_dictionary=False,
        write_statistics=["file"],
    ) as writer:
        group: list[Row] = []
        size = _rows_a_group(info.dim)
        for row in rows:
            group.append(row)
            if len(group) == size:
                writer.write_batch(_batch(schema, info.dim, group), row_group_size=size)
                group.clear()
        if group:
            writer.write_batch(_batch(schema, info.dim, group), row_group_size=size)


def _batch(schema: pa.Schema, dim: int, rows: Sequence[Row]) -> pa.RecordBatch:
    dense = np.full((len(rows), dim), np.nan, np.float32)
    for i, row in enumerate(rows):
        assert (row.vector is None) == (row.error is not None), "a vector, or what is wrong"
        if row.vector is not None:
            dense[i] = row.vector
    columns = [
        [shown_name(row.path) for row in rows],
        [row.n_bytes for row in rows],
        [row.modified_ns for row in rows],
        [row.sha256 for row in rows],
        [row.error for row in rows],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=False)]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(dense.reshape(-1)), type=schema[-1].type)
    return pa.RecordBatch.from_arrays([*arrays, vectors], schema=schema)


def _schema(info: TableInfo) -> pa.Schema:
    return pa.schema(
        [
            pa.field("file", pa.string(), nullable=False),
            pa.field("bytes", pa.int64(), nullable=False),
            pa.field("modified_ns", pa.int64(), nullable=False),
            pa.field("sha256", pa.string()),
            pa.field("error", pa.string()),
            pa.field("vector", pa.list_(pa.field("element", pa.float32(), nullable=False), info.dim), nullable=False),
        ],
        metadata={_METADATA_KEY: info.to_json().encode()},
    )


def _rows_a_group(dim: int) -> int:
    return max(1, _ROW_GROUP_BYTES // (4 * dim))


def _reason(error: OSError) -> str:
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))
