"""The three folders on disk: where they are, what is in them, and `engine.json`.

    models/<name>/      weights as published, and card.json
    engines/<name>/<variant>/   a compiled engine's files, and engine.json
    pipelines/<name>/   a Triton model repository

Everything is written beside its place and renamed into it, so a reader sees the old or the new, never a half.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from visionfast.errors import ArtifactError, ManifestError
from visionfast.manifest_checks import check_manifest
from visionfast.strict_json import decode
from visionfast.types import EngineManifest

__all__ = [
    "MANIFEST_NAME",
    "MODEL_SUFFIXES",
    "atomic_folder",
    "atomic_write",
    "engine_folders",
    "engines_home",
    "find_engine",
    "find_model",
    "home",
    "is_of_an_engine",
    "model_files",
    "models_home",
    "near",
    "pipelines_home",
    "read_manifest",
    "sha256_file",
    "write_manifest",
]

MANIFEST_NAME = "engine.json"
MODEL_SUFFIXES = (".pt", ".pth", ".safetensors")
_FORMAT = 1


def home() -> Path:
    """`VISIONFAST_HOME`, or the working directory: where the three folders stand."""
    return Path(os.environ.get("VISIONFAST_HOME") or Path.cwd())


def models_home() -> Path:
    return home() / "models"


def engines_home() -> Path:
    return home() / "engines"


def pipelines_home() -> Path:
    return home() / "pipelines"


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(file)


def _sha256(file: Any) -> str:
    # Python 3.10 has no hashlib.file_digest.
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


# ---- writing ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(what: str | os.PathLike[str], kind: type[ArtifactError] = ArtifactError) -> Iterator[None]:
    """What may not be read, a folder on the way to it among it, is the kind of error that says so."""
    try:
        yield
    except OSError as error:
        raise kind(f"{error.filename or what}: cannot be read ({error.strerror})") from error


def _reason(error: OSError) -> str:
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))


def atomic_write(path: Path, content: bytes) -> None:
    """Writes `content` beside `path` and renames it into place.

    Raises:
        ArtifactError: the disk is full, or the folder cannot be written.
    """
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".partial-")  # the name may be as long as names can be
        partial = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        partial.chmod(0o666 & ~_umask())
        partial.replace(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written ({_reason(error)}); nothing half-written was left") from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


def _umask() -> int:
    # There is no way to read it without setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to fill that takes `target`'s place when the block ends well, and vanishes when it does not.

    Raises:
        ArtifactError: the disk is full, or the folder cannot be written.
    """
    new_parent = False
    try:
        new_parent = not target.parent.exists()
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise ArtifactError(f"{target}: cannot be written ({_reason(error)})") from error
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        if target.exists():
            replaced = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
            target.rename(replaced / "old")
            try:
                partial.rename(target)
            except BaseException:
                (replaced / "old").rename(target)
                raise
            finally:
                shutil.rmtree(replaced, ignore_errors=True)
        else:
            partial.rename(target)
    except OSError as error:
        raise ArtifactError(f"{target}: cannot be written ({_reason(error)}); nothing half-written was left") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if new_parent:
            with contextlib.suppress(OSError):  # there is something in it: all went well
                target.parent.rmdir()


# ---- engine.json ------------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: EngineManifest) -> None:
    """Writes `engine.json` into an engine's folder, replacing the one there whole."""
    document = {"format": _FORMAT, **dataclasses.asdict(manifest)}
    atomic_write(folder / MANIFEST_NAME, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())


def read_manifest(folder: Path, *, verify: bool = False) -> EngineManifest:
    """Reads an engine's `engine.json` and checks that the files it names are there.

    Args:
        folder: an engine's folder.
        verify: also compare every file's sha256 (reads all of them).

    Raises:
        ManifestError: it is missing, damaged, of another format, or does not describe the files beside it.
    """
    path = folder / MANIFEST_NAME
    with _reading(path, ManifestError):
        return _read_manifest(path, verify)


def _read_manifest(path: Path, verify: bool) -> EngineManifest:
    folder = path.parent
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"{folder}: expected an engine's folder, but there is no {MANIFEST_NAME} in it") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: damaged ({error}); build the engine again") from error
    if not isinstance(document, dict) or document.pop("format", None) != _FORMAT:
        raise ManifestError(f"{path}: expected format {_FORMAT}; build the engine again with this visionfast")
    try:
        manifest: EngineManifest = decode(EngineManifest, document, MANIFEST_NAME)
        check_manifest(manifest)
    except ManifestError as error:
        raise ManifestError(f"{path}: {error}; build the engine again") from None
    for name, expected in manifest.sha256.items():
        # A manifest is data from elsewhere: it may name files in its own folder and nothing else.
        if Path(name).name != name or name in ("", ".", ".."):
            raise ManifestError(f"{path}: file name {name!r} leaves the engine's folder")
        file = folder / name
        if not file.is_file():
            raise ManifestError(f"{path}: {name!r} is missing beside it; build the engine again")
        if verify and (got := sha256_file(file)) != expected:
            raise ManifestError(
                f"{file}: expected sha256 {expected[:12]}…, got {got[:12]}…; it was changed: build it again"
            )
    return manifest


# ---- finding ----------------------------------------------------------------------------------------------


def is_of_an_engine(path: Path) -> bool:
    """Whether a file would lie in an engine's folder, where nothing else belongs: links are followed."""
    return (Path(os.path.realpath(path)).parent / MANIFEST_NAME).is_file()


