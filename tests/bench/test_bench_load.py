"""Who else computes, and what the figures depend on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from visionfast.bench import load
from visionfast.bench.environment import environment
from visionfast.bench.load import OtherLoad


def stat(user: int, idle: int, stolen: int) -> str:
    return f"cpu  {user} 0 0 {idle} 5 0 0 {stolen} 0 0\ncpu0 1 1 1 1\n"


def test_what_others_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors, 10 s: 20 s of time, of which 5 s were busy or stolen, 1 s of them this process's."""
    file = tmp_path / "stat"
    file.write_text(stat(1000, 1000, 0))
    wall, own = iter([100.0, 110.0]), iter([50.0, 51.0])
    monkeypatch.setattr(load, "_STAT", file)
    monkeypatch.setattr(load.time, "monotonic", lambda: next(wall))
    monkeypatch.setattr(load.time, "process_time", lambda: next(own))
    monkeypatch.setattr(load.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(load.os, "sysconf", lambda name: 100)
    began = OtherLoad()
    file.write_text(stat(1400, 2500, 100))
    assert began.share() == pytest.approx((5 - 1) / 20)


def test_where_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_STAT", tmp_path / "none")
    assert OtherLoad().share() is None
    (tmp_path / "none").write_text("something else\n")
    assert OtherLoad().share() is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
def test_on_this_machine() -> None:
    began = OtherLoad()
    time.sleep(0.05)
    share = began.share()
    assert share is not None
    assert share >= 0


def test_the_environment_is_text_without_paths() -> None:
    facts = environment()
    assert {"cpu", "cpus", "gpu", "python", "system", "numpy", "opencv-python", "load_average"} <= set(facts)
    assert all(isinstance(value, str) and value for value in facts.values())
    assert not any(str(Path(__file__).parents[2]) in value for value in facts.values())


_BUSY = "import time; until = time.process_time() + 0.4\nwhile time.process_time() < until: pass"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/stat is Linux's")
@pytest.mark.parametrize("ended", [False, True])
def test_children_are_no_others_whether_or_not_they_have_ended(ended: bool) -> None:
    """As a DataLoader's workers, which are gone when a pass is over."""
    began = time.monotonic()
    everybody, all_but_ours = OtherLoad(), OtherLoad(children=True)
    told = _BUSY + ("" if ended else "\nprint(flush=True); input()")
    with subprocess.Popen([sys.executable, "-c", told], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read() if ended else child.stdout.readline()
        if ended:
            child.wait(30)
        others, rest = everybody.share(), all_but_ours.share()
        seconds = time.monotonic() - began
        child.communicate(b"\n" if not ended else None)
    assert others is not None
    assert rest is not None
    assert (others - rest) * (os.cpu_count() or 1) * seconds == pytest.approx(0.4, abs=0.15)
