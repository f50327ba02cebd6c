"""A record comes back from its file as it was, or the file is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from visionfast.bench.records import SCENARIOS, Input, Record, Samples, System, read_record, write_record
from visionfast.errors import ArtifactError, ShapeError


def columns(n: int, *, begin: int = 0, **stages: int) -> Samples:
    due = np.arange(n, dtype=np.int64) * 100 + begin
    return Samples(
        round=np.arange(n, dtype=np.int64) // 2,
        input=np.arange(n, dtype=np.int64) % 2,
        due_ns=due,
        begun_ns=due + 5,
        done_ns=due + 50,
        stage_ns={name: np.full(n, value, np.int64) for name, value in stages.items()},
        failed=np.zeros(n, np.bool_),
        settings={"parallel": 2, "rate_per_s": 12.5},
    )


def record_of(**samples: Samples) -> Record:
    return Record(
        version=1,
        created="2026-11-30T00:00:00+00:00",
        command={"engine": "small"},
        environment={"cpu": "a processor"},
        systems=(System("visionfast", "visionfast", "visionfast", {"precision": "fp32"}), System("n", "ñull", "null")),
        inputs=(
            Input("a.jpg", b"\xff\xd8", "ab" * 32, (3, 4), "jpeg", 2),
            Input("b", b"x", "cd" * 32, (1, 1), "png", 1),
        ),
        samples={("visionfast", "single-stream"): samples.get("single", columns(4, engine=7, decode=-1))},
        others_cpu_share=0.01,
        harness_ns={"single-stream": 900},
    )


def same(one: Samples, other: Samples) -> bool:
    names = ("round", "input", "due_ns", "begun_ns", "done_ns", "failed")
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
        and one.stage_ns.keys() == other.stage_ns.keys()
        and all(np.array_equal(one.stage_ns[name], other.stage_ns[name]) for name in one.stage_ns)
        and one.settings == other.settings
    )


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    path, written = tmp_path / "deep" / "r.json", record_of()
    write_record(path, written)
    read = read_record(path)
    assert same(read.samples["visionfast", "single-stream"], written.samples["visionfast", "single-stream"])
    assert read.systems == written.systems
    assert (read.environment, read.command, read.harness_ns) == (
        written.environment,
        written.command,
        written.harness_ns,
    )
    assert [i.sha256 for i in read.inputs] == ["ab" * 32, "cd" * 32]
    assert {i.encoded for i in read.inputs} == {b""}
    assert read.inputs[0].image_hw == (3, 4)
    assert read.others_cpu_share == 0.01
    assert read.scenarios == ("single-stream",)
    assert read.system("n").name == "ñull"


def test_images_are_not_in_the_file(tmp_path: Path) -> None:
    write_record(tmp_path / "r.json", record_of())
    assert "encoded" not in (tmp_path / "r.json").read_text()


@settings(max_examples=30, deadline=None)
@given(
    spent=hnp.arrays(np.int64, st.integers(0, 20), elements=st.integers(0, 2**62 - 1)),
    stage=st.integers(-1, 2**63 - 1),
    scenario=st.sampled_from(SCENARIOS),
)
def test_any_columns_come_back(spent: Any, stage: int, scenario: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    n = len(spent)
    zeros = np.zeros(n, np.int64)
    made = Samples(zeros, zeros, zeros, zeros, spent, {"s": np.full(n, stage, np.int64)}, spent % 2 == 0)
    path = tmp_path_factory.mktemp("r") / "r.json"
    base = record_of()
    write_record(
        path,
        Record(1, "", {}, {}, base.systems, base.inputs, {("n", scenario): made}, None, {}),
    )
    read = read_record(path)
    assert same(read.samples["n", scenario], made)
    assert read.others_cpu_share is None


def break_key(content: dict[str, Any]) -> None:
    content["sample"] = []


def break_system(content: dict[str, Any]) -> None:
    content["samples"][0]["system"] = "nobody"


def break_twice(content: dict[str, Any]) -> None:
    content["samples"] *= 2


def break_length(content: dict[str, Any]) -> None:
    content["samples"][0]["done_ns"].pop()


def break_stage_length(content: dict[str, Any]) -> None:
    content["samples"][0]["stage_ns"]["engine"] = []


def break_input(content: dict[str, Any]) -> None:
    content["samples"][0]["input"][0] = 2


def break_order(content: dict[str, Any]) -> None:
    content["samples"][0]["begun_ns"][1] = 0


def break_size(content: dict[str, Any]) -> None:
    content["samples"][0]["done_ns"][0] = 2**63


def break_setting(content: dict[str, Any]) -> None:
    content["samples"][0]["settings"] = {"parallel": 10**400}


def break_streams(content: dict[str, Any]) -> None:
    content["samples"][0]["settings"] = {"parallel": float("nan")}


def break_everybody(content: dict[str, Any]) -> None:
    content["systems"], content["samples"] = [], []


def break_everything(content: dict[str, Any]) -> None:
    content["inputs"], content["samples"] = [], []


def break_type(content: dict[str, Any]) -> None:
    content["samples"][0]["round"][0] = 0.5


def break_scenario(content: dict[str, Any]) -> None:
    content["harness_ns"] = {"offstream": 1}


def break_systems(content: dict[str, Any]) -> None:
    content["systems"] *= 2


def break_version(content: dict[str, Any]) -> None:
    content["version"] = 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (break_key, "unknown key 'sample'"),
        (break_system, r"samples\[0\].system: expected one of visionfast, n, got 'nobody'"),
        (break_twice, "is there twice"),
        (break_length, r"Samples.done_ns: expected \(4,\) int64, got \(3,\)"),
        (break_stage_length, "Samples.engine"),
        (break_input, "numbers of the 2 inputs"),
        (break_order, "due_ns ≤ begun_ns"),
        (break_size, "64 bits"),
        (break_setting, r"settings.parallel: expected a number of 64 bits"),
        (break_streams, "settings: expected numbers above 0"),
        (break_everybody, "somebody who was measured"),
        (break_everything, "on something"),
        (break_type, r"round\[0\]: expected int"),
        (break_scenario, "'offstream'"),
        (break_systems, "each key once"),
        (break_version, "of version 1, got 2"),
    ],
)
def test_a_damaged_file_is_named(damage: Callable[[dict[str, Any]], None], said: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_record(path, record_of())
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=said) as raised:
        read_record(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"a": 1}', b"[]"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="expected what `visionfast bench --json` writes"):
        read_record(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_record(tmp_path / "none.json")


def test_columns_of_two_lengths() -> None:
    one = columns(3)
    with pytest.raises(ShapeError, match=r"Samples.failed: expected \(3,\) bool"):
        Samples(one.round, one.input, one.due_ns, one.begun_ns, one.done_ns, {}, np.zeros(2, np.bool_))
    with pytest.raises(ShapeError, match=r"int64, got \(3,\) float64"):
        Samples(one.round, one.input, one.due_ns, one.begun_ns, one.done_ns * 1.0, {}, one.failed)  # type: ignore[arg-type]


def test_selects_rows() -> None:
    made = columns(4, engine=3)
    assert len(made[:0]) == 0
    assert made[np.array([True, False, False, True])].due_ns.tolist() == [0, 300]
    assert made[1:].stage_ns["engine"].tolist() == [3, 3, 3]
    assert made.latency_ns.tolist() == [50] * 4
