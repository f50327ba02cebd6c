"""What is to be served: the folders of models in one or several pipelines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from visionfast import artifacts
from visionfast.errors import ArtifactError, OptionError

__all__ = ["model_folders", "wants_cache"]

_CONFIG = "config.pbtxt"
_CACHE = re.compile(r"\bresponse_cache\s*:?\s*\{\s*enable\s*:\s*true\b")


def model_folders(pipelines: Sequence[str | os.PathLike[str]]) -> dict[str, Path]:
    """The models' folders, by name.

    Args:
        pipelines: folders that `visionfast deploy` wrote, or their names under pipelines/.

    Raises:
        ArtifactError: there is no model in one of them.
        OptionError: none is given, or two of them have a model of one name.
    """
    folders: dict[str, Path] = {}
    if not pipelines:
        raise OptionError("pipelines: expected at least one, got none")
    for reference in pipelines:
        for folder in _models_in(reference):
            if (other := folders.setdefault(folder.name, folder)) != folder:
                raise OptionError(f"model {folder.name}: expected one of that name, got {other} and {folder}")
    return folders


def _models_in(reference: str | os.PathLike[str]) -> list[Path]:
    path, root = Path(reference), artifacts.pipelines_home()
    if not path.is_dir():
        path = root / path
    try:
        # What is being written, or was when something failed, has a dot in front.
        folders = [p for p in path.resolve().iterdir() if (p / _CONFIG).is_file() and not p.name.startswith(".")]
        own = path.resolve() / path.resolve().name
        if folders and own.is_dir() and own not in folders:  # its steps alone answer nobody
            raise ArtifactError(f"{own}: damaged: expected a {_CONFIG} in it; deploy the engine again")
        if folders:
            return sorted(folders)
        if (path / _CONFIG).is_file():
            raise ArtifactError(f"{reference}: expected a pipeline, got one of its models; name the folder above it")
    except OSError as error:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise ArtifactError(f"{reference}: cannot be read ({error.strerror})") from error
    here = ", ".join(sorted(p.name for p in root.iterdir() if p.is_dir())) if root.is_dir() else ""
    there = f"pipelines here: {here or 'none yet'}"
    raise ArtifactError(
        f"{reference}: expected a pipeline, found no folder with a {_CONFIG} in it ({there}); `visionfast deploy` "
        "writes one"
    )


def wants_cache(folder: Path) -> bool:
    """Whether a model has its response cache enabled."""
    return _CACHE.search((folder / _CONFIG).read_text("utf-8", errors="replace")) is not None
