"""What shared memory saves a client: the same image in a message and in shared memory, over gRPC and HTTP, in turns.

One server; `cached` answers from its response cache, so that what is left is the way there and back and the cache's
hash, and `plain` computes every answer. The pictures are made from one photograph: JPEGs of about 100 KB and of 1 MB,
and as a PNG of 12 megapixels with noise.

    .venv/bin/python benchmarks/shared_memory.py --engine engines/yolov8n/openvino-fp32-cpu-640x640-b1 --image bus.jpg
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from interleaved import Contestant, Samples, console, environment, interleave, result, write_results  # before torch
from rich.table import Table

import visionfast as vf
from visionfast.serving.repository import deploy
from visionfast.serving.scheduling import Scheduling
from visionfast.serving.server import Server

_NAMES = {
    "g": "gRPC, in a message",
    "G": "gRPC, shared memory",
    "h": "HTTP, in a message",
    "H": "HTTP, shared memory",
}
_RATIOS = (("G", "g"), ("H", "h"))


def pictures(photograph: Path) -> dict[str, bytes]:
    """Name → encoded image."""
    image = cv2.imread(str(photograph))  # (H, W, 3) u8 BGR
    assert image is not None, photograph
    height, width = image.shape[:2]
    large = cv2.resize(image, (4000, 3000), interpolation=cv2.INTER_CUBIC)
    noise = np.random.default_rng(0).integers(-4, 5, large.shape, np.int16)
    noisy = np.clip(large.astype(np.int16) + noise, 0, 255).astype(np.uint8)
    doubled = cv2.resize(noisy, (2 * width, 2 * height), interpolation=cv2.INTER_AREA)
    return {
        "100 KB JPEG": _near(image, 100_000),
        "1 MB JPEG": _near(doubled, 1_000_000),
        "12 MP PNG": _encoded(noisy, ".png", cv2.IMWRITE_PNG_COMPRESSION, 1),
    }


def _near(image: npt.NDArray[np.uint8], size: int) -> bytes:
    """As a JPEG whose size is nearest."""
    made = [_encoded(image, ".jpg", cv2.IMWRITE_JPEG_QUALITY, quality) for quality in range(50, 101, 2)]
    return min(made, key=lambda encoded: abs(len(encoded) - size))


def _encoded(image: npt.NDArray[np.uint8], suffix: str, setting: int, value: int) -> bytes:
    done, encoded = cv2.imencode(suffix, image, [setting, value])
    assert done
    return encoded.tobytes()


def show(title: str, samples: Samples) -> None:
    """Medians, and the ratios of the rounds with their spread."""
    table = Table("", "n", "P5 ms", "P50 ms", "P95 ms", title=title, title_justify="left", box=None)
    for key, latency in samples.latency_ns.items():
        points = np.percentile(latency, (5, 50, 95)) / 1e6
        table.add_row(_NAMES[key], str(len(latency)), *(f"{point:.2f}" for point in points))
    console.print(table)
    for over, under in _RATIOS:
        paired = np.array(samples.latency_ns[over], float) / np.array(samples.latency_ns[under], float)
        low, middle, high = np.percentile(paired, (5, 50, 95))
        console.print(f"{_NAMES[over]} / {_NAMES[under]}: {middle:.3f} (5–95 %: {low:.3f}–{high:.3f})")
    console.print()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What shared memory saves a client, in turns.")
    parser.add_argument("--engine", type=Path, required=True, help="of a detector; its folder")
    parser.add_argument("--image", type=Path, required=True, help="a photograph")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0, help="a picture may take")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    before, results = environment(), []
    console.print(f"load average: {before['load_average']}")
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as stack:
        os.environ["VISIONFAST_HOME"] = home
        pipelines = [
            deploy(given.engine.resolve(), name=name, scheduling=Scheduling(cache=name == "cached"), uncertified=True)
            for name in ("cached", "plain")
        ]
        server = stack.enter_context(Server(pipelines, http=0, grpc=0, metrics=0, shared_memory=True))
        for model in ("cached", "plain"):
            clients = {
                key: stack.enter_context(
                    vf.Client(server.grpc_url if key in "gG" else server.http_url, model, shared_memory=key in "GH")
                )
                for key in _NAMES
            }
            contestants = [Contestant(key, _NAMES[key], client) for key, client in clients.items()]
            for name, encoded in pictures(given.image).items():
                samples = interleave(contestants, encoded, rounds=given.rounds, seconds=given.seconds)
                show(f"{model}, {name}: {len(encoded):,} bytes", samples)
                results.append(result(model, name, contestants, samples, others=float("nan")))
    console.print(f"load average: {environment()['load_average']}")
    if given.out is not None:
        write_results(given.out, "shared_memory", given, before, results)


if __name__ == "__main__":
    main()