def near(path: Path) -> str:
    """As it would be typed from the working directory."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def model_files() -> list[Path]:
    """Every weights file under models/, sorted."""
    root = models_home()
    found = [p for p in root.glob("*/*") if p.suffix in MODEL_SUFFIXES] if root.is_dir() else []
    return sorted(found + ([p for p in root.glob("*") if p.suffix in MODEL_SUFFIXES] if root.is_dir() else []))


def find_model(reference: str) -> Path:
    """The weights file that `--model` names: a path, or a name under models/ (with or without its suffix).

    Raises:
        ArtifactError: there is none; the message lists what is there.
    """
    with _reading(reference):
        return _find_model(reference)


def _find_model(reference: str) -> Path:
    path = Path(reference)
    if path.is_file():
        return path
    if path.is_dir():
        inside = sorted(p for p in path.iterdir() if p.suffix in MODEL_SUFFIXES)
        if len(inside) == 1:
            return inside[0]
        raise ArtifactError(f"{reference}: expected a folder with one weights file, found {len(inside)}; name the file")
    if "/" not in reference:
        name = path.stem if path.suffix in MODEL_SUFFIXES else reference
        matches = [p for p in model_files() if name in (p.stem, p.parent.name if p.parent != models_home() else "")]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ArtifactError(
                f"{reference}: {len(matches)} files have that name; give one of the paths: "
                + ", ".join(map(str, matches))
            )
    here = ", ".join(p.parent.name if p.parent != models_home() else p.name for p in model_files()) or "nothing yet"
    raise ArtifactError(
        f"{reference}: no such file, and no such name under {models_home()} (there: {here}); "
        "`visionfast fetch` lists what it can bring"
    )


def engine_folders() -> list[Path]:
    """Every folder with an engine.json under engines/, sorted, numbers in their names by size."""
    root = engines_home()
    if not root.is_dir():
        return []
    return _engines(root.glob(f"*/*/{MANIFEST_NAME}"))


def _engines(manifests: Iterable[Path]) -> list[Path]:
    """The folders of these engine.json, sorted, but for those that are being written."""

    def key(folder: Path) -> list[list[str | int]]:
        # sm75 before sm120: what re.split captured, every second part, is a number
        split = [re.split("([0-9]+)", part) for part in folder.parts]
        return [[int(part) if i % 2 else part for i, part in enumerate(parts)] for parts in split]

    return sorted((p.parent for p in manifests if not p.parent.name.startswith(".")), key=key)


def find_engine(
    reference: str | os.PathLike[str],
    *,
    usable: Callable[[EngineManifest], bool] = lambda manifest: True,
    prefer: Callable[[EngineManifest], bool] = lambda manifest: False,
) -> Path:
    """The engine's folder that `reference` names: its path, its engine.json, `<model>/<variant>`, or a model's name.

    A model's name is enough where it has one engine, or one that is `usable`, that runs here. Of several the first that
    is to be `prefer`red is taken; one whose certificate failed is not where there is another.

    Raises:
        ArtifactError: there is none, or several; the message lists what is there.
    """
    with _reading(reference):
        return _find_engine(reference, usable, prefer)


def _find_engine(
    reference: str | os.PathLike[str],
    usable: Callable[[EngineManifest], bool],
    prefer: Callable[[EngineManifest], bool],
) -> Path:
    path = Path(reference)
    if path.name == MANIFEST_NAME and path.is_file():
        return path.parent
    if (path / MANIFEST_NAME).is_file():
        return path
    text = os.fspath(reference).rstrip("/")
    # A folder in which there is no engine may be the model's own, with its weights in it.
    for named in (path, engines_home() / text):
        if (named / MANIFEST_NAME).is_file():
            return named
        if inside := _engines(named.glob(f"*/{MANIFEST_NAME}")):
            return _chosen(text, inside, usable, prefer)
    if path.is_file() and path.suffix in MODEL_SUFFIXES:
        raise ArtifactError(f"{text}: expected an engine, got weights; `visionfast build --model {text}` makes one")
    here = ", ".join(dict.fromkeys(p.parent.name for p in engine_folders())) or "none yet"
    raise ArtifactError(f"{text}: no engine there (engines here: {here}); `visionfast build --model …` makes one")


def _chosen(
    text: str,
    inside: list[Path],
    usable: Callable[[EngineManifest], bool],
    prefer: Callable[[EngineManifest], bool],
) -> Path:
    """The one of a model's engines that its name stands for."""
    if len(inside) == 1:
        return inside[0]
    able = [folder for folder in inside if _is_usable(folder, usable)]
    if not able:
        raise ArtifactError(f"{text}: {len(inside)} engines are there, and none runs here; `visionfast list` says why")
    manifests = {folder: read_manifest(folder) for folder in able}
    preferred = [folder for folder in able if prefer(manifests[folder])]
    passed = [folder for folder in able if manifests[folder].certificate.status != "failed"]
    if preferred or len(passed or able) == 1:
        return (preferred or passed or able)[0]
    count = "" if len(passed or able) == len(inside) else f", {len(passed or able)} of them run here"
    names = ", ".join(map(_reference, passed or able))
    raise ArtifactError(f"{text}: {len(inside)} engines are there{count}; give one of: {names}")


def _reference(folder: Path) -> str:
    """As short as `find_engine` finds it: `<model>/<variant>` under engines/, else its path."""
    if folder.parent.parent == engines_home():
        return f"{folder.parent.name}/{folder.name}"
    return near(folder)


def _is_usable(folder: Path, usable: Callable[[EngineManifest], bool]) -> bool:
    try:
        return usable(read_manifest(folder))
    except ManifestError:
        return False
