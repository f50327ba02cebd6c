"""What the steps behind tell the first one of how long an image will wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from visionfast.serving.boards import Boards
from visionfast.serving.run_folder import RUN_FOLDER_PREFIX

MS = 1_000_000
NOW = 10**12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / f"{RUN_FOLDER_PREFIX}a"
    made.mkdir()
    return made


def test_the_first_step_adds_up_what_the_others_say(folder: Path) -> None:
    first = Boards("p", "p_preprocess", folder)
    assert first.wait_ns(0, NOW) == 0  # none is there yet
    engine, late, other = (Boards(*names, folder) for names in (("p", "p_engine"), ("p", "p_post"), ("p_b", "p_b_e")))
    for board in (engine, late, other):
        board.open()
    assert first.wait_ns(0, NOW) == first.wait_ns(1, NOW) == 0
    engine.write(NOW, [30 * MS, 90 * MS])
    late.write(NOW, [0, 5 * MS])
    other.write(NOW, [1000 * MS, 1000 * MS])  # another pipeline's
    assert (first.wait_ns(0, NOW), first.wait_ns(1, NOW)) == (30 * MS, 95 * MS)
    assert first.wait_ns(1, NOW + 50 * MS) == 40 * MS  # time goes by
    engine.write(NOW + 60 * MS, [0, 0])
    assert first.wait_ns(1, NOW + 60 * MS) == 0


def test_where_serve_did_not_start_the_server_there_are_none(tmp_path: Path) -> None:
    board = Boards("p", "p_engine", tmp_path)
    board.open()
    board.write(NOW, [MS, MS])
    assert Boards("p", "p_preprocess", tmp_path).wait_ns(0, NOW) == 0
    assert not list(tmp_path.iterdir())
