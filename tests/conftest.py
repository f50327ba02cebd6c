"""Where the tests' data stand, and what every test may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def _shared_data() -> Path | None:
    """Real weights and pictures that are too large or not ours to ship; `VISIONFAST_TEST_DATA` names the folder."""
    named = os.environ.get("VISIONFAST_TEST_DATA")
    candidate = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    return candidate if candidate.is_dir() else None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = _shared_data()
    if folder is None:
        pytest.skip(
            "real weights and pictures are not here: set VISIONFAST_TEST_DATA to the folder that holds them"
        )
    return folder


@pytest.fixture(scope="session")
def photographs() -> list[Path]:
    """Two photographs that install with the build extra: bus.jpg 810×1080, zidane.jpg 1280×720."""
    import importlib.util

    found = importlib.util.find_spec("ultralytics")
    if found is None or found.origin is None:
        pytest.skip("the two photographs come with ultralytics, which is not installed")
    assets = Path(found.origin).parent / "assets"
    return [assets / "bus.jpg", assets / "zidane.jpg"]
