"""Prompts on a GPU: masks beside their definition, a session beside the host's, and what a click costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_checks.kernel_times import timed_with_kernels
from gpu_checks.prompt_network import seeded_prompts
from gpu_checks.rows import Deadline, Row, absent, in_words, judged, timed
from gpu_checks.subjects import Context, has
from visionfast.postprocess.enlarge import Resize, enlarge_reference
from visionfast.preprocess.antialias import geometry
from visionfast.types import ModelSpec, PreprocessSpec, PromptTensors

__all__ = ["check_prompt_kernels", "check_prompt_session", "check_prompt_times"]

# A pixel may fall on either side where its logit is this near to a threshold, relative to the sum of its taps'
# |weight × logit|: float32 rounds at 6e-8 of that, a few times for each tap.
ROUNDING = 5e-7
_FULL, _TINY = (1024, 256), (64, 16)  # input side and width of the network


def _missing() -> str:
    return has("triton") or has("pycocotools") or has("cv2") or has("PIL")


def _sizes(context: Context) -> tuple[int, int]:
    return _TINY if context.machine.is_rehearsal else _FULL


# ---- the kernels -------------------------------------------------------------------------------------------


def check_prompt_kernels(context: Context) -> Iterator[Row]:
    """Packed masks and counted pixels: the definition's but for those within rounding of the threshold."""
    if missing := _missing():
        yield absent("prompt kernels", "kernels", missing)
        return
    rng = np.random.default_rng(context.seed + 3)
    side = _sizes(context)[0]
    cases: list[tuple[str, tuple[int, int], Resize, str]] = [
        ("frame", context.scale.frame_hw, "longest-side", "float16"),
        ("frame", context.scale.frame_hw, "longest-side", "float32"),
        ("frame", context.scale.frame_hw, "stretch", "float16"),
        ("odd sides", (37, 133), "longest-side", "float32"),
        ("one row", (1, 77), "stretch", "float32"),
        ("smaller than its logits", (5, 9), "longest-side", "float32"),
        ("not finite", (31, 60), "longest-side", "float16"),
    ]
    for name, image_hw, resize, dtype in cases:
        title = f"masks: {name}, {dtype} logits, {resize}"
        if not context.until.left():
            yield Row("prompt kernels", title, "not run", detail="out of time")
            continue
        planes = rng.normal(0, 2, (6, side // 4, side // 4)).astype(dtype)
        if name == "not finite":
            planes.reshape(-1)[rng.integers(0, planes.size, 20)] = rng.choice([np.nan, np.inf, -np.inf], 20)
        detail, right = _compare(context, planes, image_hw, resize)
        yield judged("prompt kernels", title, right, detail)


def _compare(context: Context, planes: npt.NDArray[Any], image_hw: tuple[int, int], resize: Resize) -> tuple[str, bool]:
    from visionfast.postprocess.device_masks import DeviceMasks
    from visionfast.stream import Turns

    device, side = context.machine.device(), _sizes(context)[0]
    placed = geometry(image_hw, PreprocessSpec((side, side), resize, "bilinear-antialias", None))
    reader = DeviceMasks(
        Turns(device),
        plane_hw=planes.shape[1:],  # type: ignore[arg-type]
        dtype=planes.dtype.name,
        resize=resize,
        capacity_words=1 << 17,  # so that those of a frame take several rounds
    )
    with device.current():
        logits = torch.from_numpy(planes).to(device.where)
    chosen, delta = np.array([4, 0, 4], np.int64), 1.0
    got = reader.masks(logits, chosen, placed).dense()
    counts = reader.counts(logits, chosen, delta, placed)
    again = reader.counts(logits, chosen, delta, placed)
    with np.errstate(invalid="ignore"):
        picked = planes[chosen].astype(np.float32)
        enlarged = enlarge_reference(picked, placed, resize)
        slack = ROUNDING * enlarge_reference(np.abs(picked), placed, resize)
    differ = got != (enlarged > 0)
    beyond = int((differ & (np.abs(enlarged) > slack)).sum())
    miscounted = 0
    for column, threshold in enumerate((delta, -delta)):
        near = (np.abs(enlarged - np.float32(threshold)) <= slack).sum((1, 2))
        exact = (enlarged > np.float32(threshold)).sum((1, 2))
        miscounted += int((np.abs(counts[:, column] - exact) > near).sum())
    detail = f"{int(got.sum())} pixels; {int(differ.sum())} differ within rounding, {beyond} beyond; "
    detail += f"{miscounted} of {counts.size} counts wrong" + (
        "" if np.array_equal(counts, again) else ", not repeatable"
    )
    return detail, beyond == 0 and miscounted == 0 and np.array_equal(counts, again)


# ---- the session -------------------------------------------------------------------------------------------


def _open(context: Context, precision: str) -> tuple[ModelSpec, Any, Any]:
    """A session of the seeded network; its device too."""
    from visionfast.backends.torch import TorchEngine
    from visionfast.sessions.prompts_cuda import CudaPromptSession

    device = context.machine.device()
    spec, modules = seeded_prompts(*_sizes(context), precision)
    with device.current():
        engines = [TorchEngine(modules[g.name].to(device.where), g, device) for g in spec.graphs]
    return spec, CudaPromptSession(spec, *engines), device


def _host(context: Context) -> Any:
    from visionfast.backends.torch import TorchRunner
    from visionfast.sessions.prompts_host import HostPromptSession

    spec, modules = seeded_prompts(*_sizes(context), "float32")
    return HostPromptSession(spec, *(TorchRunner(modules[g.name], g) for g in spec.graphs))


def _clicks(rng: np.random.Generator, side: int, prompts: int, points: int, mask: bool = False) -> PromptTensors:
    at = rng.uniform(0, side, (prompts, points, 2)).astype(np.float32)
    plane = (prompts, 1, side // 4, side // 4)
    given = rng.normal(0, 5, plane).astype(np.float32) if mask else None
    return PromptTensors(at, rng.integers(-1, 4, (prompts, points)).astype(np.float32), given)


def check_prompt_session(context: Context) -> Iterator[Row]:
    """FP32 on the device beside FP32 on the host; what a click asks of the driver; and many threads at one session."""
    if missing := _missing():
        yield absent("prompt session", "sessions", missing)
        return
    side = _sizes(context)[0]
    rng = np.random.default_rng(context.seed + 4)
    picture = context.subjects.pictures()[0].pixels
    spec, session, device = _open(context, "float32")
    host = _host(context)
    placed = geometry(picture.shape[:2], spec.preprocess)
    features, expected_features = session.encode(picture), host.encode(picture)
    asked = [_clicks(rng, side, 1, 2), _clicks(rng, side, 3, 1, mask=True), _clicks(rng, side, 2, 7)]
    worst, wrong, pixels = 0.0, 0, 0
    for prompts in asked:
        got, expected = session.decode(features, prompts), host.decode(expected_features, prompts)
        chosen = np.arange(len(prompts), dtype=np.int64) * 4
        logits, expected_logits = got.logits(chosen), expected.logits(chosen)
        scale = float(np.abs(expected_logits).max())
        worst = max(worst, float(np.abs(logits - expected_logits).max()) / scale)
        worst = max(worst, float(np.abs(got.scores - expected.scores).max()))
        masks, at = got.masks(chosen, placed).dense(), enlarge_reference(logits, placed, "longest-side")
        wrong += int(((masks != (at > 0)) & (np.abs(at) > 1e-5 * scale)).sum())
        pixels += masks.size
    detail = f"logits and scores within {worst:.2g} of their scale; {wrong} of {pixels} mask pixels wrong"
    yield judged("prompt session", f"FP32 = the host's, {len(asked)} sizes", worst < 1e-3 and not wrong, detail)
    yield from _frugality(context, session, device, features, _clicks(rng, side, 1, 2), placed)
    session.close()
    yield _threads(context)


def _frugality(
    context: Context, session: Any, device: Any, features: Any, click: PromptTensors, placed: Any
) -> Iterator[Row]:
    """One wait for the decoder and one for the mask; no memory of the driver's, but what torch keeps for answers."""
    one = np.zeros(1, np.int64)

    def request() -> None:
        session.decode(features, click).masks(one, placed)

    for _ in range(context.scale.warm_up):
        request()
    calls = context.machine.calls(device, request, repeats=context.scale.requests)
    if calls is None:
        yield absent("prompt session", "driver calls", "the profiler shows no CUDA calls")
        return
    waits, allocations = calls.synchronisations / calls.requests, calls.allocations / calls.requests
    shown = ", ".join(f"{k} {n / calls.requests:g}" for k, n in sorted(calls.names.items(), key=lambda i: -i[1])[:6])
    yield judged("prompt session", "synchronisations", waits == 2, shown, figure=waits, unit="a click")
    # The stand-in has no allocator between it and the driver: there the answer's own memory is counted.
    expected = 1 if context.machine.is_rehearsal else 0
    yield judged("prompt session", "driver allocations", allocations == expected, figure=allocations, unit="a click")


def _threads(context: Context) -> Row:
    """Threads that share one session, each with pictures and prompts of its own; every answer is compared."""
    side, threads = _sizes(context)[0], context.scale.threads
    rng = np.random.default_rng(context.seed + 5)
    spec, session, _ = _open(context, "float16")
    pictures = [rng.integers(0, 256, (60 + 7 * i, 80, 3), np.uint8) for i in range(threads)]
    placed = [geometry(p.shape[:2], spec.preprocess) for p in pictures]
    clicks = [_clicks(rng, side, 1 + i % 3, 1 + i % 5, mask=i % 2 == 1) for i in range(threads)]
    one = np.zeros(1, np.int64)

    def answer(i: int, features: Any) -> tuple[Any, Any]:
        decoded = session.decode(features, clicks[i])
        return decoded.scores, decoded.masks(one, placed[i])

    features = [session.encode(p) for p in pictures]
    expected = [answer(i, f) for i, f in enumerate(features)]
    stop = Deadline(min(context.scale.thread_seconds, 0.5 * context.until.left()))
    totals, wrongs, faults = [0] * threads, [0] * threads, [""] * threads

    def ask(i: int) -> None:
        try:
            while stop.left() or not totals[i]:
                fresh = session.encode(pictures[i]) if totals[i] % 4 == 0 else features[i]
                scores, masks = answer(i, fresh)
                wrongs[i] += not (np.array_equal(scores, expected[i][0]) and masks == expected[i][1])
                totals[i] += 1
        except Exception as error:
            faults[i] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    workers = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(stop.left() + 60)
    ended = not any(worker.is_alive() for worker in workers)
    if ended:
        session.close()
    fault = next((f for f in faults if f), "" if ended else "a thread did not end")
    detail = fault or f"{sum(totals)} clicks, {sum(wrongs)} wrong"
    right = not fault and not sum(wrongs)
    return judged("prompt session", f"{threads} threads, one session", right, detail, figure=float(sum(totals)))


# ---- what it costs -----------------------------------------------------------------------------------------


def check_prompt_times(context: Context) -> Iterator[Row]:
    """Kernels from a graph with a cold L2 cache; a click from the call to its run lengths on the host."""
    if missing := _missing():
        yield absent("prompt times", "kernels", missing)
        return
    yield from _kernel_times(context)
    yield from _click_times(context)


def _kernel_times(context: Context) -> Iterator[Row]:
    from visionfast.postprocess.enlarge import enlarge_taps
    from visionfast.postprocess.kernels.enlarge import TAP_ROWS, EnlargeKernels, TapTable, write_taps

    rng, device, side = np.random.default_rng(context.seed), context.machine.device(), _sizes(context)[0]
    image_hw, plane = context.scale.frame_hw, side // 4
    words_of_one = image_hw[1] * -(-image_hw[0] // 32)
    placed = geometry(image_hw, PreprocessSpec((side, side), "longest-side", "bilinear-antialias", None))
    table = np.zeros((TAP_ROWS, sum(image_hw)), np.int32)
    used = write_taps(*enlarge_taps((plane, plane), placed, "longest-side"), table)
    most = 2 if context.machine.is_rehearsal else 192  # three masks for each of 64 points: everything mode's
    with device.current():
        logits = torch.from_numpy(rng.normal(0, 2, (most, plane, plane)).astype(np.float16)).to(device.where)
        kernels = EnlargeKernels(
            plane_hw=(plane, plane), capacity_words=8 * words_of_one, most_masks=most, device=device.where
        )
        taps = TapTable(torch.from_numpy(table).to(device.where), image_hw, used)
        numbers = torch.arange(most, dtype=torch.int32, device=device.where)
    device.synchronize()
    frame = f"{image_hw[1]}×{image_hw[0]}"
    for count in sorted({1, min(8, most)}):
        chosen = numbers[:count]
        yield from timed_with_kernels(
            context,
            device,
            f"pack {count} mask{'s' if count > 1 else ''}, {frame}",
            lambda chosen=chosen: kernels.pack(logits, chosen, taps),  # type: ignore[misc]
            check="prompt times",
            moved_bytes=count * (logits[0].nbytes + 4 * words_of_one),
            detail="FP16 logits",
        )
    yield from timed_with_kernels(
        context,
        device,
        f"stability of {most} masks, {frame}",
        lambda: kernels.count(logits, numbers, taps, delta=1.0),
        check="prompt times",
        moved_bytes=logits.nbytes,
        detail="FP16 logits, two thresholds",
    )


def _click_times(context: Context) -> Iterator[Row]:
    from time import perf_counter_ns

    side, rng = _sizes(context)[0], np.random.default_rng(context.seed + 6)
    picture = context.subjects.pictures()[0].pixels
    spec, session, _ = _open(context, "float16")
    placed = geometry(picture.shape[:2], spec.preprocess)
    features = session.encode(picture)
    one, many = _clicks(rng, side, 1, 2), _clicks(rng, side, session.prompts, 2)
    first = np.zeros(1, np.int64)
    stages: dict[str, list[int]] = {"decode": [], "masks": [], "many": []}
    for turn in range(context.scale.warm_up + context.scale.rounds):
        if turn and not context.until.left():
            break
        started = perf_counter_ns()
        decoded = session.decode(features, one)
        answered = perf_counter_ns()
        decoded.masks(first, placed)
        read = perf_counter_ns()
        session.decode(features, many)
        done = perf_counter_ns()
        if turn >= min(context.scale.warm_up, 1):
            for name, spent in zip(stages, (answered - started, read - answered, done - read), strict=True):
                stages[name].append(spent)
    session.close()
    frame = f"{picture.shape[1]}×{picture.shape[0]}"
    each = in_words(float(np.median(stages["many"])) / session.prompts) if stages["many"] else ""
    network = "seeded stand-in of SAM's decoder, FP16, torch backend"
    yield timed("prompt times", "one click, decoder", stages["decode"], detail=network)
    yield timed("prompt times", f"one click, mask {frame}", stages["masks"], detail="to run lengths on the host")
    yield timed(
        "prompt times", f"{session.prompts} prompts, decoder", stages["many"], beside=f"{each} each", detail=network
    )
