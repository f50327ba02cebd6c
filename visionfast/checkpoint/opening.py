"""Tells what a weights file is from its bytes, never from its name, and opens it."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from visionfast.checkpoint.archive import TorchArchive
from visionfast.checkpoint.contents import from_archive, from_objects
from visionfast.checkpoint.pickled import printable
from visionfast.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "open_checkpoint"]

_ZIP = b"PK\x03\x04"
# torch.save before 1.6 begins with a pickled magic number.
_LEGACY = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_SAFETENSORS_HEADER = 100_000_000
_MAX_METADATA_TEXT = 1 << 20
_EXPECTED = "expected weights: a .pt or .pth that torch.save wrote, or .safetensors"
# What people hand over by mistake: first bytes → what it is.
_KINDS = (
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x89PNG", "a PNG image"),
    (b"RIFF", "a RIFF file (WebP image or sound)"),
    (b"%PDF", "a PDF"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89HDF", "an HDF5 file (Keras weights)"),
    (b"GGUF", "a GGUF language model"),
    (b"ftrt", "a TensorRT engine"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself (git lfs pull)"),
    (b"<", "a web page or XML, perhaps a failed download"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened weights file.

    Attributes:
        path: where it is.
        sha256: of the whole file.
        state_dict: parameter name → CPU tensor, as stored (YOLO files store float16).
        metadata: what the file says about itself, as plain values. Of an ultralytics checkpoint: `yaml` (the
            architecture), `names`, `stride`, `nc`, `task`, `args`, `train_args`, `license`, `version`,
            `date`, `model_class`, `batch_norm_eps`. All of it is the file's word: check before use.
    """

    path: Path
    sha256: str
    state_dict: dict[str, torch.Tensor] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)


def open_checkpoint(path: str | Path, *, trust: bool = False) -> Checkpoint:
    """Opens a `.pt`/`.pth` (zip) or `.safetensors` weights file. Safe for several threads.

    Args:
        path: the file.
        trust: unpickle it in the ordinary way, which RUNS whatever the file says; for a file whose maker is
            trusted and that is refused otherwise.

    Raises:
        UnsafeCheckpointError: the file asks for something that weights do not need; nothing of it was run.
        CheckpointError: there is no such file, it is damaged, or it is not a weights file.
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: a directory: {_EXPECTED}")
    try:
        with path.open("rb") as file:
            digest = _sha256(file)
            head = file.read(64)
            file.seek(0)
            state_dict, metadata = _read(file, head, path, trust)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file: {_EXPECTED}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or printable(error)})") from error
    return Checkpoint(path, digest, state_dict, metadata)


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


def _read(file: IO[bytes], head: bytes, path: Path, trust: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    source = str(path)
    if not head:
        raise CheckpointError(f"{source}: empty: {_EXPECTED}")
    if _is_safetensors(head):
        return _read_safetensors(path)
    is_pickle = head.startswith(b"\x80") and b"\x02" <= head[1:2] <= b"\x05"
    if trust and (head.startswith(_ZIP) or is_pickle):
        return from_objects(_unpickle_trusted(file, source), source)
    if head.startswith(_ZIP):
        return from_archive(TorchArchive(file, source), source)
    if is_pickle:
        kind = "a legacy PyTorch file (before 1.6)" if head[2:].startswith(_LEGACY) else "a bare pickle"
        raise CheckpointError(
            f"{source}: {kind}, which is not read because it could run code; nothing of it was run. If you "
            "trust whoever made it, open it with --trust-checkpoint, or save it again with torch.save"
        )
    raise CheckpointError(f"{source}: {_what_it_is(head, path)}: {_EXPECTED}")


def _what_it_is(head: bytes, path: Path) -> str:
    for magic, kind in _KINDS:
        if head.lstrip().startswith(magic):
            return kind
    if path.suffix == ".onnx":
        return "an exported ONNX model, not a checkpoint"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head):
        return "a text file"
    return "not a kind of file that is known here"


def _unpickle_trusted(file: IO[bytes], source: str) -> Any:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the file's own code raises
        raise CheckpointError(
            f"{source}: cannot be unpickled ({type(error).__name__}: {printable(error)}); it may need the "
            "packages that it was saved with"
        ) from error


# ---- safetensors ------------------------------------------------------------------------------------------


def _is_safetensors(head: bytes) -> bool:
    """Eight bytes of header length, little endian, then a JSON object."""
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER


def _read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        import safetensors
    except ImportError:
        raise CheckpointError(f"{path}: reading safetensors needs a package: pip install 'visionfast[build]'") from None
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            state_dict = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: damaged safetensors ({printable(error)}); fetch it again") from error
    if not state_dict:
        raise CheckpointError(f"{path}: holds no weights: {_EXPECTED}")
    return state_dict, {name: _parsed(text) for name, text in metadata.items()}


def _parsed(text: str) -> Any:
    """A safetensors metadata value: JSON or a Python literal where it is one, else the text."""
    if len(text) > _MAX_METADATA_TEXT or text[:1] not in "{[":
        return text
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text
