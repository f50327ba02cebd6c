"""`bench` as a person meets it: the command line in this process, on an engine that finds nothing. No test judges how
fast it is."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import cv2
import numpy as np
import pytest

from visionfast.artifacts import MANIFEST_NAME
from visionfast.bench.records import Record, Samples, read_record, write_record
from visionfast.cli import app
from visionfast.errors import ArtifactError, BackendError, CertificateError, OptionError
from visionfast.pipeline import Detector


def bench(*arguments: str | int | float | Path) -> int:
    """Its exit code."""
    return int(app(["bench", *map(str, arguments)], standalone_mode=False) or 0)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for i, suffix in enumerate((".jpg", ".png")):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 60, 3), np.uint8)
        (folder / f"{i}{suffix}").write_bytes(cv2.imencode(suffix, pixels)[1].tobytes())
    return folder


@pytest.fixture(scope="module")
def engine(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]) -> Path:
    return built_engine(seeded_checkpoint("detect", 3))


@pytest.fixture(scope="module")
def measured(engine: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline of all scenarios."""
    path = tmp_path_factory.mktemp("measured") / "baseline.json"
    assert bench(engine, "--images", pictures, "--seconds", 0.5, "--rate", 5, "--json", path) == 0
    return path


def scaled(record: Record, factor: float) -> Record:
    """The same run, as if the engine had taken so many times as long; the control as it was."""

    def changed(samples: Samples) -> Samples:
        return dataclasses.replace(
            samples,
            done_ns=samples.begun_ns + ((samples.done_ns - samples.begun_ns) * factor).astype(np.int64),
            stage_ns={name: (column * factor).astype(np.int64) for name, column in samples.stage_ns.items()},
        )

    samples = {key: changed(s) if key[0] == "visionfast" else s for key, s in record.samples.items()}
    return dataclasses.replace(record, samples=samples, others_cpu_share=0.0)


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts whatever else this machine does: what they are is decided by factors of three."""
    monkeypatch.setattr("visionfast.bench.gate.QUIET", 1e9)


def test_what_is_measured(measured: Path) -> None:
    record = read_record(measured)
    assert record.scenarios == ("single-stream", "multi-stream", "server", "offline")
    assert [s.key for s in record.systems] == ["visionfast", "bare", "control"]
    assert record.command["scenario"] == "single-stream, multi-stream, server, offline"
    assert not any("/" in value for name, value in record.command.items() if name != "engine")
    assert {i.format for i in record.inputs} <= {"jpeg", "png"}
    assert set(record.samples["visionfast", "server"].stage_ns) == {"decode", "preprocess", "engine", "postprocess"}


def test_what_is_shown(engine: Path, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(engine, "--scenario", "single-stream", "--seconds", 0.2, "--images", pictures) == 0
    shown, told = capsys.readouterr()
    assert "single-stream, visionfast: P90 " in shown
    assert "too few samples for P90, P95, P99 (n=" in shown
    assert "visionfast / bare engine: " in shown
    assert "the harness itself, µs a request: single-stream " in shown
    assert "others took " in shown
    assert "offline" not in shown
    assert "visionfast: warm-up" in told


def test_the_harness_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--null", "--scenario", "offline") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("offline: ")
    assert shown.endswith(" µs a request\n")


@pytest.mark.usefixtures("loud")
def test_slower_than_its_baseline(
    engine: Path, pictures: Path, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "fast.json", scaled(read_record(measured), 0.1))
    arguments = (engine, "--images", pictures, "--scenario", "single-stream", "--against", tmp_path / "fast.json")
    assert bench(*arguments, "--tolerance", "50%") == 1
    shown, told = capsys.readouterr()
    assert "slower; it is engine" in shown
    assert "measuring again" in told
    assert "visionfast: single-stream: total is " in told


@pytest.mark.usefixtures("loud")
def test_not_slower_than_its_baseline(
    engine: Path, pictures: Path, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path / "slow.json", scaled(read_record(measured), 30.0))
    arguments = (engine, "--images", pictures, "--scenario", "offline", "--against", tmp_path / "slow.json")
    assert bench(*arguments, "--json", tmp_path / "now.json") == 0
    assert "not slower" in capsys.readouterr().out
    record = read_record(tmp_path / "now.json")
    assert record.scenarios == ("offline",)
    assert record.command["seconds"] == "0.5"  # as the baseline


@pytest.mark.usefixtures("loud")
def test_the_baselines_images_are_found_in_the_folder_that_grew(
    engine: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what is in them: whatever else is there, what they are called, and the seed."""
    folder = tmp_path / "pictures"
    shutil.copytree(pictures, folder)
    single = ("--scenario", "single-stream")
    assert bench(engine, *single, "--images", folder, "--seconds", 0.2, "--json", tmp_path / "measured.json") == 0
    record = read_record(tmp_path / "measured.json")
    write_record(tmp_path / "slow.json", scaled(record, 30.0))
    for i in range(40):
        pixels = np.full((20, 20, 3), i, np.uint8)
        (folder / f"new{i}.png").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    name = record.inputs[-1].name
    (folder / name).rename(folder / f"renamed-{name}")
    against = (*single, "--images", folder, "--against", tmp_path / "slow.json", "--seed", 5)
    assert bench(engine, *against, "--json", tmp_path / "now.json") == 0
    assert "not slower" in capsys.readouterr().out
    assert [i.sha256 for i in read_record(tmp_path / "now.json").inputs] == [i.sha256 for i in record.inputs]
    (folder / f"renamed-{name}").unlink()
    with pytest.raises(OptionError, match=rf"measured on other images: {name} .* is not in {folder}"):
        bench(engine, *against)


