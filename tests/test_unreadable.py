"""What may not be read is one typed line that names it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from visionfast import artifacts
from visionfast.certify import certify_engine
from visionfast.errors import ArtifactError, ManifestError, OptionError, VisionfastError
from visionfast.predict import expand

_Locks = Callable[[Path], None]


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> _Locks:
    """`lock(path)`: what is at or under it is answered as the system answers one who may not (root may all)."""
    locked: list[Path] = []

    def refusing(method: str) -> None:
        original = getattr(Path, method)

        def checked(self: Path, *arguments: object, **options: object) -> object:
            if any(self == path or path in self.parents for path in locked):
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return original(self, *arguments, **options)

        monkeypatch.setattr(Path, method, checked)

    for method in ("stat", "open", "iterdir", "read_text", "is_file", "is_dir", "exists"):
        refusing(method)
    return locked.append


def _says(error: VisionfastError, path: Path) -> None:
    assert str(path) in str(error)
    assert "cannot be read (Permission denied)" in str(error)
    assert "\n" not in str(error)


def test_an_engine_s_files(copied_engine: Path, lock: _Locks) -> None:
    lock(copied_engine / "model.bin")
    with pytest.raises(ManifestError) as caught:
        artifacts.read_manifest(copied_engine, verify=True)
    _says(caught.value, copied_engine / "model.bin")
    lock(copied_engine / "engine.json")
    with pytest.raises(ManifestError) as caught:
        artifacts.read_manifest(copied_engine)
    _says(caught.value, copied_engine / "engine.json")


def test_folders_on_the_way(copied_engine: Path, engine_home: Path, lock: _Locks) -> None:
    lock(copied_engine.parent)
    for reference in (str(copied_engine), "small"):
        with pytest.raises(ArtifactError) as caught:
            artifacts.find_engine(reference)
        _says(caught.value, copied_engine.parent)
    lock(engine_home / "models" / "a")
    with pytest.raises(ArtifactError) as caught:
        artifacts.find_model(str(engine_home / "models" / "a" / "a.pt"))
    _says(caught.value, engine_home / "models" / "a")


def test_weights_that_may_not_be_read_are_passed_over(
    copied_engine: Path,
    engine_home: Path,
    seeded_checkpoint: Callable[..., Path],
    lock: _Locks,
    photographs: list[Path],
) -> None:
    for name in ("a", "b"):
        (engine_home / "models" / name).mkdir(parents=True)
        shutil.copy(seeded_checkpoint("detect", 3), engine_home / "models" / name / f"{name}.pt")
    lock(engine_home / "models" / "a" / "a.pt")
    assert certify_engine(copied_engine, images=photographs[:1]).certificate.status == "passed"


def test_pictures(tmp_path: Path, lock: _Locks) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    lock(folder)
    with pytest.raises(OptionError) as caught:
        expand([str(folder)])
    _says(caught.value, folder)
    # One image's error, when it is read: the others are answered.
    assert expand([str(folder / "b.jpg"), "c.jpg"]) == [folder / "b.jpg", Path("c.jpg")]
