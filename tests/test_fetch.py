"""Fetching from a real server on the loopback: whole files arrive with a card, anything else leaves nothing."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from visionfast import fetch as fetch_module
from visionfast.errors import FetchError, OptionError
from visionfast.fetch import PUBLISHED, Published, fetch

CONTENT = b"weights" * 1000


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing.pt":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // (2 if self.path == "/cut.pt" else 1)])

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VISIONFAST_HOME", str(tmp_path))
    return tmp_path


def _publish(monkeypatch: pytest.MonkeyPatch, url: str, sha256: str = "") -> None:
    monkeypatch.setitem(fetch_module.PUBLISHED, "test-model", Published("a test", "MIT", url=url, sha256=sha256))


def test_a_whole_file_arrives_with_its_card(server: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(CONTENT).hexdigest()
    _publish(monkeypatch, f"{server}/whole.pt", digest)
    seen: list[tuple[int, int]] = []
    path = fetch("test-model", progress=lambda done, total: seen.append((done, total)))
    assert path == home / "models/test-model/test-model.pt"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    card = json.loads((path.parent / "card.json").read_text())
    assert (card["sha256"], card["license"], card["source"]) == (digest, "MIT", f"{server}/whole.pt")


def test_what_is_there_is_not_fetched_again(server: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _publish(monkeypatch, f"{server}/whole.pt")
    first = fetch("test-model")
    _publish(monkeypatch, f"{server}/missing.pt")
    assert fetch("test-model") == first


@pytest.mark.parametrize(
    ("path", "sha256", "words"),
    [("missing.pt", "", "404"), ("cut.pt", "", "bytes"), ("whole.pt", "0" * 64, "expected sha256 000000000000")],
)
def test_anything_else_leaves_nothing(
    server: str, home: Path, monkeypatch: pytest.MonkeyPatch, path: str, sha256: str, words: str
) -> None:
    _publish(monkeypatch, f"{server}/{path}", sha256)
    with pytest.raises(FetchError, match=words):
        fetch("test-model")
    assert list(home.rglob("*")) == []


def test_nobody_answers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _publish(monkeypatch, "http://127.0.0.1:9/none.pt")
    with pytest.raises(FetchError, match="cannot be fetched"):
        fetch("test-model")


def test_an_unknown_name_lists_those_there_are(home: Path) -> None:
    with pytest.raises(OptionError, match="yolov8s-people"):
        fetch("yolov8q")


def test_every_size_of_yolov8_is_published() -> None:
    assert {f"yolov8{size}{task}" for size in "nsmlx" for task in ("", "-seg")} < set(PUBLISHED)
