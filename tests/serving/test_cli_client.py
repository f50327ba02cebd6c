"""`visionfast client` as a person meets it: what `predict` says, from a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tritonclient.grpc", reason="a client needs tritonclient: pip install 'visionfast[triton]'")

LOW = ("--conf", "0.05", "--max-det", "60", "--classes", "kind 0,1,2")


def visionfast(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "visionfast.cli", *map(str, arguments)]
    environment = os.environ | {"VISIONFAST_HOME": str(folder)}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, check=False, timeout=300
    )


def _records(text: str) -> list[dict[str, Any]]:
    """The JSON lines, without how long it took."""
    records = [json.loads(line) for line in text.splitlines()]
    for record in records:
        if "error" not in record:
            assert set(record.pop("ms")) == {"decode", "preprocess", "engine", "postprocess"}
    return records


def _words(text: str) -> list[str]:
    """The lines, without how long it took."""
    return [line.rsplit(" (", 1)[0] for line in text.splitlines()]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--trace-json", "photo.jpg"), "would overwrite"),
        (("--trace-json", "."), "a file of its own"),
        (("--trace-json", "out.json", "--json", "out.json"), "a file of its own"),
    ],
)
def test_a_trace_overwrites_nothing(
    options: tuple[str, ...], word: str, photographs: list[Path], tmp_path: Path
) -> None:
    """Known before any server is asked."""
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(photographs[0].read_bytes())
    asked = visionfast(tmp_path, "client", "http://127.0.0.1:1", "any", "photo.jpg", "--trace", *options)
    assert asked.returncode == 1
    assert "--trace-json" in asked.stderr
    assert word in asked.stderr
    assert photo.read_bytes() == photographs[0].read_bytes()


@pytest.mark.parametrize("task", ["detect", "segment"])
def test_as_predict(
    served: Any,
    built_engine: Callable[..., Path],
    seeded_checkpoint: Callable[..., Path],
    photographs: list[Path],
    tmp_path: Path,
    task: str,
) -> None:
    server = served("ensemble", task)
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(photographs[0].read_bytes()[:9000])
    sources = [photographs[0].parent, bad, "missing.jpg"]
    predicted = visionfast(
        tmp_path, "predict", built_engine(seeded_checkpoint(task)), *sources, *LOW, "--json", "-", "--save", "here"
    )
    asked = visionfast(
        tmp_path, "client", server.http_url, server.name, *sources, *LOW, "--json", "-", "--save", "there"
    )
    assert predicted.returncode == asked.returncode == 1
    assert _records(asked.stdout) == _records(predicted.stdout)
    assert sum(len(record.get("detections", ())) for record in _records(asked.stdout)) > 0
    shown = [line for line in _words(predicted.stderr) if "its certificate failed" not in line]
    assert [line for line in _words(asked.stderr) if "its certificate failed" not in line] == shown
    pictures = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert pictures == sorted(path.name for path in (tmp_path / "there").iterdir()) == ["bus.jpg", "zidane.jpg"]
    for name in pictures:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_all_went_well(served: Any, photographs: list[Path], tmp_path: Path) -> None:
    server = served("fused")
    url = server.grpc_url.removeprefix("grpc://")
    done = visionfast(tmp_path, "client", url, server.name, photographs[0], "--offline", "--json", "out.jsonl")
    assert done.returncode == 0, done.stderr
    assert "bus.jpg: 810×1080: nothing found (" in done.stdout
    (record,) = _records((tmp_path / "out.jsonl").read_text())
    assert record == {"file": str(photographs[0]), "image_hw": [1080, 810], "detections": []}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("localhost:1", "y", "x.jpg"), "no server answers there by gRPC"),
        (("http://localhost:1", "y", "x.jpg"), "no server answers there by HTTP"),
        (("ftp://localhost", "y", "x.jpg"), "expected localhost:8001, grpc://localhost:8001 or http://localhost:8000"),
        (("localhost:1", "y", "*.nothing"), "expected a pattern that matches images"),
        (("localhost:1", "y", "x.jpg", "--timeout", "0"), "timeout: expected more than 0 seconds"),
        (("localhost:1", "y", "x.jpg", "--classes", "a,,b"), "expected names with commas between"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_failure_is_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = visionfast(tmp_path, "client", *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("visionfast: ")
    assert said in line


def test_a_wrong_option_and_a_wrong_name(served: Any, photographs: list[Path], tmp_path: Path) -> None:
    server = served("fused")
    for arguments, said in (
        ((server.name, photographs[0], "--conf", "2"), "conf: expected a number from 0 to 1, got 2.0"),
        ((server.name, photographs[0], "--classes", "cat"), "classes: no class 'cat'; there are kind 0, kind 1"),
        (("nothing", photographs[0]), "no model 'nothing' is ready there; there are detect-ensemble"),
    ):
        done = visionfast(tmp_path, "client", server.grpc_url, *arguments)
        assert done.returncode == 1
        line = done.stderr.splitlines()[-1]
        assert said in line
        assert "Traceback" not in done.stderr
