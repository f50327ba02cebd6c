"""Two minutes of mixed load, in which nothing may grow; and what grows when it is planted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_pipeline import MODEL, ask, write_pipeline

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from flatness import FIGURES, Series, read_process, trend
from soak import Plan, bound_of, soak
from soak_load import mixed_images

from visionfast.serving.server import Server

pytest.importorskip("tritonclient.grpc", reason="the server is asked with tritonclient: visionfast[triton]")


@pytest.mark.timeout(400)
def test_two_minutes_leave_nothing_behind(
    built_engine: Callable[..., Path],
    seeded_checkpoint: Callable[..., Path],
    reduced_photographs: Callable[[int], list[Path]],
    engine_home: Path,
    temporary: Path,
) -> None:
    photographs = [path.read_bytes() for path in reduced_photographs(2)]
    plan = Plan(seconds=110, rate=3, restarts=1, warm_up_s=15, sample_s=0.5)
    # Where images are megabytes, how many of them come at once decides what the allocators keep, for longer than this.
    images = [(kind, image) for kind, image in mixed_images(photographs, 0) if len(image) < 1_000_000]
    seen = soak(built_engine(seeded_checkpoint("detect")), images, plan)
    trends = seen.trends(plan)
    watched = {name for name, _ in trends}
    assert {"server", "clients", "shared memory", "fused_0_0", "ensemble_engine_0_0", "cached_fused_0_0"} <= watched
    growing = {key: one for key, one in trends.items() if one.verdict(bound_of(key, one)) == "grows"}
    assert not growing
    assert sum(seen.outcomes.values()) > 100
    assert seen.outcomes["answered"] > 50
    assert seen.outcomes["image error"] > 10
    assert not {"server error", "a good image was refused", "a bad image was answered"} & set(seen.outcomes)
    assert not list(temporary.glob("visionfast-serve-*"))


LEAKS = {
    "rss_bytes": "LEFT.append(np.ones(1 << 20, np.uint8))",
    "threads": "import threading; threading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
    "descriptors": "LEFT.append(open('/dev/null'))",
}


@pytest.mark.parametrize("figure", FIGURES)
def test_a_planted_leak_grows(figure: str, tmp_path: Path, temporary: Path) -> None:
    """In a stage of the real server, a little with every request."""
    leaking = MODEL.replace("        answers = []\n", f"        answers = []\n        {LEAKS[figure]}\n")
    model = leaking.replace("HERE =", "LEFT = []\nHERE =")
    series = {one: Series() for one in FIGURES}
    with Server(write_pipeline(tmp_path / "p", model=model), http=0, grpc=0, metrics=0) as server:
        (stage,) = server.stages
        began = time.monotonic()
        for _ in range(60):
            ask(server.http_url, 0, 1)
            told = read_process(stage.pid)
            assert told is not None
            for one in FIGURES:
                series[one].add(time.monotonic() - began, told[one])
    seen = trend(series[figure], warm_up_s=0)
    assert seen is not None
    assert seen.verdict(bound_of(("tiny_0", figure), seen)) == "grows"
