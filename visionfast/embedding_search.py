"""The nearest of many vectors by their cosine: exact, in one pass over a table that `visionfast embed` wrote.

No index: of 200,000 vectors of 384 channels, reading is half of the 1.2 s of processor time that a search took (pyarrow
26), and another query adds some milliseconds. An index would be quicker only where it stays in memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.embed_table import TableInfo, open_table, read_info
from visionfast.errors import ArtifactError, OptionError, ShapeError
from visionfast.image_files import name_bytes, same_file, shown_name
from visionfast.types import FloatArray

__all__ = ["Hit", "Nearest", "cosines", "files_at", "rows_of", "search", "table_info", "vectors_by_sha256"]

_BATCH_BYTES = 16 << 20
"""Of vectors, float32, that are in memory at a time."""

_QUERIES = 256
"""That are compared with those at a time."""

_LENGTHS = (1e-15, 1e15)
"""Between these, no product of float32 vectors vanishes or overflows."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One of the nearest images.

    Attributes:
        file: as the table has it.
        similarity: cosine, -1 to 1.
        row: in the table, from 0.
    """

    file: str
    similarity: float
    row: int


def cosines(vectors: FloatArray, query: FloatArray) -> npt.NDArray[np.float32]:
    """The cosine of each vector with one query: the definition.

    In float64, each vector by itself and its products added in the same order wherever it lies, so that two equal
    vectors have one similarity; then rounded to float32, which is as much as the vectors know.

    Args:
        vectors: (N, D).
        query: (D,).

    Returns:
        (N,) float32, within -1 and 1; 0 where a vector or the query is zero, NaN where either has NaN or Inf.
    """
    wide, other = np.ascontiguousarray(vectors, np.float64), np.ascontiguousarray(query, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        products = (wide * other).sum(axis=1)
        lengths = np.sqrt((wide * wide).sum(axis=1)) * np.sqrt((other * other).sum())
        lengths[~np.isfinite(lengths)] = np.nan
        similarity = np.divide(products, lengths, out=np.zeros(len(wide)), where=lengths != 0)
    rounded: npt.NDArray[np.float32] = np.clip(similarity, -1, 1).astype(np.float32)
    return rounded


class Nearest:
    """The k nearest of all vectors that it is shown, for each query; of equals those that came first.

    What it keeps does not grow with the vectors.

    Args:
        queries: (Q, D) float, finite.
        k: to keep for each, at least 1.

    Raises:
        OptionError: k is less than 1.
        ShapeError: the queries are not (Q, D), or not finite.
    """

    def __init__(self, queries: FloatArray, k: int) -> None:
        if k < 1:
            raise OptionError(f"k: expected at least 1, got {k}")
        if queries.ndim != 2:
            raise ShapeError(f"queries: expected (Q, D), got {queries.shape}")
        if not np.isfinite(queries).all():
            raise ShapeError("queries: expected finite numbers, got NaN or Inf")
        self._queries = queries.astype(np.float64)
        lengths = np.sqrt(np.sum(self._queries**2, axis=1, keepdims=True))
        self._units = (self._queries / np.where(lengths > 0, lengths, 1)).astype(np.float32)  # (Q, D)
        # Twice what float32 may be wrong by in a sum of D products of unit vectors (Higham, 2002, section 3.1).
        self._room = 2 * (queries.shape[1] + 8) * 2.0**-24
        self._k = k
        self._best: list[list[Hit]] = [[] for _ in queries]

    def add(self, vectors: npt.NDArray[np.float32], hit: Callable[[int, float], Hit]) -> None:
        """Shows it some more, in order. Vectors with NaN or Inf are passed over.

        Args:
            vectors: (N, D) float32.
            hit: position among them, and similarity → what is kept; called for the nearest only.
        """
        with np.errstate(invalid="ignore", over="ignore", under="ignore"):
            lengths = np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64))
        ordinary = (lengths > _LENGTHS[0]) & (lengths < _LENGTHS[1])
        for first in range(0, len(self._queries), _QUERIES):
            some = slice(first, first + _QUERIES)
            with np.errstate(invalid="ignore", over="ignore", under="ignore"):
                # A matrix product in float32 is quick, and says which vectors are worth the definition.
                rough = vectors @ self._units[some].T / np.where(ordinary, lengths, 1)[:, None]  # (N, Q)
            for query, best, similarity in zip(self._queries[some], self._best[some], rough.T, strict=True):
                similarity[~ordinary] = cosines(vectors[~ordinary], query)
                self._keep(query, best, vectors, similarity, hit)

    def _keep(
        self,
        query: npt.NDArray[np.float64],
        best: list[Hit],
        vectors: npt.NDArray[np.float32],
        rough: npt.NDArray[np.floating[Any]],
        hit: Callable[[int, float], Hit],
    ) -> None:
        """Puts into `best` what belongs there; `rough` are the similarities to within `_room`, or NaN."""
        least = best[-1].similarity - self._room if len(best) == self._k else -np.inf
        near = np.flatnonzero(rough > least)  # NaN is above nothing
        if len(near) > self._k:
            kth = np.partition(rough[near], -self._k)[-self._k]
            near = near[rough[near] >= kth - self._room]
        exact = cosines(vectors[near], query)
        order = np.argsort(-exact, kind="stable")[: self._k].tolist()
        found = [hit(int(near[i]), float(exact[i])) for i in order]
        # sorted() keeps equals in their order: those that came first stay first.
        best[:] = sorted(best + found, key=lambda hit: -hit.similarity)[: self._k]

    def found(self) -> list[list[Hit]]:
        """For each query its nearest so far, the nearest first; fewer than k where there are no more."""
        return [list(best) for best in self._best]


def search(
    table: str | os.PathLike[str],
    vectors: FloatArray,
    k: int,
    *,
    exclude: Sequence[Collection[int]] | None = None,
) -> list[list[Hit]]:
    """The k nearest images of each query, the nearest first, of equals in the table's order.

    Images without a vector, or with one that is not finite, are never among them. Reads the table once, in constant
    memory.

    Args:
        table: that `visionfast embed` wrote; its vectors need not have a length of 1.
        vectors: (Q, D) float, finite, from the engine that made the table.
        k: hits for each query, at least 1; fewer where the table has no more.
        exclude: for each query, rows that are no hits of it (`rows_of`).

    Raises:
        ArtifactError: the table is not there, cannot be read, is damaged, or has no vector in it.
        OptionError: k is less than 1.
        ShapeError: the vectors are not (Q, D) for the table's D, or not finite; or `exclude` is not of Q.
    """
    table = Path(table)
    # As many more as could be among them: those that are left are the k nearest.
    more = 0 if exclude is None else max(map(len, exclude), default=0)
    nearest = Nearest(vectors, k + more if k > 0 else k)
    excluded = [frozenset[int]()] * len(vectors) if exclude is None else [frozenset(rows) for rows in exclude]
    if len(excluded) != len(vectors):
        raise ShapeError(f"exclude: expected rows for each of {len(vectors)} queries, got them for {len(excluded)}")
    dim = table_info(table).dim
    if vectors.shape[1] != dim:
        raise ShapeError(f"queries: expected (Q, {dim}) as {table} has them, got {vectors.shape}")
    rows = 0
    for batch in _batches(table, dim, ["file", "vector"]):
        nearest.add(_dense(batch, dim), functools.partial(_hit, rows, batch.column("file")))
        rows += len(batch)
    found = nearest.found()
    if found and not found[0]:
        raise ArtifactError(f"{table}: expected images with vectors, got none in {rows} rows; embed some first")
    return [[hit for hit in hits if hit.row not in own][:k] for hits, own in zip(found, excluded, strict=True)]


def _hit(first: int, files: Any, position: int, similarity: float) -> Hit:
    return Hit(files[position].as_py(), similarity, first + position)


def vectors_by_sha256(table: Path, wanted: Collection[str]) -> dict[str, npt.NDArray[np.float32]]:
    """The vectors of those images that the table has, by the sha256 of their files; one with an error has none.

    Raises:
        ArtifactError: as `search`.
    """
    dim = table_info(table).dim
    known: dict[str, npt.NDArray[np.float32]] = {}
    groups: set[int] = set()
    with open_table(table) as file:
        # First the hashes, which are small; then the vectors of only those row groups that have one of them.
        for group in range(file.num_row_groups):
            hashes = file.read_row_group(group, columns=["sha256"]).column("sha256").to_pylist()
            if not set(wanted).isdisjoint(hashes):
                groups.add(group)
    for batch in _batches(table, dim, ["sha256", "vector"], groups=sorted(groups)):
        dense = _dense(batch, dim)
        for i, digest in enumerate(batch.column("sha256").to_pylist()):
            if digest in wanted and digest not in known and np.isfinite(dense[i]).all():
                known[digest] = dense[i].copy()
    return known


def rows_of(table: Path, sha256: Sequence[str], files: Sequence[str | None]) -> list[set[int]]:
    """The rows that are some images themselves: of the same bytes, or the same file, whatever is in it now.

    Args:
        table: as for `search`.
        sha256: of each image.
        files: each image's name in the table; `None` where it is not below the folder.

    Returns:
        for each image, row numbers from 0; mostly none or one.

    Raises:
        ArtifactError: as `search`.
    """
    of_bytes: dict[str, set[int]] = {digest: set() for digest in sha256}
    of_file: dict[str, set[int]] = {file: set() for file in files if file is not None}
    first = 0
    for batch in _batches(table, table_info(table).dim, ["file", "sha256"]):
        names, digests = (batch.column(name).to_pylist() for name in ("file", "sha256"))
        for row, (name, digest) in enumerate(zip(names, digests, strict=True), first):
            if digest in of_bytes:
                of_bytes[digest].add(row)
            if name in of_file:
                of_file[name].add(row)
        first += len(batch)
    return [
        of_bytes[digest] | (set() if file is None else of_file[file])
        for digest, file in zip(sha256, files, strict=True)
    ]


def files_at(table: Path, place: Path, folders: Sequence[Path]) -> bool:
    """Whether a file that is there is one of the table's images, under its own name or another.

    Args:
        table: as for `search`.
        place: of the file.
        folders: that the table's files may be below.

    Raises:
        ArtifactError: as `search`.
    """
    roots = [os.path.realpath(folder) for folder in folders]
    names = {shown_name(os.fsencode(os.path.relpath(os.path.realpath(place), root))) for root in roots}
    size = place.stat().st_size
    for batch in _batches(table, table_info(table).dim, ["file", "bytes"]):
        for name, n_bytes in zip(*(batch.column(each).to_pylist() for each in ("file", "bytes")), strict=True):
            if name in names:
                return True
            if n_bytes == size:  # a link to it, or it has more than one name: then it has its bytes
                below = os.fsdecode(name_bytes(name))
                if any(same_file(Path(root, below), place) for root in roots):
                    return True
    return False


def table_info(table: Path) -> TableInfo:
    """What a table says of itself: `embed_table.read_info`, for a path that may lead to a pipe.

    Raises:
        ArtifactError: as `search`.
    """
    if not table.exists():
        if table.with_name(f"{table.name}.journal").exists():
            raise ArtifactError(f"{table}: not finished yet; run the same `visionfast embed` again, and it goes on")
        raise ArtifactError(f"{table}: no such file; `visionfast embed ENGINE DIR -o {table}` makes one")
    if not table.is_file():  # a pipe would be waited for
        raise ArtifactError(f"{table}: expected a table of `visionfast embed`, got something that is not a file")
    return read_info(table)


def _batches(table: Path, dim: int, columns: list[str], groups: list[int] | None = None) -> Iterator[Any]:
    """Record batches of some columns, of some row groups or of all."""
    size = max(1, _BATCH_BYTES // (4 * dim))
    with open_table(table) as file:
        # More threads would decode columns side by side, of which one has all the bytes.
        for batch in file.iter_batches(size, row_groups=groups, columns=columns, use_threads=False):
            batch.validate(full=True)  # text is UTF-8
            yield batch


def _dense(batch: Any, dim: int) -> npt.NDArray[np.float32]:
    """(N, D) f32; NaN where there is no vector."""
    column = batch.column("vector")
    values = column.values.slice(column.offset * dim, len(column) * dim).to_numpy(zero_copy_only=False)
    dense: npt.NDArray[np.float32] = values.reshape(len(column), dim)
    if column.null_count:  # what is under a null may be anything
        dense = np.where(column.is_valid().to_numpy(zero_copy_only=False)[:, None], dense, np.float32(np.nan))
    return dense
