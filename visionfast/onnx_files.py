"""An ONNX model on disk: one file; or, of a large one, a file and all its weights in another, named after it.

A protobuf ends at 2 GiB. ONNX calls the other file external data, and every runtime reads it by the model's path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from visionfast.artifacts import sha256_file

__all__ = ["gather_weights", "sha256_onnx", "weights_file"]

_LEAST = 1024
"""Bytes of a tensor that is worth moving. Smaller ones stay: shapes are among them, which inference has to read."""
_PAGE = 4096
"""Where a weight begins, so that it can be mapped into memory as it is."""


def weights_file(path: Path) -> Path:
    """Where the weights are of the model at `path`, if they are not in it."""
    return path.with_name(f"{path.name}.data")


def sha256_onnx(path: Path) -> str:
    """Hex digest of a model's bytes: the file's, with its weights' behind them where those have a file of their own."""
    weights = weights_file(path)
    if not weights.is_file():
        return sha256_file(path)
    digest = hashlib.sha256()
    for part in (path, weights):
        with part.open("rb") as file:
            for chunk in _chunks(file, part.stat().st_size):
                digest.update(chunk)
    return digest.hexdigest()


def gather_weights(model: Any, source: Path, target: Path) -> None:
    """Moves the weights of an ONNX model, wherever they are, into the one file `target`, in the model's order.

    Constants that are not weights but a node's own come back into the model: not every runtime looks for them beside
    it, and PyTorch's exporter (2.14) puts them there, the shape of a reshape among them.

    Args:
        model: loaded without its external data; afterwards its weights refer to `target`, by name.
        source: the folder that its references are relative to.
        target: written anew; the same weights give the same bytes.
    """
    with target.open("wb") as file:
        for tensor in model.graph.initializer:
            if _size(tensor, source) >= _LEAST:
                _move(tensor, source, file, target.name)
            else:
                _keep(tensor, source)
    for tensor in _constants(model.graph):
        _keep(tensor, source)


def _move(tensor: Any, source: Path, file: BinaryIO, location: str) -> None:
    """Writes a tensor's bytes at the end of `file`, and makes it refer to them there."""
    file.write(bytes(-file.tell() % _PAGE))
    offset = file.tell()
    for chunk in _content(tensor, source):
        file.write(chunk)
    tensor.ClearField("raw_data")
    tensor.ClearField("external_data")
    tensor.data_location = type(tensor).EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", file.tell() - offset)):
        tensor.external_data.add(key=key, value=str(value))


def _constants(graph: Any) -> Iterator[Any]:
    """The tensors in the attributes of a graph's nodes, and of those in the graphs inside them."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from inner.initializer
                yield from _constants(inner)


def _keep(tensor: Any, source: Path) -> None:
    """Puts a tensor's bytes into the model itself."""
    if tensor.data_location == type(tensor).EXTERNAL:
        tensor.raw_data = b"".join(_content(tensor, source))
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


def _content(tensor: Any, source: Path) -> Iterator[bytes]:
    """The bytes of a tensor, a part at a time."""
    if tensor.data_location != type(tensor).EXTERNAL:
        yield tensor.raw_data
        return
    referred = _referred(tensor)
    with (source / referred["location"]).open("rb") as file:
        file.seek(int(referred.get("offset", 0)))
        yield from _chunks(file, _size(tensor, source))


def _size(tensor: Any, source: Path) -> int:
    """Bytes; 0 of one that has its values in the model otherwise than as bytes."""
    if tensor.data_location != type(tensor).EXTERNAL:
        return len(tensor.raw_data)
    referred = _referred(tensor)
    if "length" in referred:
        return int(referred["length"])
    return (source / referred["location"]).stat().st_size - int(referred.get("offset", 0))


def _referred(tensor: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (chunk := file.read(min(size, 1 << 24))):
        size -= len(chunk)
        yield chunk
