"""Pipelines of seeded YOLOv8n, and one server for a whole test session that serves them all."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_pipeline import write_pipeline

from visionfast.serving.server import Server


@dataclass(frozen=True)
class Served:
    """A pipeline on the session's server: the name to ask for, and where."""

    name: str
    http_url: str
    grpc_url: str
    metrics_url: str


@pytest.fixture(scope="session")
def deployed(
    built_engine: Callable[..., Path],
    seeded_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """`deployed(layout, task="detect")`: the pipeline `<task>-<layout>` of `built_engine(seeded_checkpoint(task))`.

    It is shared, and served: a test that changes one deploys its own.
    """
    pytest.importorskip("tritonclient.grpc", reason="a pipeline is written with tritonclient: visionfast[triton]")
    home = tmp_path_factory.mktemp("served")

    @functools.cache
    def make(layout: str, task: str = "detect") -> Path:
        from visionfast.serving.repository import deploy

        engine = built_engine(seeded_checkpoint(task))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VISIONFAST_HOME", str(home))
            # An untrained network's scores are too close to one another for a certificate.
            return deploy(engine, name=f"{task}-{layout}", layout=layout, uncertified=True)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def _session_server(deployed: Callable[..., Path]) -> Iterator[Server]:
    pipelines = [deployed(layout, task) for task in ("detect", "segment") for layout in ("fused", "ensemble")]
    with Server(pipelines, http=0, grpc=0, metrics=0) as server:
        yield server


@pytest.fixture(scope="session")
def served(_session_server: Server) -> Callable[..., Served]:
    """`served(layout, task="detect")`: that pipeline on one server, which all tests share and none may harm."""

    def find(layout: str, task: str = "detect") -> Served:
        server = _session_server
        return Served(f"{task}-{layout}", server.http_url, server.grpc_url, server.metrics_url)

    return find


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the test's own, so that what is left there is this test's."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_pipeline(tmp_path / "pipeline")
