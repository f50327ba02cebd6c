"""What does a click cost, the first one on an image and the next, against the bare engines and the official predictor?

Everything runs in one process, in turns (`interleaved`). The first click begins with the encoded JPEG and an empty
cache; a next click is another point on the image before. The bare engines get ready tensors, and give logits. The
official predictor is used as its own examples use it: OpenCV decodes, then `set_image` and `predict`. With
`--everything N`, the automatic generators on a grid of N × N points too, three times.

    .venv/bin/python benchmarks/clicks.py --model mobile_sam.pt --model sam_vit_b_01ec64.pth --json clicks.raw.json

Without `--model`, untrained checkpoints of MobileSAM, SAM vit_b and SAM 2.1 tiny are made: they cost what trained ones
cost, but that their masks are more ragged.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from interleaved import (  # before torch
    Contestant,
    Goal,
    OtherLoad,
    console,
    environment,
    interleave,
    report,
    result,
    write_results,
)

from visionfast import artifacts
from visionfast.backends import get_backend
from visionfast.bench.official_sam import official_generator, official_predictor
from visionfast.build import build
from visionfast.certify import default_images
from visionfast.checkpoint import open_checkpoint
from visionfast.embedding_cache import EmbeddingCache
from visionfast.errors import BackendUnavailableError, VisionfastError
from visionfast.preprocess.cpu_antialias import AntialiasPreprocessor
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.prompts import prompt_tensors
from visionfast.prompt_segmenter import PromptSegmenter
from visionfast.types import EngineManifest, Precision

UNTRAINED = ("mobile_sam", "sam_vit_b", "sam2.1_hiera_tiny")
_CLICKS = ((0.5, 0.5), (0.3, 0.6), (0.7, 0.4), (0.25, 0.3), (0.6, 0.75))  # parts of the picture's width and height


def clicks(image_hw: tuple[int, int]) -> Iterator[list[tuple[float, float, int]]]:
    """One positive point at a time, over and over."""
    height, width = image_hw
    for x, y in itertools.cycle(_CLICKS):
        yield [(x * width, y * height, 1)]


@contextlib.contextmanager
def entrants(
    weights: Path, picture: bytes, precision: Precision, points_per_side: int
) -> Iterator[tuple[list[Contestant], list[Contestant]]]:
    """Those who click, and those who look for everything; who cannot take part is named on the console."""
    folder, manifest = build(weights, backend="openvino", precision=precision)
    pixels = decode_image(picture)
    cache = EmbeddingCache(1 << 30)
    with contextlib.ExitStack() as opened:
        sam = opened.enter_context(PromptSegmenter.open(folder, cache=cache))
        points = clicks(pixels.shape[:2])
        encoded = sam.encode(picture)

        def first(jpeg: bytes) -> Any:
            cache.clear()
            return sam.segment(jpeg, points=next(points))

        clicking = [
            Contestant("first", "visionfast, from the JPEG", first),
            Contestant("next", "visionfast, encoded before", lambda _: sam.segment(encoded, points=next(points))),
            *_bare(folder, manifest, pixels, opened),
        ]
        looking = []
        if points_per_side:

            def everything(jpeg: bytes) -> Any:
                cache.clear()
                return sam.everything(jpeg, points_per_side=points_per_side)

            looking.append(Contestant("everything", f"visionfast, {points_per_side}² points", everything))
        try:
            clicking += _official_clicks(weights, manifest, pixels)
            if points_per_side:
                looking.append(_official_generator(weights, manifest, points_per_side))
        except BackendUnavailableError as error:
            console.print(f"[yellow]left out: {error}[/]")
        yield clicking, looking


def _bare(
    folder: Path, manifest: EngineManifest, pixels: np.ndarray[Any, Any], opened: contextlib.ExitStack
) -> list[Contestant]:
    """The two engines on tensors that are ready."""
    backend, spec = get_backend(manifest.backend), manifest.spec
    encoder, decoder = (opened.enter_context(backend.load(folder, manifest, graph)) for graph in spec.graphs)
    image = np.zeros(encoder.inputs[0].shape, np.float32)
    placed = AntialiasPreprocessor(spec.preprocess).write(pixels, image)
    assert spec.prompts is not None
    prompt = prompt_tensors(next(clicks(pixels.shape[:2])), None, placed=placed, spec=spec.prompts, most_points=32)
    feeds = {
        "points": prompt.points,
        "labels": prompt.labels,
        "mask_input": np.zeros((1, 1, 256, 256), np.float32),
        "has_mask": np.zeros(1, np.float32),
    }
    features = encoder.infer({"images": image})

    def first(_: bytes) -> Any:
        return decoder.infer({**encoder.infer({"images": image}, copy=False), **feeds}, copy=False)

    return [
        Contestant("bare first", "encoder and decoder alone", first),
        Contestant("bare next", "decoder alone", lambda _: decoder.infer({**features, **feeds}, copy=False)),
    ]


def _official_clicks(weights: Path, manifest: EngineManifest, pixels: np.ndarray[Any, Any]) -> list[Contestant]:
    checkpoint = open_checkpoint(weights)
    predictor, again = (official_predictor(checkpoint, manifest.spec.architecture) for _ in range(2))
    again.set_image(pixels)
    points = clicks(pixels.shape[:2])

    def predict(asked: Any) -> Any:
        ((x, y, label),) = next(points)
        return asked.predict(point_coords=np.array([[x, y]]), point_labels=np.array([label]), multimask_output=False)

    def first(jpeg: bytes) -> Any:
        predictor.set_image(_opencv(jpeg))
        return predict(predictor)

    return [
        Contestant("official first", "official predictor, from the JPEG", first),
        Contestant("official next", "official predictor, image set before", lambda _: predict(again)),
    ]


def _official_generator(weights: Path, manifest: EngineManifest, points_per_side: int) -> Contestant:
    generator = official_generator(
        open_checkpoint(weights),
        manifest.spec.architecture,
        points_per_side=points_per_side,
        output_mode="coco_rle",
    )
    call: Callable[[bytes], Any] = lambda jpeg: generator.generate(_opencv(jpeg))  # noqa: E731
    return Contestant("official everything", f"official generator, {points_per_side}² points", call)


def _opencv(jpeg: bytes) -> np.ndarray[Any, Any]:
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def _goals(architecture: str) -> list[Goal]:
    """Issue 4's; the one on first over next is for vit_b."""
    return [
        Goal("first", "bare first", 1.05),
        Goal("next", "bare next", 1.3),
        Goal("next", "first", 1 / 20 if architecture == "sam_vit_b" else None),
        Goal("first", "official first", 0.7),
        Goal("next", "official next"),
        Goal("everything", "official everything"),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", help="a checkpoint, once for each of several")
    parser.add_argument("--precision", default="fp32", help="of the engines")
    parser.add_argument("--rounds", type=int, default=10, help="a model, at most")
    parser.add_argument("--seconds", type=float, default=300, help="a model, at most")
    parser.add_argument("--everything", type=int, default=0, metavar="N", help="also a grid of N × N points")
    parser.add_argument("--seed", type=int, default=0, help="of the order within the rounds")
    parser.add_argument("--json", type=Path, help="raw samples and environment go here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a goal is missed")
    return parser.parse_args()


def _models(named: list[Path] | None, scratch: Path) -> Iterator[Path]:
    if named:
        yield from named
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from seeded_sam import save_checkpoint

    for kind in UNTRAINED:
        yield save_checkpoint(kind, scratch / f"{kind}.pt")


def main() -> int:
    arguments = _arguments()
    before = environment()
    results: list[dict[str, Any]] = []
    every = True
    picture = default_images()[0]
    with tempfile.TemporaryDirectory(prefix="visionfast-") as home:
        os.environ.setdefault("VISIONFAST_HOME", home)
        for weights in _models(arguments.model, Path(home)):
            with entrants(weights, picture.read_bytes(), arguments.precision, arguments.everything) as groups:
                architecture = artifacts.read_manifest(artifacts.find_engine(weights.stem)).spec.architecture
                for contestants in filter(None, groups):
                    load = OtherLoad()
                    looking = contestants[0].key == "everything"
                    samples = interleave(
                        contestants,
                        picture.read_bytes(),
                        rounds=min(arguments.rounds, 3) if looking else arguments.rounds,
                        seconds=arguments.seconds,
                        warmup=0,
                        seed=arguments.seed,
                    )
                    others = load.share()
                    title = f"{architecture}, {picture.name}"
                    every &= report(title, contestants, _goals(architecture), samples, others=others)
                    results.append(result(architecture, picture.name, contestants, samples, others=others))
    if arguments.json:
        write_results(arguments.json, "clicks", arguments, before, results)
    return 1 if arguments.strict and not every else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VisionfastError as error:
        sys.exit(f"error: {error}")
