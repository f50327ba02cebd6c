"""`make demo`: an unchanged YOLOv8s goes in, certified answers come out; timed against naive PyTorch, and served.

Leaves demo/ with the annotated photographs and a short report.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("VISIONFAST_HOME", str(Path(__file__).resolve().parents[1]))

import numpy as np
import numpy.typing as npt
from interleaved import QUIET, Contestant, OtherLoad, interleave  # it settles OMP_NUM_THREADS, so before torch
from PIL import Image

from visionfast import machine, render
from visionfast.bench.baseline import NaivePyTorch
from visionfast.build import build
from visionfast.certify import default_images
from visionfast.draw import draw
from visionfast.errors import ServerError, VisionfastError
from visionfast.fetch import fetch
from visionfast.pipeline import Detector
from visionfast.preprocess.decode import decode_image
from visionfast.results import Detections
from visionfast.serving.client import Client
from visionfast.serving.repository import deploy
from visionfast.serving.server import Server
from visionfast.types import EngineManifest

MODEL = "yolov8s-people"
ROUNDS = 15  # of the timing, a picture,
SECONDS = 40.0  # but no longer than this, on a slow or busy machine


def main() -> int:
    folder = Path(os.environ["VISIONFAST_HOME"]) / "demo"
    folder.mkdir(parents=True, exist_ok=True)
    with render.download(MODEL) as progress:
        weights = fetch(MODEL, progress=progress)
    with render.stages() as stage:
        engine, manifest = build(weights, backend="openvino", size_hw=(640, 640), precision="fp32", progress=stage)
    print(f"engine: {engine}")
    render.certificate(manifest)

    photographs = default_images()
    answers: dict[str, Detections] = {}
    latency_ns: dict[str, Mapping[str, Sequence[int]]] = {}
    naive = NaivePyTorch(weights)
    with Detector.open(engine) as detector:
        for path in photographs:
            answers[path.name] = detector([path])[0]
            picture = draw(decode_image(path), answers[path.name], detector.class_names)
            Image.fromarray(picture).save(folder / path.name, quality=92)
        contestants = (
            Contestant("visionfast", "visionfast", lambda encoded: detector(encoded)[0]),
            Contestant("naive PyTorch", "naive PyTorch", naive),
        )
        load = OtherLoad()
        for path in photographs:
            print(f"timing {ROUNDS} rounds on {path.name}", file=sys.stderr)
            samples = interleave(contestants, path.read_bytes(), rounds=ROUNDS, seconds=SECONDS, warmup=1)
            latency_ns[path.name] = samples.latency_ns

    certified = manifest.certificate.status == "passed"
    served = _served(engine, photographs, answers) if certified else "Nothing: the certificate did not pass."
    report = _report(manifest, answers, latency_ns, load.share(), served)
    (folder / "report.md").write_text(report, "utf-8")
    print(report)
    for name in (*answers, "report.md"):
        print(folder / name)
    if not certified:
        print("error: the engine's certificate did not pass; see the table above", file=sys.stderr)
        return 1
    return 0


def _served(engine: Path, photographs: Sequence[Path], answers: Mapping[str, Detections]) -> str:
    """Has the Triton server answer the photographs; in words, whether it answered as the engine does here.

    Raises:
        VisionfastError: it does not start, or it answers otherwise.
    """
    pipeline = deploy(engine, name="demo")
    print("serving", file=sys.stderr)
    with Server(pipeline, http=0, grpc=0, metrics=0) as server, Client(server.grpc_url, "demo") as client:
        for path, got in zip(photographs, client(photographs), strict=True):
            expected = answers[path.name]
            for name in ("xyxy", "confidence", "class_id"):
                if not np.array_equal(getattr(got, name), getattr(expected, name)):
                    raise ServerError(f"{path.name}: the served answer's {name} is another than the local one's")
    return f"`{pipeline.name}` on a Triton server, over gRPC: every answer the same, to the bit."


def _report(
    manifest: EngineManifest,
    answers: Mapping[str, Detections],
    latency_ns: Mapping[str, Mapping[str, Sequence[int]]],
    others_share: float,
    served: str,
) -> str:
    spec, proof = manifest.spec, manifest.certificate
    h, w = spec.preprocess.size_hw
    lines = [
        "# visionfast demo",
        "",
        f"`{spec.name}` ({spec.architecture}), weights sha256 `{manifest.weights_sha256[:16]}…`, unchanged, "
        f"compiled by {manifest.backend} {manifest.runtime_version} to {h}×{w}, {manifest.precision}.",
        "",
        f"## Certificate: {proof.status}",
        "",
        f"Against {proof.reference}, on {', '.join(answers)}.",
        "",
        "| measure | measured | allowed |",
        "|---|---|---|",
    ]
    for name, value in proof.measures.items():
        bound = proof.tolerances.get(name)
        allowed = "" if bound is None else f"{'≥' if name.startswith('min') else '≤'} {bound:g}"
        lines.append(f"| {name.replace('_', ' ')} | {value:.5g} | {allowed} |")
    lines += ["", "## Answers", "", "| picture | class | confidence | xyxy, pixels |", "|---|---|---|---|"]
    for name, found in answers.items():
        for box, confidence, class_id in zip(found.xyxy, found.confidence, found.class_id, strict=True):
            corners = " ".join(f"{value:.0f}" for value in box)
            lines.append(f"| {name} | {spec.class_names[class_id]} | {confidence:.2f} | {corners} |")
    lines += [
        "",
        "## Encoded bytes to boxes, ms",
        "",
        "Interleaved rounds in one process. Naive PyTorch: PIL, torchvision, eager FP32.",
        "",
        "| picture | rounds | visionfast P50 | P95 | naive PyTorch P50 | P95 | visionfast / naive, P50 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, samples in latency_ns.items():
        ours, naive = (_percentiles_ms(samples[key]) for key in ("visionfast", "naive PyTorch"))
        lines.append(
            f"| {name} | {len(samples['visionfast'])} | {ours[0]:.1f} | {ours[1]:.1f} "
            f"| {naive[0]:.1f} | {naive[1]:.1f} | {ours[0] / naive[0]:.2f} |"
        )
    if others_share > QUIET:
        lines += [
            "",
            f"**Disturbed:** other processes took {others_share:.0%} of the processors, which slows PyTorch most. "
            "Read nothing from these figures; run it again on a quiet machine.",
        ]
    lines += ["", "## Served", "", served]
    facts = machine.environment()
    lines += ["", ", ".join(f"{key}: {value}" for key, value in facts.items()) + ".", ""]
    return "\n".join(lines)


def _percentiles_ms(samples_ns: Sequence[int]) -> npt.NDArray[np.float64]:
    return np.asarray(np.percentile(samples_ns, (50, 95)) / 1e6, np.float64)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VisionfastError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
