"""Who takes part in `serving.py`: in this process, on Triton, and on the server that people write first."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
from interleaved import console  # before torch

import visionfast as vf
from visionfast import machine
from visionfast.build import build
from visionfast.errors import VisionfastError
from visionfast.loading import load_graphs, load_streams
from visionfast.pipeline import Detector
from visionfast.serving.ensemble import Layout
from visionfast.serving.repository import deploy
from visionfast.serving.scheduling import Scheduling
from visionfast.serving.server import Server
from visionfast.types import EngineManifest

__all__ = ["LAYOUTS", "Call", "Entrant", "entrants"]

LAYOUTS: tuple[Layout, ...] = ("fused", "ensemble")
Call: TypeAlias = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Entrant:
    """One way to an answer.

    Attributes:
        key, name: for tables and raw samples.
        call: encoded image → answer, one at a time, as fast as can be.
        parallel: the same for several threads at once, as many images a second as can be.
        throughput: takes part in the throughput.
    """

    key: str
    name: str
    call: Call
    parallel: Call
    throughput: bool = True


@contextlib.contextmanager
def entrants(weights: Path, encoded: bytes) -> Iterator[list[Entrant]]:
    """Everyone; who cannot take part is named on the console."""
    folder, manifest = build(weights, backend="openvino")
    with contextlib.ExitStack() as opened:
        found = [*_in_process(folder, manifest, opened), *_served(folder, opened)]
        expected = found[1].call(encoded)
        for one in found[2:]:
            answer = one.call(encoded)
            same = np.array_equal(answer.xyxy, expected.xyxy) and np.array_equal(answer.confidence, expected.confidence)
            if not same:
                raise VisionfastError(f"{one.name}: another answer than in process; nothing is measured")
        missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
        if missing:
            console.print(f"[yellow]left out:[/] the naive server: {' and '.join(missing)} missing; pip installs them")
        else:
            found.append(_naive(weights, opened))
        yield found


def _in_process(folder: Path, manifest: EngineManifest, opened: contextlib.ExitStack) -> list[Entrant]:
    """The bare engine on a ready tensor, and the pipeline: one with all threads, and one a thread."""
    streams = machine.usable_cpus()
    alone = [opened.enter_context(runner) for runner in load_graphs(folder, manifest)]
    beside = load_streams(folder, manifest, streams=streams) if streams > 1 else load_graphs(folder, manifest)
    tensor = manifest.spec.graphs[0].inputs[0]
    feeds = {tensor.name: np.random.default_rng(0).integers(0, 256, tensor.shape, np.uint8).astype(tensor.dtype)}
    bare = [
        lambda _, runner=runner: runner.infer(feeds, copy=False)
        for runner in (*alone, *(opened.enter_context(runner) for runner in beside))
    ]
    more = load_streams(folder, manifest, streams=streams) if streams > 1 else load_graphs(folder, manifest)
    detectors = [
        opened.enter_context(Detector(manifest.spec, runner)) for runner in (*load_graphs(folder, manifest), *more)
    ]
    whole = [lambda encoded, detector=detector: detector(encoded)[0] for detector in detectors]
    return [
        Entrant("bare", "bare engine in process", bare[0], _shared(bare[1:])),
        Entrant("in-process", "pipeline in process", whole[0], _shared(whole[1:])),
    ]


def _shared(calls: Sequence[Call]) -> Call:
    """Any number of threads take turns at these."""
    free: SimpleQueue[Call] = SimpleQueue()
    for call in calls:
        free.put(call)

    def call(encoded: bytes) -> Any:
        taken = free.get()
        try:
            return taken(encoded)
        finally:
            free.put(taken)

    return call


def _served(folder: Path, opened: contextlib.ExitStack) -> list[Entrant]:
    """Both layouts and a cached one, on one server."""
    pipelines = [deploy(folder, name=layout, layout=layout) for layout in LAYOUTS]
    pipelines.append(deploy(folder, name="cached", scheduling=Scheduling(cache=True)))
    server = opened.enter_context(Server(pipelines, http=0, grpc=0, metrics=0))
    clients = [opened.enter_context(vf.Client(server.grpc_url, path.name)) for path in pipelines]
    clients.append(opened.enter_context(vf.Client(server.http_url, "fused")))
    calls = [lambda encoded, client=client: client(encoded)[0] for client in clients]
    names = {
        "fused": "Triton, fused, gRPC",
        "ensemble": "Triton, ensemble, gRPC",
        "cached": "Triton, a cache hit, gRPC",
        "fused-http": "Triton, fused, HTTP",
    }
    return [
        Entrant(key, name, call, call, throughput=key in LAYOUTS)
        for (key, name), call in zip(names.items(), calls, strict=True)
    ]


def _naive(weights: Path, opened: contextlib.ExitStack) -> Entrant:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent), "naive_server:app"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--log-level", "warning"], env=os.environ | {"NAIVE_WEIGHTS": str(weights)}
    )
    opened.callback(process.wait)
    opened.callback(process.terminate)
    connections = threading.local()

    def call(encoded: bytes) -> bytes:
        if not hasattr(connections, "one"):
            connections.one = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connections.one.request("POST", "/detect", encoded)
        response = connections.one.getresponse()
        if response.status != 200:
            raise VisionfastError(f"the naive server: HTTP status {response.status}")
        return bytes(response.read())

    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return Entrant("naive", "FastAPI, eager PyTorch, PIL", call, call)
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise VisionfastError("the naive server did not start; what it said is above")
