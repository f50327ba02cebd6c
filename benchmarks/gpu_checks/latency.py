"""From the bytes of pictures to boxes: visionfast beside what people write, and where the time goes."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gpu_checks.machine import MarkedDevice, MarkedEngine
from gpu_checks.rows import Row, absent, judged, timed
from gpu_checks.subjects import Context, Picture, has
from visionfast.errors import VisionfastError
from visionfast.families import LoadedModel
from visionfast.preprocess.reference import letterbox, normalise

__all__ = ["check_dali", "check_latency", "check_waterfall"]

LATENCY_GOAL_NS = 2.5e6  # P50, yolov8s, a 1080p JPEG
NAIVE_GOAL = 10.0


def check_latency(context: Context) -> Iterator[Row]:
    """In turns: each round takes every contestant once in a new random order, untimed and then timed."""
    subjects, scale = context.subjects, context.scale
    pictures = [p for p in subjects.pictures() if p.name != "zidane.jpg"]
    todo = [(n, b, p) for n in reversed(scale.networks) for b in scale.batches for p in pictures]
    for index, (network, batch, picture) in enumerate(todo):
        title = f"yolov8{network} batch {batch} {picture.name}"
        share = context.until.left() / (len(todo) - index)
        if share < 0.2:
            yield Row("latency", title, "not run", detail="out of time")
            continue
        yield from _compared(context, network, batch, picture, context.until.within(share))


def _compared(context: Context, network: str, batch: int, picture: Picture, until: Any) -> Iterator[Row]:
    subjects, machine = context.subjects, context.machine
    model, one = subjects.model(network, "detect", batch), subjects.model(network)
    title = f"yolov8{network} b{batch} {picture.name}"
    with contextlib.ExitStack() as opened:
        detector = opened.enter_context(subjects.open(model))
        images = [picture.source] * batch
        contestants: dict[str, Callable[[], Any]] = {"visionfast": lambda: detector(images)}
        if not machine.is_rehearsal and not has("nvidia.dali") and isinstance(picture.source, bytes):
            try:
                on_gpu = opened.enter_context(subjects.open(model, decoder="dali"))
                contestants["visionfast, DALI"] = lambda: on_gpu(images)
            except VisionfastError as error:
                yield Row("latency", f"{title}: visionfast, DALI", "failed", detail=str(error))
        missing = has("PIL", "torchvision") or ("" if isinstance(picture.source, bytes) else "no JPEG encoder is here")
        if missing:
            yield absent("latency", f"{title}: naive PyTorch", missing)
        else:
            contestants |= _rivals(context, one, machine, images)
        samples = _interleaved(contestants, context.scale.rounds, until, context.seed)
    best = "visionfast, DALI" if "visionfast, DALI" in samples else "visionfast"
    ours = samples[best]
    is_goal = network == "s" and batch == 1 and context.scale.frame_hw == (1080, 1920) and "1080" in picture.name
    decode = "CPU decode" if isinstance(picture.source, bytes) else "raw pixels, nothing decoded"
    goal = LATENCY_GOAL_NS if is_goal and "synthetic" in picture.name else None
    for name in ("visionfast", "visionfast, DALI"):
        if name in samples:
            decode = "nvJPEG" if "DALI" in name else decode
            how = f"{subjects.origin(model)}, torch backend FP16, {decode}"
            yield timed("latency", f"{title}: {name}", samples[name], goal_ns=goal, detail=how)
    for name in [name for name in samples if not name.startswith("visionfast")]:
        yield timed("latency", f"{title}: {name}", samples[name], detail=f"{len(samples[name])} rounds")
        pairs = np.array(samples[name]) / np.array(ours)
        low, middle, high = np.percentile(pairs, (5, 50, 95))
        naive = name == "naive FP32" and batch == 1
        yield Row(
            "latency",
            f"{title}: {name} / {best}",
            "ok",
            float(middle),
            "×",
            beside=f"{low:.1f} to {high:.1f} ×",
            goal=f"≥ {NAIVE_GOAL:g} ×" if naive else "",
            met=bool(middle >= NAIVE_GOAL) if naive else None,
            detail="within rounds, 5 to 95 %",
        )


def _rivals(context: Context, model: LoadedModel, machine: Any, images: list[Any]) -> dict[str, Callable[[], Any]]:
    """What people write: PIL, torchvision's resize on the CPU, the module run eagerly, torchvision's NMS."""
    from visionfast.bench.baseline import NaivePyTorch

    found: dict[str, Callable[[], Any]] = {}
    where = machine.device().where
    kinds = [("naive FP32", torch.float32)] + ([] if machine.is_rehearsal else [("eager FP16", torch.float16)])
    for name, dtype in kinds:
        naive = NaivePyTorch.of_module(
            model.modules["model"],
            size_hw=model.spec.preprocess.size_hw,
            conf=context.subjects.conf(model),
            max_det=context.scale.max_det,
            device=where,
            dtype=dtype,
        )
        found[name] = lambda naive=naive: naive.many(images)  # type: ignore[misc]
    return found


def _interleaved(contestants: dict[str, Callable[[], Any]], rounds: int, until: Any, seed: int) -> dict[str, list[int]]:
    """Nanoseconds on the host's clock; every call ends with its answer on the host."""
    order, shuffled = list(contestants), random.Random(seed)
    samples: dict[str, list[int]] = {name: [] for name in contestants}
    for name in order:
        contestants[name]()
    for done in range(rounds):
        if done >= 3 and not until.left():
            break
        shuffled.shuffle(order)
        for name in order:
            contestants[name]()
            started = time.perf_counter_ns()
            contestants[name]()
            samples[name].append(time.perf_counter_ns() - started)
    return samples