def test_a_disturbed_baseline_gives_no_verdict(
    engine: Path, pictures: Path, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = dataclasses.replace(scaled(read_record(measured), 0.1), others_cpu_share=0.5)
    write_record(tmp_path / "loud.json", loud)
    arguments = ("--images", pictures, "--scenario", "offline", "--against", tmp_path / "loud.json")
    assert bench(engine, *arguments) == 0
    assert "no verdict: others took 50% of the processors during the baseline" in capsys.readouterr().err


@pytest.mark.usefixtures("loud")
def test_threads_are_the_baselines(
    engine: Path, pictures: Path, measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = scaled(read_record(measured), 30.0)
    assert record.command["threads"] == "default"
    narrow = dataclasses.replace(record, command=dict(record.command) | {"threads": "1"})
    write_record(tmp_path / "narrow.json", narrow)
    arguments = (engine, "--images", pictures, "--scenario", "offline", "--against", tmp_path / "narrow.json")
    assert bench(*arguments, "--json", tmp_path / "now.json") == 0
    assert read_record(tmp_path / "now.json").command["threads"] == "1"
    assert "not slower" in capsys.readouterr().out
    with pytest.raises(OptionError, match=r"as many threads \(7\), got 1"):
        bench(*arguments, "--threads", 7)


@pytest.mark.usefixtures("loud")
def test_a_build_that_fails_requests_fails(
    engine: Path,
    pictures: Path,
    measured: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """However fast its errors come."""
    write_record(tmp_path / "slow.json", scaled(read_record(measured), 30.0))

    def refuses(self: Detector, source: object) -> NoReturn:
        raise BackendError("this build answers nothing")

    monkeypatch.setattr(Detector, "__call__", refuses)
    arguments = ("--images", pictures, "--scenario", "offline", "--against", tmp_path / "slow.json")
    assert bench(engine, *arguments) == 1
    shown, told = capsys.readouterr()
    assert shown.endswith("broken\n")
    assert "requests failed about images that the baseline answered" in told
    assert "measuring again" not in told


def test_baselines_of_others_are_refused(engine: Path, pictures: Path, measured: Path, tmp_path: Path) -> None:
    record = read_record(measured)
    elsewhere = dataclasses.replace(record, environment=dict(record.environment) | {"cpu": "another"})
    write_record(tmp_path / "elsewhere.json", elsewhere)
    arguments = ("--images", pictures, "--scenario", "offline", "--seconds", 0.1)
    with pytest.raises(OptionError, match="same machine: cpu"):
        bench(engine, *arguments, "--against", tmp_path / "elsewhere.json")
    other = tmp_path / "other"
    other.mkdir()
    (other / "0.png").write_bytes(cv2.imencode(".png", np.zeros((9, 9, 3), np.uint8))[1].tobytes())
    with pytest.raises(OptionError, match="measured on other images"):
        bench(engine, "--images", other, "--scenario", "offline", "--seconds", 0.1, "--against", measured)


def test_an_engine_that_is_not_right_is_compared_with_nothing(
    copied_engine: Path, pictures: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied_engine / MANIFEST_NAME
    content = json.loads(path.read_text())
    content["certificate"]["status"] = "failed"
    path.write_text(json.dumps(content))
    arguments = (copied_engine, "--images", pictures, "--scenario", "offline", "--seconds", 0.1)
    assert bench(*arguments) == 0
    shown, told = capsys.readouterr()
    assert "offline, visionfast: " in shown
    assert "bare engine: " not in shown
    assert "certificate failed" in told
    with pytest.raises(CertificateError, match="certificate failed"):
        bench(*arguments, "--against", measured)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected an ENGINE"),
        (("x", "--scenario", "online"), "--scenario online: expected one of single-stream"),
        (("x", "--tolerance", "5%"), "together with --against"),
        (("x", "--json", "a.jpg"), "--json a.jpg: expected a file for it"),
        (("x", "--report", "a.pt"), "--report a.pt: expected a file for it"),
        (("x", "--report", "out.pdf"), "--report out.pdf: expected a name that ends in .html"),
        (("x", "--report", "same.html", "--json", "same.html"), "expected two files"),
        (("x", "--against", "BASELINE", "--json", "BASELINE"), "would overwrite the baseline"),
        (("x", "--against", "BASELINE", "--tolerance", "0"), "--tolerance 0"),
        (("x", "--against", "BASELINE", "--tolerance", "100%"), "--tolerance 100%"),
        (("x", "--against", "BASELINE", "--tolerance", "five"), "--tolerance five"),
    ],
)
def test_slips(arguments: tuple[str, ...], said: str, measured: Path) -> None:
    with pytest.raises(OptionError, match=said):
        bench(*(str(measured) if word == "BASELINE" else word for word in arguments))


def test_nothing_is_written_into_an_engine(engine: Path) -> None:
    before = (engine / "engine.json").read_bytes()
    for option in ("--json", "--report"):
        with pytest.raises(OptionError, match="in an engine's folder"):
            bench(engine, option, engine / "engine.json")
    assert (engine / "engine.json").read_bytes() == before


def test_seconds_of_nothing(engine: Path) -> None:
    with pytest.raises(OptionError, match="--seconds -1: expected more than 0"):
        bench(engine, "--seconds", "-1")


def test_no_baseline_there(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read"):
        bench(engine, "--against", tmp_path / "none.json")
