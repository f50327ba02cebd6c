"""Records as a machine with moods would leave them, made of random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from visionfast.bench.records import Input, Record, Samples, Scenario, System

__all__ = ["STAGES_NS", "synthetic"]

STAGES_NS = {"decode": 4e6, "preprocess": 1e6, "engine": 36e6, "postprocess": 0.8e6}
DETAILS = {
    "weights_sha256": "ab" * 32,
    "engine_sha256": "cd" * 32,
    "backend": "openvino",
    "precision": "fp32",
    "device": "cpu",
    "size_hw": "640x640",
    "batch": "1",
    "certificate": "passed",
}
ENVIRONMENT = {"cpu": "a processor", "cpus": "2", "gpu": "none", "system": "Linux x86_64", "openvino": "1"}


def synthetic(
    seed: int,
    *,
    slower: Mapping[str, float] | None = None,
    mood: float = 1.0,
    drift: float = 0.0,
    scenarios: Sequence[Scenario] = ("single-stream",),
    rounds: int = 24,
    inputs: int = 6,
    others: float | None = 0.01,
    control: bool = True,
    tail: float = 0.0,
    details: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Record:
    """One run.

    Args:
        seed: of its noise.
        slower: stage → factor of its time.
        mood: factor of all that the machine does during the run, the control among it.
        drift: standard deviation, over runs, of what touches the system alone.
        scenarios: in which it was asked.
        rounds: of each, each over all `inputs`.
        others: share of the processors that others took.
        control: whether it was measured.
        tail: share of the requests that take twice as long.
        details, environment: that differ.
    """
    random = np.random.default_rng(seed)
    systems = [System("visionfast", "visionfast", "visionfast", DETAILS | dict(details or {}))]
    systems += [System("control", "control", "control")] if control else []
    own = np.exp(drift * random.normal())
    samples: dict[tuple[str, Scenario], Samples] = {}
    for scenario in scenarios:
        moods = _moods(random, rounds) * mood
        n = rounds * inputs
        number = np.repeat(np.arange(rounds), inputs)
        about = np.tile(np.arange(inputs), rounds)
        noise = np.exp(random.normal(0, 0.02, n)) + random.exponential(0.01, n)
        noise *= np.where(random.random(n) < tail, 2.0, 1.0)
        stages = {}
        for stage, usual in STAGES_NS.items():
            sizes = (1 + about) / inputs if stage == "decode" else 1.0
            factor = (slower or {}).get(stage, 1.0) * own
            stages[stage] = (usual * sizes * factor * moods[number] * noise).astype(np.int64)
        samples["visionfast", scenario] = _samples(number, about, stages, scenario)
        if control:
            spent = 8e6 * moods[number] * (np.exp(random.normal(0, 0.03, n)) + random.exponential(0.01, n))
            samples["control", scenario] = _samples(number, about, {"work": spent.astype(np.int64)}, "single-stream")
    return Record(
        version=1,
        created="",
        command={},
        environment=ENVIRONMENT | dict(environment or {}),
        systems=tuple(systems),
        inputs=tuple(Input(f"{i}", b"", f"{i:064x}", (8, 8), "jpeg", 1) for i in range(inputs)),
        samples=samples,
        others_cpu_share=others,
        harness_ns={},
    )


def _moods(random: np.random.Generator, rounds: int) -> Any:
    """(rounds,) around 1, each like the one before it."""
    steps = random.normal(0, 0.02, rounds)
    for i in range(1, rounds):
        steps[i] += 0.6 * steps[i - 1]
    return np.exp(steps)


def _samples(number: Any, about: Any, stages: Mapping[str, Any], scenario: Scenario) -> Samples:
    service = sum(stages.values()) + 20_000
    began = np.cumsum(service) - service
    wait = service // 3 if scenario == "server" else 0 * service
    parallel = {"parallel": 1.0 if scenario == "single-stream" else 2.0}
    settings = parallel | ({"rate_per_s": 25.0, "bound_ms": 200.0} if scenario == "server" else {})
    due = began - wait + int(wait.max())
    began = due + wait
    return Samples(number, about, due, began, began + service, dict(stages), np.zeros(len(number), np.bool_), settings)
