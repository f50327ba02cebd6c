"""Ten thousand corrupt uploads: does the server live, do its stages, and does their memory stay flat?

Uploads that are wrong in every layer, in random order: the image (cut short, damaged, garbage, headers that claim
terapixels), the tensors (lengths that lie, other shapes and dtypes, too many, too few), the options (no JSON, too
deep), and the messages themselves (headers of a length that lies, half a body, no HTTP at all). After each round of all
kinds a good image must be answered as before. Memory is of the server and of every stage, and a line is fitted through
the second half: bytes an upload.

    .venv/bin/python benchmarks/corrupt_uploads.py --engine engines/yolov8n/openvino-fp32-cpu-640x640-b1 --image bus.jpg
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from corrupt_messages import Upload, uploads
from interleaved import console, environment, write_results  # before torch
from rich.table import Table

import visionfast as vf
from visionfast.serving.repository import deploy
from visionfast.serving.server import Server

_WITHIN_S = 20.0
"""A corrupt upload is answered, or its connection closed."""


class Sender:
    """Sends uploads to one server, also from several threads."""

    def __init__(self, http_url: str, grpc_url: str) -> None:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        self._grpc = grpc
        self._http = ("127.0.0.1", int(http_url.rpartition(":")[2]))
        self._channel = grpc.insecure_channel(grpc_url.removeprefix("grpc://"))
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def send(self, upload: Upload) -> str:
        """What came: `200`, `INVALID_ARGUMENT`, `closed`, …; `no answer` after `_WITHIN_S`."""
        if isinstance(upload.message, bytes):
            return self._over_http(upload.message)
        try:
            self._stub.ModelInfer(upload.message, timeout=_WITHIN_S)
        except self._grpc.RpcError as error:
            told = str(error.code().name)
            return "no answer" if told == "DEADLINE_EXCEEDED" else told
        return "200"

    def _over_http(self, message: bytes) -> str:
        try:
            with socket.create_connection(self._http, timeout=_WITHIN_S) as connection:
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)  # there is no more to come
                answer = connection.recv(65536)
        except TimeoutError:
            return "no answer"
        except OSError:
            return "closed"
        return answer.split(b" ", 2)[1].decode(errors="replace") if answer.startswith(b"HTTP/") else "closed"


# ---- memory -------------------------------------------------------------------------------------------------------


def rss_bytes(pid: int) -> int:
    """Of a process, without what it shares through /dev/shm."""
    told = Path(f"/proc/{pid}/status").read_text()
    fields = {line.split(":")[0]: line.split()[1] for line in told.splitlines() if line.startswith("Rss")}
    return (int(fields["RssAnon"]) + int(fields["RssFile"])) * 1024


def _memory(server: Server) -> dict[str, int]:
    assert server.pid is not None
    pids = {"tritonserver": server.pid} | {stage.name: stage.pid for stage in server.stages}
    return {name: rss_bytes(pid) for name, pid in pids.items()}


def slope(sent: Sequence[int], memory: Sequence[int]) -> float:
    """Bytes an upload, by least squares over the second half."""
    half = len(sent) // 2
    return float(np.polyfit(sent[half:], memory[half:], 1)[0])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Corrupt uploads, and the memory of those who get them.")
    parser.add_argument("--engine", type=Path, required=True, help="of a detector; its folder")
    parser.add_argument("--image", type=Path, required=True, help="a JPEG photograph")
    parser.add_argument("--layout", choices=["fused", "ensemble"], default="fused")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    jpeg, before = given.image.read_bytes(), environment()
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    points: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["VISIONFAST_HOME"] = home
        pipeline = deploy(given.engine.resolve(), name="yolov8", layout=given.layout, uncertified=True)
        with Server(pipeline, http=0, grpc=0, metrics=0) as server, vf.Client(server.grpc_url, "yolov8") as client:
            good, sent, began = client(jpeg)[0], 0, time.monotonic()
            sender = Sender(server.http_url, server.grpc_url)
            with ThreadPoolExecutor(given.threads) as pool:
                while sent < given.count:
                    some = uploads("yolov8", jpeg, random.Random(sent))[: given.count - sent]
                    for upload, outcome in zip(some, pool.map(sender.send, some), strict=True):
                        outcomes[upload.kind][outcome] += 1
                    sent += len(some)
                    points.append({"sent": sent, "seconds": time.monotonic() - began, "rss_bytes": _memory(server)})
                    if (fault := server.fault()) is not None:
                        console.print(f"[red]after {sent} uploads: {fault}[/]")
                        return 1
                    again = client(jpeg)[0]
                    if not np.array_equal(again.xyxy, good.xyxy):
                        console.print(f"[red]after {sent} uploads a good image is answered otherwise[/]")
                        return 1
            sender.close()
    _report(outcomes, points)
    if given.out is not None:
        told = {kind: dict(counter) for kind, counter in sorted(outcomes.items())}
        write_results(given.out, "corrupt_uploads", given, before, [{"outcomes": told, "memory": points}])
    return 1 if any("no answer" in counter for counter in outcomes.values()) else 0


def _report(outcomes: Mapping[str, collections.Counter[str]], points: Sequence[Mapping[str, Any]]) -> None:
    table = Table("upload", "what came", box=None)
    for kind, counter in sorted(outcomes.items()):
        table.add_row(kind, ", ".join(f"{outcome} × {count}" for outcome, count in counter.most_common()))
    console.print(table)
    sent = [point["sent"] for point in points]
    table = Table("process", "MB at first", "half way", "at last", "bytes an upload, second half", box=None)
    for name in points[0]["rss_bytes"]:
        memory = [point["rss_bytes"][name] for point in points]
        shown = (memory[0], memory[len(memory) // 2], memory[-1])
        grows = f"{slope(sent, memory):+.0f}" if len(points) > 3 else ""
        table.add_row(name, *(f"{size / 1e6:.1f}" for size in shown), grows)
    console.print(table)
    console.print(f"{sent[-1]} uploads in {points[-1]['seconds']:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
