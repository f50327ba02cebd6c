"""The public names: one sorted list, every one of them there, and none paid for before it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import visionfast as vf
from visionfast import errors


def test_all_is_sorted_and_complete() -> None:
    assert vf.__all__ == sorted(vf.__all__)
    for name in vf.__all__:
        assert getattr(vf, name) is not None
    assert set(vf._HOMES) == set(vf.__all__) - {"__version__"}


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(AttributeError, match="Detector"):
        _ = vf.Detecter


def test_every_error_is_in_the_tree_and_in_its_drawing() -> None:
    assert errors.__all__ == sorted(errors.__all__)
    assert errors.__doc__ is not None
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.VisionfastError)
        assert name in errors.__doc__


def test_importing_costs_nothing() -> None:
    code = "import sys, visionfast; print([m for m in ('numpy', 'torch', 'cv2', 'openvino') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("layer", ["families", "backends"])
def test_models_and_runtimes_do_not_know_each_other(layer: str) -> None:
    from pathlib import Path

    other = {"families": "visionfast.backends", "backends": "visionfast.families"}[layer]
    files = list((Path(vf.__file__).parent / layer).glob("*.py"))
    assert files
    for file in files:
        assert f"from {other}" not in file.read_text()
        assert f"import {other}" not in file.read_text()


def test_every_package_is_installed() -> None:
    """A wheel has what pyproject.toml lists, and the checkout, which the tests see, has all."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    root = Path(vf.__file__).parents[1]
    listed = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    there = {".".join(path.parent.relative_to(root).parts) for path in root.glob("visionfast/**/__init__.py")}
    assert set(listed) == there
