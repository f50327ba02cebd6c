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


@pytest.fixture(scope="session")
def small_engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines in miniature, which answer in milliseconds: `embed`, `embed-3` for three images a call, `prompt`."""
    pytest.importorskip("openvino", reason="engines are built with openvino: pip install 'visionfast[openvino]'")
    pytest.importorskip("onnx", reason="engines are built from ONNX: pip install 'visionfast[build]'")
    from small_embedder import build_small
    from small_segmenter import build_small_segmenter

    home = tmp_path_factory.mktemp("small")
    return {
        "embed": build_small(home / "embed"),
        "embed-3": build_small(home / "embed-3", batch=3),
        "prompt": build_small_segmenter(home / "prompt"),
    }


@pytest.fixture(scope="session")
def small_server(small_engines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of `small_served`."""
    pytest.importorskip("tritonclient.grpc", reason="a pipeline is written with tritonclient: visionfast[triton]")
    from visionfast.serving.repository import deploy
    from visionfast.serving.scheduling import Scheduling

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISIONFAST_HOME", str(tmp_path_factory.mktemp("small-served")))
        folders = [deploy(engine, name=name, uncertified=True) for name, engine in small_engines.items()]
        for name in ("embed", "prompt"):
            kept = Scheduling(cache=True)
            folders.append(deploy(small_engines[name], name=f"{name}-kept", scheduling=kept, uncertified=True))
        few = {"image_cache_mb": 0, "multimask": True}
        folders.append(deploy(small_engines["prompt"], name="prompt-few", options=few, uncertified=True))
    with Server(folders, http=0, grpc=0, metrics=0) as server:
        yield server


@pytest.fixture(scope="session")
def small_served(small_server: Server) -> Callable[[str], Served]:
    """`small_served(name)`: the small engines on a server of their own, each under its name, and each once more as
    `<name>-kept` with the server's cache of answers; `prompt-few` keeps no images and gives three masks a prompt."""
    server = small_server
    return lambda name: Served(name, server.http_url, server.grpc_url, server.metrics_url)


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
