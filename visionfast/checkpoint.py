"""Opens untrusted weights files: nothing that a file contains is executed.

A `.pt` file is a pickle, and a pickle may call anything. It is read by torch's weights-only unpickler, and the
classes that a YOLOv8 checkpoint names are given to it as inert stand-ins that only record their state: no class of
ultralytics or `torch.nn` is ever made from a file. The model is rebuilt afterwards, from its description and its
tensors, by `visionfast.families`.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visionfast.artifacts import sha256_file
from visionfast.errors import BackendUnavailableError, CheckpointError, UnsafeCheckpointError

__all__ = ["Checkpoint", "open_checkpoint"]

# Names under these are replaced by inert stand-ins, so that allowing them allows nothing to run.
_INERT_PREFIXES = (
    "torch.nn.modules.",
    "ultralytics.nn.",
    "ultralytics.utils.",
    "ultralytics.yolo.",  # releases before 8.0.137
    "models.",  # the layout before ultralytics was a package
)
_INERT_NAMES = frozenset(
    f"pathlib.{name}" for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
) | frozenset(
    f"{module}.{name}"
    for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    for name in ("scalar", "_reconstruct")
) | frozenset({"numpy.dtype", "numpy.ndarray", "datetime.datetime", "datetime.date", "types.SimpleNamespace"})

# safe_globals is a setting of the whole process: one file at a time.
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Checkpoint:
    """A weights file's content, as data.

    Attributes:
        path: of the file.
        sha256: of the file.
        state_dict: flat name → `torch.Tensor`, as stored (published YOLOv8 files store FP16).
        metadata: what the file says about itself: `yaml`, `names`, `args`, `task`, `license`, `version`, `class`;
            each only where it is there.
    """

    path: Path
    sha256: str
    state_dict: Mapping[str, Any] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)


class _Inert:
    """Stands in for a class named in a pickle. It records what it is given and can do nothing else."""

    qualified_name = ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.recorded_args = args

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]  # (None, slots)
        if isinstance(state, dict):
            self.__dict__.update((key, value) for key, value in state.items() if isinstance(key, str))

    def __hash__(self) -> int:
        return id(self)


@functools.cache
def _inert_class(qualified_name: str) -> type[_Inert]:
    return type("Inert", (_Inert,), {"qualified_name": qualified_name, "__module__": __name__})


def open_checkpoint(path: Path, *, trust: bool = False) -> Checkpoint:
    """Reads a YOLOv8 `.pt`, a plain state dict (`.pt`, `.pth`) or a `.safetensors` file.

    Args:
        path: of the file.
        trust: load a pickle without the allow-list: it may then run anything (`--trust-checkpoint`).

    Raises:
        UnsafeCheckpointError: the file asks for a global outside the allow-list; nothing of it was run.
        CheckpointError: there is no such file, or it is not weights.
        BackendUnavailableError: torch or safetensors is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a weights file, got {'a directory' if path.is_dir() else 'nothing'}")
    try:
        if path.suffix == ".safetensors":
            state_dict, metadata = _read_safetensors(path)
        else:
            state_dict, metadata = _flatten(_unpickle(path, trust), path)
    except ImportError as error:
        raise BackendUnavailableError(
            f"{path}: reading weights needs {error.name}; `pip install 'visionfast[build]'`"
        ) from error
    if not state_dict:
        raise CheckpointError(f"{path}: expected weights, but there is no tensor in it")
    return Checkpoint(path, sha256_file(path), state_dict, metadata)


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file, but {error}") from error


