"""A thousand clicks on twenty pictures from eight threads: is every mask right, and is the cache what it says it is?

First one thread answers every click by itself; those are the right answers. Then all threads ask one segmenter at the
same time, in two rounds: with room for every picture, and with room for a third of them. In both, a picture's bytes
come with every click, as in a server that keeps no state; a thread stays with a picture for some clicks, as people do.

    .venv/bin/python benchmarks/many_clicks.py --model mobile_sam.pt --images DIR
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interleaved import console  # before torch

from visionfast.build import build
from visionfast.certify import images_in
from visionfast.embedding_cache import CacheStats, EmbeddingCache
from visionfast.errors import VisionfastError
from visionfast.preprocess.decode import decode_image
from visionfast.prompt_segmenter import PromptSegmenter


@dataclass(frozen=True, slots=True)
class Click:
    """One point on one of the pictures, original pixels."""

    picture: int
    point: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one round.

    Attributes:
        wrong: clicks whose mask or score was not the right one, to the bit.
        encoded: calls of the encoder.
        most_bytes: that the cache was ever seen to hold.
        stats: of the cache, at the end.
    """

    wrong: int
    encoded: int
    most_bytes: int
    stats: CacheStats


def some_clicks(count: int, pictures: Sequence[bytes], *, stay: int = 25, seed: int = 0) -> list[Click]:
    """Clicks in the order in which they are taken: `stay` on one picture, then on another one, chosen at random."""
    draw = random.Random(seed)
    sizes = [decode_image(picture).shape[:2] for picture in pictures]
    clicks = []
    while len(clicks) < count:
        picture = draw.randrange(len(pictures)) if len(clicks) >= stay * len(pictures) else len(clicks) // stay
        height, width = sizes[picture]
        for _ in range(min(stay, count - len(clicks))):
            clicks.append(Click(picture, (draw.random() * (width - 1), draw.random() * (height - 1))))
    return clicks


Answer = tuple[tuple[bytes, ...], bytes]


def answers(segmenter: PromptSegmenter, pictures: Sequence[bytes], clicks: Sequence[Click]) -> list[Answer]:
    """The right ones, one after the other."""
    return [_ask(segmenter, pictures, click) for click in clicks]


def _ask(segmenter: PromptSegmenter, pictures: Sequence[bytes], click: Click) -> Answer:
    masks = segmenter.segment(pictures[click.picture], points=[(*click.point, 1)])
    return masks.mask.counts, masks.score.tobytes()


def at_once(
    open_segmenter: Callable[[EmbeddingCache], PromptSegmenter],
    pictures: Sequence[bytes],
    clicks: Sequence[Click],
    right: Sequence[Answer],
    *,
    threads: int,
    cache_bytes: int,
) -> Outcome:
    """All threads ask one segmenter, each taking the next `stay` of clicks; the first one that fails ends it."""
    cache = EmbeddingCache(cache_bytes)
    wrong, most, encoded = [0], [0], [0]
    errors: list[BaseException] = []
    lock = threading.Lock()
    with open_segmenter(cache) as segmenter:
        encode = segmenter.session.encode

        def counting(*arguments: Any) -> Any:
            with lock:
                encoded[0] += 1
            return encode(*arguments)

        segmenter.session.encode = counting  # type: ignore[method-assign]
        waiting = _runs(clicks)

        def work() -> None:
            try:
                while True:
                    with lock:
                        if errors or not waiting:
                            return
                        first, some = waiting.pop(0)
                    for i, click in enumerate(some, first):
                        got = _ask(segmenter, pictures, click)
                        held = cache.stats().bytes
                        with lock:
                            wrong[0] += got != right[i]
                            most[0] = max(most[0], held)
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if errors:
        raise errors[0]
    return Outcome(wrong[0], encoded[0], most[0], cache.stats())


def _runs(clicks: Sequence[Click]) -> list[tuple[int, list[Click]]]:
    """Clicks that follow one another on one picture, each with the number of its first."""
    runs: list[tuple[int, list[Click]]] = []
    for i, click in enumerate(clicks):
        if not runs or runs[-1][1][-1].picture != click.picture:
            runs.append((i, []))
        runs[-1][1].append(click)
    return runs


def complaints(outcome: Outcome, clicks: Sequence[Click], pictures: Sequence[bytes], *, fits: bool) -> list[str]:
    """What is not as it should be; `fits`: the cache has room for every picture."""
    stats = outcome.stats
    found = []
    if outcome.wrong:
        found.append(f"{outcome.wrong} of {len(clicks)} masks are wrong")
    if max(outcome.most_bytes, stats.bytes) > stats.max_bytes:
        found.append(f"the cache held {outcome.most_bytes} bytes of {stats.max_bytes}")
    if stats.hits + stats.misses != len(clicks) or stats.failures:
        found.append(f"{stats.hits} hits, {stats.misses} misses and {stats.failures} failures of {len(clicks)} clicks")
    if stats.misses != outcome.encoded:
        found.append(f"{stats.misses} misses, but {outcome.encoded} images encoded")
    if stats.misses != stats.entries + stats.evictions:
        found.append(f"{stats.misses} misses, but {stats.entries} entries and {stats.evictions} evictions")
    if fits and stats.misses != len({click.picture for click in clicks}):
        found.append(f"{stats.misses} misses for {len(pictures)} pictures that all have room")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Segment Anything checkpoint")
    parser.add_argument("--images", type=Path, required=True, help="folder of pictures")
    parser.add_argument("--pictures", type=int, default=20)
    parser.add_argument("--clicks", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=8)
    arguments = parser.parse_args()
    pictures = [path.read_bytes() for path in images_in(arguments.images)[: arguments.pictures]]
    clicks = some_clicks(arguments.clicks, pictures, stay=max(1, min(25, arguments.clicks // len(pictures))))
    failed = False
    with tempfile.TemporaryDirectory(prefix="visionfast-") as home:
        os.environ.setdefault("VISIONFAST_HOME", home)
        folder, _ = build(arguments.model, backend="openvino")
        everyone = EmbeddingCache(1 << 30)
        with PromptSegmenter.open(folder, cache=everyone) as alone:
            right = answers(alone, pictures, clicks)
        held = everyone.stats()
        for room, fits in ((len(pictures), True), (max(1, len(pictures) // 3), len(pictures) == 1)):
            outcome = at_once(
                lambda cache: PromptSegmenter.open(folder, cache=cache),
                pictures,
                clicks,
                right,
                threads=arguments.threads,
                cache_bytes=room * held.bytes // held.entries,
            )
            found = complaints(outcome, clicks, pictures, fits=fits)
            failed |= bool(found)
            stats = outcome.stats
            console.print(
                f"room for {room} of {len(pictures)} pictures: {len(clicks)} clicks, {arguments.threads} threads: "
                f"{len(clicks) - outcome.wrong} right; {stats.hits} hits ({stats.coalesced} waited), {stats.misses} "
                f"misses, {stats.evictions} evictions; at most {outcome.most_bytes} of {stats.max_bytes} bytes"
            )
            for complaint in found:
                console.print(f"[red]{complaint}[/]")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VisionfastError as error:
        sys.exit(f"error: {error}")
