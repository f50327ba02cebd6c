"""What a server did between two looks at its metrics, model by model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from visionfast.errors import ServerError
from visionfast.serving.quantiles import histogram_quantile
from visionfast.serving.scrape import Scrape

__all__ = ["PERCENTILES", "Activity", "ModelActivity", "StageActivity", "activity_between"]

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class StageActivity:
    """One stage of a pipeline, or the line in front of one.

    Attributes:
        count: of images that went through it in the interval; of requests, for a line.
        percentile_ms: percentile → milliseconds for each, out of the histogram's buckets; NaN where there were none.
    """

    count: float
    percentile_ms: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class ModelActivity:
    """A model that clients may ask for, with the steps that it is made of.

    Attributes:
        requests_per_s: that Triton counts as answered, from the cache too.
        images_per_s: answered, and computed for it.
        errors_per_s: kind → images and requests that could not be answered, only those that there were. `rejected`
            are those that Triton's own queue refused, because too many waited, or that waited too long.
        cached_per_s: requests that the response cache answered.
        queue_ms: that a request waited for its turn, on average, at all steps together, in Triton's queues and in
            ours; NaN where there was none.
        waiting: requests that wait now.
        queues: step → the line in front of it.
        stages: its name → what it did, in the order in which an image meets them.
    """

    requests_per_s: float
    images_per_s: float
    errors_per_s: Mapping[str, float]
    cached_per_s: float
    queue_ms: float
    waiting: int
    queues: Mapping[str, StageActivity]
    stages: Mapping[str, StageActivity]


@dataclass(frozen=True, slots=True)
class Activity:
    """A server's.

    Attributes:
        interval_s: between the two looks.
        models: by name.
        cpu: share of the machine's processors that is busy, 0 to 1; None where the server does not say.
        memory_bytes: of the machine, in use; None where the server does not say.
        memory_total_bytes: of the machine.
    """

    interval_s: float
    models: Mapping[str, ModelActivity]
    cpu: float | None
    memory_bytes: float | None
    memory_total_bytes: float | None


_ORDER = ("hash", "decode", "preprocess", "encoder", "engine", "decoder", "postprocess")


def activity_between(before: Scrape, after: Scrape) -> Activity:
    """What happened between two scrapes of one server. A server that was started again meanwhile begins at 0.

    Raises:
        ServerError: they are another program's metrics.
    """
    if not any(name.startswith(("nv_", "visionfast_")) for name in after.samples):
        raise ServerError("expected a Triton server's metrics, got another program's; `visionfast serve` says its URL")
    if after.total("nv_inference_request_success") < before.total("nv_inference_request_success"):
        before = Scrape(before.taken_s, {})
    interval_s = after.taken_s - before.taken_s
    assert interval_s > 0, "the second is taken after the first"
    steps = _steps(after)
    try:
        models = {model: _model(before, after, model, (model, *steps[model]), interval_s) for model in sorted(steps)}
    except (LookupError, ValueError, OverflowError) as error:  # a label that is not there, a number that is none
        raise ServerError(f"expected a Triton server's metrics, got others of the same names ({error!r})") from error
    return Activity(
        interval_s,
        models,
        _gauge(after, "nv_cpu_utilization"),
        _gauge(after, "nv_cpu_memory_used_bytes"),
        _gauge(after, "nv_cpu_memory_total_bytes"),
    )


def _steps(scrape: Scrape) -> dict[str, list[str]]:
    """Model → the models of its steps. A step is named for its pipeline, whose figures say that it is one."""
    there = {labels["model"] for labels, _ in scrape.of("nv_inference_request_success") if "model" in labels}
    pipelines = {labels["model"] for labels, _ in scrape.of("visionfast_images_total") if "model" in labels}
    steps: dict[str, list[str]] = {model: [] for model in there | pipelines}
    for model in sorted(there - pipelines):
        whole = [one for one in pipelines if re.fullmatch(f"{re.escape(one)}_[a-z]+", model)]
        if whole:
            steps[max(whole, key=len)].append(model)
            del steps[model]
    return steps


def _model(before: Scrape, after: Scrape, model: str, parts: Sequence[str], interval_s: float) -> ModelActivity:
    def rise(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    kinds = {labels["kind"] for labels, _ in after.of("visionfast_errors_total", model=model)}
    errors = {kind: rise("visionfast_errors_total", model=model, kind=kind) for kind in sorted(kinds)}
    errors["rejected"] = sum(rise("nv_inference_request_failure", model=part, reason="REJECTED") for part in parts)
    requests = rise("nv_inference_request_success", model=model)
    queue_s = rise("visionfast_queue_duration_seconds_sum", model=model)
    queue_us = sum(rise("nv_inference_queue_duration_us", model=part) for part in parts)
    steps = {labels["step"] for labels, _ in after.of("visionfast_queue_duration_seconds_count", model=model)}
    stages = {labels["stage"] for labels, _ in after.of("visionfast_stage_duration_seconds_count", model=model)}
    return ModelActivity(
        requests_per_s=requests / interval_s,
        images_per_s=rise("visionfast_images_total", model=model) / interval_s,
        errors_per_s={kind: count / interval_s for kind, count in errors.items() if count},
        cached_per_s=rise("nv_cache_num_hits_per_model", model=model) / interval_s,
        queue_ms=(queue_us / 1e3 + queue_s * 1e3) / requests if requests else math.nan,
        waiting=round(
            after.total("visionfast_waiting_requests", model=model)
            + sum(after.total("nv_inference_pending_request_count", model=part) for part in parts)
        ),
        queues={
            step: _histogram(before, after, "visionfast_queue_duration_seconds", model=model, step=step)
            for step in sorted(steps, key=_place)
        },
        stages={
            stage: _histogram(before, after, "visionfast_stage_duration_seconds", model=model, stage=stage)
            for stage in sorted(stages, key=_place)
        },
    )


def _place(stage: str) -> tuple[int, str]:
    return (_ORDER.index(stage) if stage in _ORDER else len(_ORDER), stage)


def _histogram(before: Scrape, after: Scrape, name: str, **labels: str) -> StageActivity:
    counts: dict[float, float] = {}
    for scrape, sign in ((after, 1), (before, -1)):
        for own, value in scrape.of(f"{name}_bucket", **labels):
            # Those of several versions are added up.
            end = float(own["le"])
            counts[end] = counts.get(end, 0.0) + sign * value
    upper = sorted(counts)
    cumulative = np.array([counts[end] for end in upper])
    found = histogram_quantile(np.array(PERCENTILES) / 100, upper, cumulative)
    return StageActivity(
        float(cumulative[-1]) if len(cumulative) else 0.0,
        {percentile: float(value) * 1e3 for percentile, value in zip(PERCENTILES, found, strict=True)},
    )


def _gauge(scrape: Scrape, name: str) -> float | None:
    found = [value for _, value in scrape.of(name)]
    return found[0] if found else None