def _unpickle(path: Path, trust: bool) -> Any:
    import torch

    if not zipfile.is_zipfile(path):
        # Files from before torch 1.6 are bare pickles; the weights-only unpickler reads them, but their globals
        # cannot be listed beforehand.
        head = path.open("rb").read(2)
        if head[:1] != b"\x80":
            raise CheckpointError(f"{path}: expected a PyTorch weights file (.pt, .pth), got something else")
        if not trust:
            raise CheckpointError(
                f"{path}: expected a PyTorch file in the zip format (torch ≥ 1.6), got an older or bare pickle; "
                "save it again with a current torch, or use --trust-checkpoint if you trust its source"
            )
    else:
        _check_archive(path)
    try:
        if trust:
            return torch.load(path, map_location="cpu", weights_only=False)
        with _allow_inert(path):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"{path}: refused while reading ({_reason(error)}); nothing of it was run; "
            "--trust-checkpoint loads it all the same"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive fails in many ways
        raise CheckpointError(f"{path}: expected a PyTorch weights file, but {_reason(error)}") from error


def _check_archive(path: Path) -> None:
    """Refuses what is a zip but not a checkpoint, and archives that would unpack to far more than they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{path}: expected a PyTorch weights file, but {_reason(error)}") from error
    names = [entry.filename for entry in entries]
    if any(name.endswith("/constants.pkl") for name in names):
        raise CheckpointError(f"{path}: expected a checkpoint, got a TorchScript program; give the .pt it came from")
    if not any(name.endswith("data.pkl") for name in names):
        raise CheckpointError(f"{path}: expected a PyTorch weights file, got another kind of zip archive")
    # torch stores its tensors without compression.
    if sum(entry.file_size for entry in entries) > 2 * path.stat().st_size + (1 << 20):
        raise CheckpointError(f"{path}: its entries claim more bytes than the file has; it is damaged or hostile")


@contextlib.contextmanager
def _allow_inert(path: Path) -> Iterator[None]:
    """The weights-only unpickler's allow-list for one file: stand-ins for the names that are allowed."""
    import torch

    asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    allowed: list[Any] = []
    for name in sorted(asked):
        if not (name.startswith(_INERT_PREFIXES) or name in _INERT_NAMES):
            raise UnsafeCheckpointError(
                f"{path}: it asks for {name}, which no YOLOv8 checkpoint needs and which could run code; nothing of "
                "it was run; if you trust its source, --trust-checkpoint loads it all the same"
            )
        allowed.append((_inert_class(name), name))
    with _LOCK, torch.serialization.safe_globals(allowed):
        yield


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _flatten(content: Any, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `torch.load` gave → a flat state dict and the file's words about itself."""
    outer = content if isinstance(content, dict) else {"model": content}
    # ultralytics keeps the averaged weights, the ones to use, under "ema" until training is finished.
    model = outer.get("ema") or outer.get("model") or outer.get("state_dict") or outer
    metadata = {key: outer[key] for key in ("license", "version", "date") if isinstance(outer.get(key), str)}
    for key in ("train_args", "names", "yaml"):
        if isinstance(outer.get(key), dict):
            metadata["args" if key == "train_args" else key] = outer[key]
    if isinstance(model, dict):
        return {str(name): value for name, value in model.items() if _is_tensor(value)}, metadata
    attributes = getattr(model, "__dict__", {})
    metadata["class"] = getattr(model, "qualified_name", "") or f"{type(model).__module__}.{type(model).__qualname__}"
    for key in ("yaml", "names", "task", "args"):
        if key in attributes:
            value = attributes[key]
            metadata[key] = {**metadata.get(key, {}), **value} if isinstance(value, dict) else value
    state_dict = dict(_tensors(model, ""))
    if not state_dict:
        raise CheckpointError(f"{path}: expected a model's weights, got {metadata['class']}")
    return state_dict, metadata


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _tensors(module: Any, prefix: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """A module tree's parameters and buffers, named as `Module.state_dict` names them."""
    if depth > 64:
        raise CheckpointError("the checkpoint's modules are nested more than 64 deep; it is damaged or hostile")
    attributes = getattr(module, "__dict__", {})
    transient = attributes.get("_non_persistent_buffers_set") or ()
    for kind in ("_parameters", "_buffers"):
        for name, value in (attributes.get(kind) or {}).items():
            if _is_tensor(value) and name not in transient:
                yield f"{prefix}{name}", value.detach()
    for name, child in (attributes.get("_modules") or {}).items():
        yield from _tensors(child, f"{prefix}{name}.", depth + 1)
