"""Metrics read, and what is no metrics; what two looks at them say."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from visionfast.cli_top import _record, _tables
from visionfast.errors import OptionError, ServerError
from visionfast.serving.activity import activity_between
from visionfast.serving.scrape import Scrape, metrics_url, parse, scrape

pytest.importorskip("prometheus_client", reason="metrics are read with prometheus-client: visionfast[triton]")

BEFORE = """\
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="people",version="1"} 10
nv_inference_request_success{model="people_engine",version="1"} 10
nv_inference_request_success{model="people_fast",version="1"} 3
nv_inference_request_success{model="other",version="1"} 1
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{model="people",version="1"} 100
nv_inference_queue_duration_us{model="people_engine",version="1"} 1000
# TYPE visionfast_waiting_requests gauge
visionfast_waiting_requests{model="people",version="1",step="engine"} 3
# TYPE visionfast_images_total counter
visionfast_images_total{model="people",version="1"} 8
visionfast_images_total{model="people_fast",version="1"} 3
# TYPE visionfast_errors_total counter
visionfast_errors_total{model="people",version="1",kind="format"} 2
visionfast_errors_total{model="people",version="1",kind="option"} 0
# TYPE visionfast_stage_duration_seconds histogram
visionfast_stage_duration_seconds_bucket{model="people",version="1",stage="engine",le="0.01"} 8
visionfast_stage_duration_seconds_bucket{model="people",version="1",stage="engine",le="0.1"} 8
visionfast_stage_duration_seconds_bucket{model="people",version="1",stage="engine",le="+Inf"} 8
visionfast_stage_duration_seconds_sum{model="people",version="1",stage="engine"} 0.04
visionfast_stage_duration_seconds_count{model="people",version="1",stage="engine"} 8
"""
AFTER = (
    BEFORE.replace('success{model="people",version="1"} 10', 'success{model="people",version="1"} 16')
    .replace("} 1000", "} 12900")
    .replace('images_total{model="people",version="1"} 8', 'images_total{model="people",version="1"} 12')
    .replace('kind="format"} 2', 'kind="format"} 3')
    .replace('le="0.1"} 8', 'le="0.1"} 12')
    .replace('le="+Inf"} 8', 'le="+Inf"} 12')
    .replace(
        '_count{model="people",version="1",stage="engine"} 8', '_count{model="people",version="1",stage="engine"} 12'
    )
)


def test_numbers_and_labels_that_triton_does_not_send() -> None:
    for line in (
        'visionfast_waiting_requests{model="a"} NaN',
        'visionfast_waiting_requests{model="a"} +Inf',
        'visionfast_errors_total{model="a"} 3',
        'visionfast_stage_duration_seconds_count{model="a"} 3',
        'visionfast_stage_duration_seconds_count{model="a",stage="x"} 3\n'
        'visionfast_stage_duration_seconds_bucket{model="a",stage="x",le="x"} 3',
    ):
        samples = parse(f'nv_inference_request_success{{model="a"}} 1\n{line}\n')
        with pytest.raises(ServerError, match="others of the same names"):
            activity_between(Scrape(1.0, samples), Scrape(2.0, samples))


def test_hostile_names_are_only_shown(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (
        Scrape(float(n), parse(f'nv_x 1\nvisionfast_errors_total{{model="[/x]\x1b[31m",kind="[/y]\x1b[32m"}} {n}\n'
            f'visionfast_images_total{{model="[/x]\x1b[31m"}} +Inf\n'))
        for n in (1, 2)
    )  # fmt: skip
    activity = activity_between(before, after)
    Console(width=200).print(_tables("url", activity))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[/x]" in shown
    assert "[/y]" in shown
    assert "NaN" not in json.dumps(_record("url", activity))


def test_rates_and_percentiles_are_the_interval_s() -> None:
    activity = activity_between(Scrape(100.0, parse(BEFORE)), Scrape(102.0, parse(AFTER)))
    assert activity.interval_s == 2.0
    # `people_engine` is a step; `people_fast` has figures of its own, and is none.
    assert list(activity.models) == ["other", "people", "people_fast"]
    people = activity.models["people"]
    assert (people.requests_per_s, people.images_per_s) == (3.0, 2.0)
    assert people.errors_per_s == {"format": 0.5}
    assert people.queue_ms == pytest.approx(11.9 / 6)
    assert people.waiting == 3
    assert people.stages["engine"].count == 4
    # The eight of before are not among them: all four are between 10 and 100 ms.
    assert people.stages["engine"].percentile_ms == pytest.approx({50: 55.0, 95: 95.5, 99: 99.1})
    idle = activity.models["people_fast"]
    assert idle.images_per_s == 0
    assert math.isnan(idle.queue_ms)
    assert activity.cpu is None


def test_a_server_that_was_started_again_begins_at_0() -> None:
    activity = activity_between(Scrape(100.0, parse(AFTER)), Scrape(101.0, parse(BEFORE)))
    people = activity.models["people"]
    assert (people.requests_per_s, people.images_per_s, people.errors_per_s) == (10.0, 8.0, {"format": 2.0})
    assert people.stages["engine"].count == 8


def test_counters_keep_the_server_s_own_names() -> None:
    samples = parse("# TYPE nv_x counter\nnv_x 1\n# TYPE a_total counter\na_total 2\nuntyped 3\n")
    assert samples == {"nv_x": {(): 1.0}, "a_total": {(): 2.0}, "untyped": {(): 3.0}}


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "<html>no</html>", '{"error": "no"}', "two words", 'a{b="c} 1', "\0"]
)
def test_no_metrics(text: str) -> None:
    with pytest.raises(ValueError, match="no metrics"):
        parse(text)


def test_another_program_s_metrics() -> None:
    others = Scrape(1.0, parse("process_cpu_seconds_total 1\n"))
    with pytest.raises(ServerError, match="expected a Triton server's metrics, got another program's"):
        activity_between(others, Scrape(2.0, others.samples))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost", "http://localhost:8002/metrics"),
        ("localhost:1", "http://localhost:1/metrics"),
        ("http://10.0.0.1:9/", "http://10.0.0.1:9/metrics"),
        ("http://[::1]:9", "http://[::1]:9/metrics"),
        ("http://a/b/metrics/", "http://a:8002/b/metrics"),
    ],
)
def test_where_the_metrics_are(url: str, expected: str) -> None:
    assert metrics_url(url) == expected


@pytest.mark.parametrize(
    "url", ["", "grpc://a:1", "https://a", "http://", "a:99999", "a b", "http://u:p@a", "a?b", "[::1"]
)
def test_no_url(url: str) -> None:
    with pytest.raises(OptionError, match="expected http://localhost:8002/metrics"):
        metrics_url(url)


@pytest.fixture
def answering() -> Iterator[Callable[[int, bytes], str]]:
    """`answering(status, body)`: the URL of a server that says only that."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,)).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/metrics"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"", "no metrics there (HTTP status 404)"),
        (200, b"<html>", "expected metrics in Prometheus's form, got b'<html>'"),
        (200, b"\xff\xfe", "expected metrics in Prometheus's form"),
        (200, b"", "expected metrics in Prometheus's form, got b''"),
    ],
)
def test_what_answers_are_no_metrics(
    status: int, body: bytes, message: str, answering: Callable[[int, bytes], str]
) -> None:
    url = answering(status, body)
    with pytest.raises(ServerError) as caught:
        scrape(url)
    assert str(caught.value).startswith(f"{url}: {message}")
    assert "\n" not in str(caught.value)


def test_nobody_answers() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/metrics"
        with pytest.raises(ServerError, match=r"no metrics there \(.*Connection refused\)"):
            scrape(url)
        nobody.listen()
        with pytest.raises(ServerError, match=r"no metrics there \(.*timed out\)"):
            scrape(url, timeout_s=0.1)
