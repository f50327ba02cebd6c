"""What the real server's metrics say, held against what it was asked; `top`, the dashboard and the alerts on them."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import visionfast as vf
from visionfast.errors import DeadlineError, ImageError, OptionError, QueueFullError
from visionfast.serving.scheduling import Scheduling
from visionfast.serving.scrape import Scrape, scrape
from visionfast.serving.server import Server

pytest.importorskip("prometheus_client", reason="metrics are read with prometheus-client: visionfast[triton]")
pytest.importorskip("tritonclient.grpc", reason="the server is asked with tritonclient: visionfast[triton]")

STAGES = ("decode", "preprocess", "engine", "postprocess")
MODELS = ("fused", "ensemble", "two")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def server(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """`fused` and `ensemble`, whose answers are kept, and `two`, which is two processes."""
    from visionfast.serving.repository import deploy

    engine = built_engine(seeded_checkpoint("detect"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISIONFAST_HOME", str(tmp_path_factory.mktemp("metrics")))
        folders = [
            deploy(engine, name=name, layout=layout, scheduling=scheduling, uncertified=True)  # type: ignore[arg-type]
            for name, layout, scheduling in (
                ("fused", "fused", Scheduling(cache=True)),
                ("ensemble", "ensemble", Scheduling(cache=True)),
                ("two", "fused", Scheduling(instances=2)),
            )
        ]
    with Server(folders, http=0, grpc=0, metrics=0) as server:
        yield server


def settled(server: Server, model: str, images: float) -> Scrape:
    """The metrics once they have so many images of a model; of the last look, if they never have."""
    ends = time.monotonic() + 20
    while True:
        look = scrape(server.metrics_url)
        if look.total("visionfast_images_total", model=model) >= images or time.monotonic() > ends:
            time.sleep(0.3)  # more would be one too many
            return scrape(server.metrics_url)
        time.sleep(0.05)


def figures(look: Scrape, model: str) -> dict[str, float]:
    """Images, and errors by kind, of a model."""
    errors = {labels["kind"]: value for labels, value in look.of("visionfast_errors_total", model=model)}
    return {"images": look.total("visionfast_images_total", model=model), **errors}


def rise(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def test_there_from_the_start(server: Server) -> None:
    # Before the first image: a rate of what is not there yet would miss the first one. What warmed up is not counted.
    look = scrape(server.metrics_url)
    for model in MODELS:
        kinds = ["deadline", "format", "image", "not-found", "option", "queue-full", "server", "too-large", "truncated"]
        assert figures(look, model) == dict.fromkeys(["images", *kinds], 0)
        counts = list(look.of("visionfast_stage_duration_seconds_count", model=model))
        assert [(labels["version"], value) for labels, value in counts] == [("1", 0)] * 4
        assert {labels["stage"] for labels, _ in counts} == set(STAGES)
    # A step of an ensemble has no name of its own here.
    assert {labels["model"] for labels, _ in look.of("visionfast_images_total")} == set(MODELS)
    steps = {(labels["model"], labels["step"]) for labels, _ in look.of("visionfast_queue_duration_seconds_count")}
    assert steps == {
        ("fused", "fused"),  # a model by itself, behind its cache
        ("two", "whole"),
        *(("ensemble", step) for step in ("preprocess", "engine", "postprocess")),
    }


@pytest.mark.parametrize("model", MODELS)
def test_every_image_is_counted_once_and_in_its_bucket(server: Server, photographs: list[Path], model: str) -> None:
    before = scrape(server.metrics_url)
    asked = [(path, {"max_det": number}) for number in range(1, 6) for path in photographs]
    with vf.Client(server.grpc_url, model) as client, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: client(one[0], **one[1])[0], asked))
    expected = before.total("visionfast_images_total", model=model) + len(answers)
    after = settled(server, model, expected)
    assert rise(figures(before, model), figures(after, model)) == {"images": len(answers)}
    name = "visionfast_stage_duration_seconds"
    for stage in STAGES:
        seconds = np.array([answer.stage_ns[stage] for answer in answers]) / 1e9
        labels = {"model": model, "stage": stage}
        assert after.total(f"{name}_count", **labels) - before.total(f"{name}_count", **labels) == len(answers)
        told = after.total(f"{name}_sum", **labels) - before.total(f"{name}_sum", **labels)
        assert told == pytest.approx(seconds.sum(), abs=1e-9)
        for own, value in after.of(f"{name}_bucket", **labels):
            rose = value - before.total(f"{name}_bucket", **labels, le=own["le"])
            assert rose == (seconds <= float(own["le"])).sum()
    # Each request waited at each step, and nobody waits any more.
    for own, value in after.of("visionfast_queue_duration_seconds_count", model=model):
        was = before.total("visionfast_queue_duration_seconds_count", model=model, step=own["step"])
        assert value - was == len(answers)
    assert after.total("visionfast_waiting_requests", model=model) == 0


@pytest.mark.parametrize("model", MODELS)
def test_errors_by_kind(server: Server, photographs: list[Path], model: str) -> None:
    before = figures(scrape(server.metrics_url), model)
    cut = photographs[0].read_bytes()[:9000]
    with vf.Client(server.grpc_url, model) as client:
        answers = client([b"", b"no image", cut, photographs[1]], on_error="return", max_det=7)
        kinds = [answer.kind for answer in answers if isinstance(answer, ImageError)]
        assert sorted(kinds) == ["format", "format", "truncated"]
        for conf in (7, 8):
            with pytest.raises(OptionError):
                client(photographs[1], conf=conf)
    after = figures(settled(server, model, before["images"] + 1), model)
    assert rise(before, after) == {"images": 1, "format": 2, "truncated": 1, "option": 2}


@pytest.mark.parametrize("model", ["fused", "ensemble"])
def test_a_kept_answer_is_a_hit_and_no_image(server: Server, photographs: list[Path], model: str) -> None:
    with vf.Client(server.grpc_url, model) as client:
        client(photographs[0], max_det=99)
        before = settled(server, model, 1)
        for _ in range(3):
            client(photographs[0], max_det=99)
        done = client.traced(photographs[0], max_det=99)
    after = settled(server, model, 1)
    assert figures(after, model) == figures(before, model)
    name = "nv_cache_num_hits_per_model"
    assert after.total(name, model=model) - before.total(name, model=model) == 4
    # The answer still has the times of its making; the trace does not show them as this request's.
    assert done.answer.stage_ns["engine"] > 0
    assert done.trace.is_cached
    assert not {span.name for span in done.trace.spans} & set(STAGES)


def test_a_request_without_time_is_counted_as_refused(server: Server, photographs: list[Path]) -> None:
    before = scrape(server.metrics_url)
    with vf.Client(server.grpc_url, "two") as client:
        answers = client(photographs * 20, on_error="return", deadline_ms=60)
    refused = [answer for answer in answers if isinstance(answer, (QueueFullError, DeadlineError))]
    assert refused
    rose = rise(
        figures(before, "two"),
        figures(settled(server, "two", before.total("visionfast_images_total", model="two")), "two"),
    )
    # A client that gave up first is answered all the same.
    assert 0 < rose.get("queue-full", 0) + rose.get("deadline", 0) <= len(answers)
    assert sum(rose.values()) == len(answers)
    assert scrape(server.metrics_url).total("visionfast_waiting_requests", model="two") == 0


# ---- top ----------------------------------------------------------------------------------------------------------


def top(url: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "visionfast.cli", "top", url, *options]


def test_top_once(server: Server, photographs: list[Path]) -> None:
    command = top(server.metrics_url, "--once", "--json", "--interval", "1.5")
    with (
        vf.Client(server.grpc_url, "two") as client,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        while process.poll() is None:
            client([photographs[1], b"no image"], on_error="return")
        assert process.stdout is not None
        assert process.stderr is not None
        record, complaint = json.loads(process.stdout.read()), process.stderr.read()
    assert (process.returncode, complaint) == (0, "")
    assert set(record["models"]) == set(MODELS)
    two = record["models"]["two"]
    assert two["images_per_s"] > 0
    assert two["errors_per_s"]["format"] > 0
    assert two["queue_ms"] > 0
    assert list(two["stages"]) == list(STAGES)
    assert two["queues"]["whole"]["count"] >= two["stages"]["engine"]["count"]
    assert list(record["models"]["ensemble"]["queues"]) == ["preprocess", "engine", "postprocess"]
    for stage in two["stages"].values():
        assert stage["count"] == pytest.approx(two["images_per_s"] * record["interval_s"], abs=1.01)
        assert 0 < stage["p50_ms"] <= stage["p95_ms"] <= stage["p99_ms"]
    # Nobody asked the others.
    assert record["models"]["fused"]["stages"]["engine"] == {
        "count": 0,
        "p50_ms": None,
        "p95_ms": None,
        "p99_ms": None,
    }
    shown = subprocess.run(
        top(server.metrics_url, "--once", "--interval", "0.1"), capture_output=True, text=True, check=True
    )
    assert re.search(r"^two +0\.0 +0\.0 +0\.0 +– +0 +0 *$", shown.stdout, re.MULTILINE)
    assert re.search(r"^two +queue +0 +– +– +–\n +decode +0 +– +– +–$", shown.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("which", "options", "message"),
    [
        ("http_url", (), "/metrics: no metrics there (HTTP status 404); `visionfast serve` says where its metrics are"),
        ("metrics_url", ("--interval", "0"), "--interval 0.0: expected 0.1 to 3600 seconds"),
    ],
)
def test_top_says_in_a_line_what_is_wrong(server: Server, which: str, options: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        top(getattr(server, which), "--once", *options), capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_top_in_a_terminal_until_ctrl_c(server: Server) -> None:
    master, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        top(server.metrics_url, "--interval", "0.2"), stdout=terminal, stderr=terminal, stdin=terminal, env=environment
    )
    os.close(terminal)
    written = b""
    try:
        while written.count(b"ensemble") < 6:  # three times two tables
            written += os.read(master, 1 << 16)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                part = os.read(master, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            written += part
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert b"visionfast:" not in written
    assert b"Traceback" not in written
    assert b"\x1b[?25h" in written  # the cursor is back


# ---- the dashboard and the alerts ---------------------------------------------------------------------------------


def expressions() -> list[str]:
    """Every PromQL expression that is shipped."""
    yaml = pytest.importorskip("yaml", reason="the alerts are YAML: pip install pyyaml")
    dashboard = json.loads((DOCS / "grafana" / "visionfast.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    rules = yaml.safe_load((DOCS / "grafana" / "alerts.yml").read_text())
    return found + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


_FUNCTIONS = {"sum", "max", "by", "rate", "increase", "resets", "histogram_quantile", "and", "offset"}
_LABELS = {"le", "model", "stage", "step", "kind", "instance", "job", "reason", "quantile"}
_UNITS = {"d", "m", "e"}


def test_every_expression_is_about_what_the_server_says(server: Server) -> None:
    look = scrape(server.metrics_url)
    asked = expressions()
    assert len(asked) > 20
    for expression in asked:
        # Metric{label=~"value", …}: the metric is there, and has the label.
        for name, selector in re.findall(r"\b((?:nv|visionfast)_\w+)(?:\{([^}]*)\})?", expression):
            samples = list(look.of(name))
            assert samples, f"{name}, in {expression}"
            for label in re.findall(r"(\w+)(?==~?|!=)", re.sub(r'"[^"]*"', '""', selector or "")):
                assert label in samples[0][0], f"{name}{{{label}}}, in {expression}"
        # What else is in it is PromQL's, and the labels that are summed by.
        left = re.sub(r'"[^"]*"|\$__?\w+|\b(?:nv|visionfast)_\w+', "", expression)
        unknown = set(re.findall(r"[a-z_]+", left)) - _FUNCTIONS - _LABELS - _UNITS - {"up"}
        assert not unknown, f"{unknown}, in {expression}"
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression


def test_every_value_that_an_expression_asks_for_is_one_that_there_is(server: Server) -> None:
    look = scrape(server.metrics_url)
    for expression in expressions():
        for name, selector in re.findall(r"\b((?:nv|visionfast)_\w+)\{([^}]*)\}", expression):
            for label, values in re.findall(r'(\w+)(?:=~?|!=)"([^"$]*)"', selector):
                there = {labels[label] for labels, _ in look.of(name)}
                assert set(values.split("|")) <= there, f"{label} of {name}: {there}"


def test_every_metric_in_the_table_is_there(server: Server) -> None:
    look = scrape(server.metrics_url)
    page = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `.*$", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`((?:nv|visionfast)_\w+)`", row.split("|")[1])}
    assert len(named) >= 14
    for name in named:
        told = list(look.of(name)) or list(look.of(f"{name}_count"))
        assert told, name
    own = {name for name in look.samples if name.startswith("visionfast_")}
    assert {name for name in named if name.startswith("visionfast_")} == {
        re.sub("_(bucket|sum|count)$", "", name) for name in own
    }


def test_the_dashboard_can_be_imported() -> None:
    dashboard: dict[str, Any] = json.loads((DOCS / "grafana" / "visionfast.json").read_text())
    assert dashboard["schemaVersion"] >= 39
    assert "id" not in dashboard  # Grafana gives one
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    text = json.dumps(dashboard["panels"])
    assert set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"} == variables
    # Nothing lies on anything else.
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
