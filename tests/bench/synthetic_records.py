"""Records that nobody measured: what is in them is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from visionfast.bench.records import Input, Record, Samples, Scenario, System

__all__ = ["STAGES", "record_of", "samples_of_ms", "steps_record"]

STAGES = ("decode", "preprocess", "engine", "postprocess")


def samples_of_ms(
    latency_ms: Sequence[Sequence[float]], stage_ms: Mapping[str, float] | None = None, failed: Sequence[int] = ()
) -> Samples:
    """Latencies of R rounds, K images in each; every request has the same stages."""
    rounds, images = len(latency_ms), len(latency_ms[0])
    n = rounds * images
    due_ns = np.arange(n, dtype=np.int64) * 10**10
    latency_ns = (np.array(latency_ms, np.float64).ravel() * 1e6).astype(np.int64)
    return Samples(
        round=np.repeat(np.arange(rounds), images),
        input=np.tile(np.arange(images), rounds),
        due_ns=due_ns,
        begun_ns=due_ns.copy(),
        done_ns=due_ns + latency_ns,
        stage_ns={stage: np.full(n, int(ms * 1e6), np.int64) for stage, ms in (stage_ms or {}).items()},
        failed=np.isin(np.arange(n), failed),
    )


def record_of(
    systems: Sequence[System],
    samples: Mapping[tuple[str, Scenario], Samples],
    *,
    images: Sequence[str] = ("bus.jpg", "zidane.jpg"),
    others: float | None = 0.01,
) -> Record:
    inputs = tuple(Input(name, b"", "0" * 64, (1080, 810), "jpeg", 137_419) for name in images)
    environment = {"cpu": "a processor", "cpus": "2", "gpu": "none"}
    return Record(1, "2026-11-30T17:00:00+00:00", {}, environment, tuple(systems), inputs, samples, others, {})


def steps_record(p50_ms: Sequence[float], *, rounds: int = 12, seed: int = 0, noise: float = 0.02) -> Record:
    """A waterfall whose steps take about so long, on two images of which the second takes twice as long."""
    random = np.random.default_rng(seed)
    systems, samples = [], {}
    for place, ms in enumerate(p50_ms):
        system = System(f"step-{place}", f"change {place}", "step", {"step": str(place), "about": f"about {place}"})
        factors = random.lognormal(0, noise, (rounds, 2)) * [2 / 3, 4 / 3]
        systems.append(system)
        samples[system.key, "single-stream"] = samples_of_ms((ms * factors).tolist())
    return record_of(systems, samples)