# ---- stages ------------------------------------------------------------------------------------------------


def check_waterfall(context: Context) -> Iterator[Row]:
    """Stages between CUDA events, launched one by one: the launches' gaps are in them, which a graph does not have."""
    subjects, machine, warm_up = context.subjects, context.machine, context.scale.warm_up
    for batch in context.scale.batches:
        model = subjects.model(context.scale.networks[-1], "detect", batch)
        title = f"{model.spec.architecture} b{batch}"
        if not context.until.left():
            yield Row("stages", title, "not run", detail="out of time")
            continue
        picture = subjects.pictures()[0]
        device = MarkedDevice(machine.device(), machine)
        engine = MarkedEngine(subjects.engine(model, device), device)
        stages: dict[str, list[int]] = {}
        with subjects.open(model, engine=engine, graph=False) as detector:
            for turn in range(warm_up + max(1, context.scale.repeats // 4)):
                device.marks.clear()
                answers = detector([picture.source] * batch)
                if turn >= warm_up:
                    for name, spent in _stages(machine, device.marks, answers, batch).items():
                        stages.setdefault(name, []).append(spent)
                if turn > warm_up and not context.until.left():
                    break
        for name, spent_ns in stages.items():
            yield timed("stages", f"{title}: {name}", spent_ns, detail=f"{picture.name}, a batch, {_CLOCKS[name]}")


_CLOCKS = {
    "decode": "host's clock",
    "upload": "CUDA events",
    "letterbox": "CUDA events",
    "engine": "CUDA events",
    "post": "CUDA events",
    "read": "CUDA events",
    "answer": "host's clock",
}


def _stages(machine: Any, marks: list[tuple[str, Any, Any]], answers: list[Any], batch: int) -> dict[str, int]:
    """Copies before the engine are the frames, one each, then the placement; copies after it are the answer."""
    at = next(i for i, (kind, _, _) in enumerate(marks) if kind == "engine")
    before, (_, begins, ends), after = marks[:at], marks[at], marks[at + 1 :]
    frames = before[:batch]
    following = [mark[1] for mark in before[1 : batch + 1]] + [begins]
    return {
        "decode": sum(a.stage_ns.get("decode", 0) for a in answers),
        "upload": sum(machine.between_ns(a, b) for _, a, b in frames),
        "letterbox": sum(machine.between_ns(f[2], n) for f, n in zip(frames, following, strict=False)),
        "engine": machine.between_ns(begins, ends),
        "post": machine.between_ns(ends, after[0][1]),
        "read": machine.between_ns(after[0][1], after[-1][2]),
        "answer": sum(a.stage_ns.get("postprocess", 0) for a in answers),
    }


# ---- DALI --------------------------------------------------------------------------------------------------


def check_dali(context: Context) -> Iterator[Row]:
    """JPEG → the engine's tensor on the GPU through DALI (`mixed`): near the definition, and how long it takes."""
    reason = has("nvidia.dali") or ("a rehearsal has no nvJPEG" if context.machine.is_rehearsal else "")
    pictures = [p for p in context.subjects.pictures() if isinstance(p.source, bytes)]
    if reason or not pictures:
        yield absent("dali", "DALI, decode to tensor", reason or "nothing here encodes a JPEG")
        return
    from visionfast.preprocess.dali import DaliPreprocessor, DaliRow
    from visionfast.types import PreprocessSpec

    spec, device = PreprocessSpec(context.scale.size_hw), context.machine.device()
    for batch in context.scale.batches:
        with DaliPreprocessor(spec, batch=batch, device="mixed", dtype="float16", stream=device.stream) as dali:
            for picture in pictures:
                images: Any = [picture.source] * batch
                answers = dali.run(images).answers
                rows = [answer for answer in answers if isinstance(answer, DaliRow)]
                name = f"DALI b{batch} {picture.name}"
                if len(rows) != batch:
                    yield Row("dali", name, "failed", detail=f"{len(rows)} rows for {batch} images: {answers[0]}")
                    continue
                canvas, _ = letterbox(picture.pixels, spec)
                expected = normalise(canvas, spec) * 255
                with device.current():
                    got = torch.utils.dlpack.from_dlpack(rows[-1].run.tensor)[rows[-1].row].float().cpu().numpy() * 255
                off = np.abs(got - expected)
                # nvJPEG's inverse DCT and chroma are not libjpeg-turbo's to the bit: a few levels at edges.
                right = float(off.mean()) < 1.5 and float(np.percentile(off, 99.9)) < 24
                detail = f"levels off: mean {off.mean():.2f}, 99.9 % within {np.percentile(off, 99.9):.0f}"
                yield judged("dali", name, right, detail)
                samples = []
                for _ in range(context.scale.repeats):
                    started = time.perf_counter_ns()
                    dali.run(images)
                    device.synchronize()
                    samples.append(time.perf_counter_ns() - started)
                    if not context.until.left():
                        break
                yield timed("dali", f"{name}: decode to tensor", samples, detail="host's clock, one synchronisation")
