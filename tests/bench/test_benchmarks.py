"""The parts of `benchmarks/` that decide: what is asked for, what is judged, and what is kept."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from visionfast import artifacts

_FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Callable[[str], ModuleType]]:
    """`benchmark(name)`: its module; what importing it sets in the environment is gone afterwards."""
    before, path = dict(os.environ), list(sys.path)
    sys.path.insert(0, str(_FOLDER))
    yield lambda name: __import__(name)
    sys.path[:] = path
    os.environ.clear()
    os.environ |= before


# ---- overload ---------------------------------------------------------------------------------------------


@pytest.fixture
def overload(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("tritonclient")
    return benchmark("overload")


ARGUMENTS = argparse.Namespace(
    seconds=10.0, online_deadline_ms=500.0, offline_deadline_ms=1000.0, layouts=["fused"], json=None, strict=False
)


def phase(overload: ModuleType, rows: Sequence[tuple[str, str, float]], seconds: float = 10.0) -> Any:
    """Of (level, outcome, milliseconds)."""
    level, outcome, ms = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    return overload.Phase(level, outcome, [int(x * 1e6) for x in ms], [0] * len(rows), seconds, 0.1, 0.0)


def test_a_level_has_its_own_arrivals_whoever_else_comes(overload: ModuleType) -> None:
    alone = overload.poisson({"online": 5.0}, 20.0, 3)
    both = overload.poisson({"online": 5.0, "offline": 50.0}, 20.0, 3)
    assert [one for one in both if one[1] == "online"] == alone
    assert both == overload.poisson({"offline": 50.0, "online": 5.0}, 20.0, 3)
    assert overload.poisson({"online": 5.0}, 20.0, 4) != alone
    assert sorted(both) == both


def test_goodput_is_of_the_whole_phase(overload: ModuleType) -> None:
    """Its last answers come after the last second of arrivals."""
    loaded = phase(overload, [("online", "answered", 100.0)] * 110, seconds=11.0)
    held = list(overload.goals(10.0, phase(overload, [("online", "answered", 100.0)]), loaded, ARGUMENTS))
    assert held[0][1] == 1.0


def test_no_answer_at_all_is_a_goal_missed(overload: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    answered, refused = [("online", "answered", 100.0)], [("online", "refused: queue", 1.0)]
    for before, after in ((answered, refused), (refused, answered), ([], [])):
        phases = phase(overload, before), phase(overload, after)
        held = list(overload.goals(10.0, *phases, ARGUMENTS))
        (ratio,) = (one for one in held if one[0].startswith("online P95"))
        assert math.isnan(ratio[1])
        assert ratio[3] is False
        overload.report("fused", 10.0, phase(overload, answered), *phases, held)
    assert "no" in capsys.readouterr().out


# ---- embed ------------------------------------------------------------------------------------------------


def test_the_loop_is_chosen_by_several_passes(
    benchmark: Callable[[str], ModuleType],
    dino_checkpoint: Callable[..., Path],
    built_engine: Callable[..., Path],
    photographs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    embed = benchmark("embed")
    monkeypatch.setattr(embed, "_TRIED_TIMES", 2)
    monkeypatch.setattr("visionfast.machine.usable_cpus", lambda: 1)
    weights = dino_checkpoint("dinov2_vits14")
    embed.make_pictures(photographs, tmp_path / "files", 2, 0)
    threads = torch.get_num_threads()
    try:
        manifest = artifacts.read_manifest(built_engine(weights))
        loop, tried = embed.best_loop(weights, manifest, sorted((tmp_path / "files").iterdir()), 0)
    finally:
        torch.set_num_threads(threads)
    assert [name.rpartition("(")[2] for name in tried] == [
        "batch_size=16, num_workers=0)",
        "batch_size=32, num_workers=0)",
        "batch_size=16, num_workers=1)",
        "batch_size=32, num_workers=1)",
    ]
    assert all(len(values) == 2 for values in tried.values())
    assert np.median(tried[loop.system.name]) == max(map(np.median, tried.values()))


# ---- suite ------------------------------------------------------------------------------------------------


def test_every_part_is_watched(benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    suite = benchmark("suite")
    told = iter([0.02, 0.4, None])
    monkeypatch.setattr("visionfast.bench.load.OtherLoad.share", lambda self: next(told))
    shares: list[float | None] = [0.01]
    assert [suite.watched(shares, lambda i=i: i) for i in range(3)] == [0, 1, 2]
    assert shares == [0.01, 0.02, 0.4, None]
    assert suite.most(shares) == 0.4
    assert suite.most([None]) is None


def test_the_suites_record_still_makes_a_report(tmp_path: Path) -> None:
    """As it was written when the DataLoader's loop was measured in batches that were not full."""
    from visionfast.bench.chapter import Chapter, pictures
    from visionfast.bench.records import read_record
    from visionfast.bench.report_tables import has_latencies, results_table, waterfall_table

    whole = json.loads((_FOLDER / "results" / "suite-xeon-amx-2cpu.json").read_text("utf-8"))
    for one in whole["chapters"]:
        records = []
        for part in filter(None, (one["record"], one["steps"])):
            (tmp_path / "record.json").write_text(json.dumps(part), "utf-8")
            records.append(read_record(tmp_path / "record.json"))
        made = Chapter(one["title"], *records)
        assert list(pictures(made))
        assert all(results_table(made.record, scenario) for scenario in made.record.scenarios)
        if found := made.waterfall:
            assert "too few samples" in waterfall_table(found)
    loops = [system.key for system in made.record.systems if not has_latencies(system)]
    assert loops == ["dataloader"]
