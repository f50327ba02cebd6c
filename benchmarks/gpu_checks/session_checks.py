"""Sessions: right beside eager PyTorch, the same with a graph as without, frugal, and each for one thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gpu_checks.rows import Deadline, Row, absent, in_words, judged, timed
from gpu_checks.subjects import Context, eager_outputs, has
from visionfast.agreement import TOLERANCES, combined, compare_detections, compare_raw, is_within
from visionfast.backends import get_backend
from visionfast.errors import OptionError, SessionBusyError, VisionfastError
from visionfast.families import LoadedModel
from visionfast.results import Detections
from visionfast.types import Task

__all__ = ["check_certificate", "check_frugality", "check_graph", "check_threads"]

GRAPH_GOAL = 1.15
CONF, IOU = 0.25, 0.7  # as `visionfast.certify`


def _same(got: Detections, expected: Detections) -> bool:
    arrays = all(
        np.array_equal(getattr(got, name), getattr(expected, name)) for name in ("xyxy", "confidence", "class_id")
    )
    return arrays and got.image_hw == expected.image_hw and got.mask == expected.mask


def _tasks() -> tuple[Task, ...]:
    return ("detect", "segment") if not has("pycocotools") else ("detect",)


# ---- certificate -------------------------------------------------------------------------------------------


def check_certificate(context: Context) -> Iterator[Row]:
    """FP16 through the session, against eager FP32 on the CPU; measures and bounds are `visionfast.certify`'s."""
    subjects, scale = context.subjects, context.scale
    todo = [(scale.networks[0], task) for task in _tasks()] + [(name, "detect") for name in scale.networks[1:]]
    for network, task in todo:
        model = subjects.model(network, task)
        for backend in ("torch",) if context.machine.is_rehearsal else ("torch", "tensorrt", "tensorrt-rtx"):
            name = f"certificate {subjects.origin(model)}, {backend}"
            if not context.until.left():
                yield Row("certificate", name, "not run", detail="out of time")
            elif reason := _unavailable(backend):
                if (network, task) == todo[0]:
                    yield absent("certificate", backend, reason)
            else:
                try:
                    yield _certificate(context, model, backend, name)
                except VisionfastError as error:
                    yield Row("certificate", name, "failed", detail=str(error))


def _unavailable(name: str) -> str:
    if name == "torch":
        return ""
    backend = get_backend(name)
    state = backend.availability()
    if not (state.can_build and state.can_run):
        return state.reason
    try:
        backend.resolve_device(None)
    except OptionError as error:  # TensorRT-RTX does not know every card
        return str(error)
    return has("onnx")


def _certificate(context: Context, model: LoadedModel, backend: str, name: str) -> Row:
    from visionfast.postprocess.detections import postprocess

    subjects, classes = context.subjects, len(model.spec.class_names)
    slack = TOLERANCES["fp16"]["max_confidence_difference"]
    measured = []
    with subjects.open(model, backend=backend, conf=CONF) as detector:
        for picture in subjects.pictures():
            raw, where = eager_outputs(model, picture.pixels)
            prototypes = raw.get("prototypes")
            expected = postprocess(
                raw["predictions"][0],
                where,
                num_classes=classes,
                conf=CONF,
                iou=IOU,
                max_det=context.scale.max_det,
                prototypes=None if prototypes is None else prototypes[0],
            )
            (got,) = detector([picture.source])
            measures = compare_detections(expected, got, conf=CONF, slack=slack)
            measured.append(measures | compare_raw(raw, detector.raw(), classes))
    total = combined(measured)
    outside = [k for k, bound in TOLERANCES["fp16"].items() if k in total and not is_within(k, total[k], bound)]
    keys = ("objects", "unmatched", "min_iou", "min_mask_iou", "max_score_difference", "max_box_difference_px")
    words = ", ".join(f"{key.replace('_', ' ')} {total[key]:.3g}" for key in keys if key in total)
    if outside:
        words = f"out of bounds: {', '.join(outside)}; {words}"
    return judged("certificate", name, not outside, words)


# ---- graph -------------------------------------------------------------------------------------------------


def check_graph(context: Context) -> Iterator[Row]:
    """One CUDA graph and launches one by one give the same bits; and what the graph adds to the bare engine."""
    subjects, scale = context.subjects, context.scale
    sources = [picture.source for picture in subjects.pictures()]
    for task in _tasks():
        model = subjects.model(scale.networks[0], task)
        name = f"graph = eager launches, {subjects.origin(model)}"
        with subjects.open(model, graph=True) as replayed, subjects.open(model, graph=False) as launched:
            wrong, objects = "", 0
            for source in (*sources, sources[0]):
                (got,), (expected,) = replayed([source]), launched([source])
                raw, raw_expected = replayed.raw(), launched.raw()
                objects += len(expected)
                different = [k for k in raw if not np.array_equal(raw[k], raw_expected[k], equal_nan=True)]
                if different:
                    wrong = wrong or f"the engine's {different[0]} differs"
                elif not _same(got, expected):
                    wrong = wrong or "the answers differ"
        yield judged("graph", name, not wrong, wrong or f"{objects} objects, equal to the bit")

    for network in scale.networks:
        if not context.until.left():
            yield Row("graph", f"yolov8{network} engine + post", "not run", detail="out of time")
            continue
        yield from _graph_beside_engine(context, subjects.model(network))


def _graph_beside_engine(context: Context, model: LoadedModel) -> Iterator[Row]:
    from gpu_checks.kernel_results import on_device, placed
    from visionfast.postprocess.on_device import DevicePostprocess
    from visionfast.preprocess.reference import letterbox, normalise

    subjects, scale, machine = context.subjects, context.scale, context.machine
    device = machine.device()
    engine = subjects.engine(model, device)
    canvas, where = letterbox(subjects.pictures()[0].pixels, model.spec.preprocess)
    tensor = normalise(canvas, model.spec.preprocess, engine.inputs[0].dtype)[None]
    options: dict[str, Any] = {
        "num_classes": len(model.spec.class_names),
        "conf": subjects.conf(model),
        "iou": IOU,
        "max_det": scale.max_det,
        "classes": None,
        "class_agnostic": False,
    }
    with device.current():
        tensors = {spec.name: device.empty(spec.shape, spec.dtype) for spec in (*engine.inputs, *engine.outputs)}
        tensors[engine.inputs[0].name].copy_(on_device(device, tensor))
        engine.bind(tensors)
        post = DevicePostprocess(model.spec, engine.outputs, device, options=options)
        at = on_device(device, placed([where]))
    device.synchronize()

    def whole() -> None:
        engine.enqueue()
        post.enqueue(tensors, at)

    name, repeats = model.spec.architecture, scale.repeats
    bare = machine.time(device, engine.enqueue, repeats=repeats, until=Deadline(context.until.left() / 3))
    both = machine.time(device, whole, repeats=repeats, until=Deadline(context.until.left() / 2))
    engine.close()
    yield timed("graph", f"{name} FP16, the bare engine, batch 1", bare, detail="torch backend, one graph")
    yield timed("graph", f"{name} FP16, engine + post, batch 1", both, detail="one graph, with its copies to the host")
    if bare and both:
        ratio = float(np.median(both) / np.median(bare))
        yield Row(
            "graph",
            f"{name}, engine + post / bare engine",
            "ok",
            ratio,
            "×",
            beside=f"{in_words(float(np.median(both) - np.median(bare)))} more",
            goal=f"≤ {GRAPH_GOAL:g}",
            met=ratio <= GRAPH_GOAL,
            detail="of medians",
        )


# ---- what a request asks of the driver ---------------------------------------------------------------------


def check_frugality(context: Context) -> Iterator[Row]:
    """No allocation and one synchronisation a request, once the buffers have grown to the pictures."""
    subjects, scale, machine = context.subjects, context.scale, context.machine
    repeats = scale.requests
    todo: list[tuple[Task, int]] = [(task, 1) for task in _tasks()] + [("detect", scale.batches[-1])]
    for task, batch in todo:
        if not context.until.left():
            yield Row("requests", f"{task}, batch {batch}", "not run", detail="out of time")
            continue
        model = subjects.model(scale.networks[0], task, batch)
        device = machine.device()
        conf = _conf_of_one_round(context, model) if task == "segment" else None
        with subjects.open(model, device=device, graph=True, conf=conf) as detector:
            images = [subjects.pictures()[0].source] * batch

            def request(detector: Any = detector, images: Any = images) -> None:
                detector(images)

            for _ in range(scale.warm_up):
                request()
            before = machine.allocations()
            for _ in range(repeats):
                request()
            after = machine.allocations()
            calls = machine.calls(device, request, repeats=repeats)
        name = f"{subjects.origin(model)}, batch {batch}"
        if before is not None and after is not None:
            detail = f"torch's allocators, {repeats} requests"
            yield judged("requests", f"allocations, {name}", after == before, detail, figure=float(after - before))
        if calls is None:
            yield absent("requests", f"driver calls, {name}", "the profiler shows no CUDA calls")
            continue
        shown = ", ".join(
            f"{k} {n / calls.requests:g}" for k, n in sorted(calls.names.items(), key=lambda i: -i[1])[:6]
        )
        waits, allocated = calls.synchronisations / calls.requests, calls.allocations / calls.requests
        yield judged("requests", f"synchronisations, {name}", waits == 1, shown, figure=waits, unit="a request")
        yield judged("requests", f"driver allocations, {name}", allocated == 0, figure=allocated, unit="a request")


def _conf_of_one_round(context: Context, model: LoadedModel) -> float:
    """So high that the masks of the first picture come with the answer: those of more take a wait for each round."""
    from visionfast.postprocess.detections import postprocess
    from visionfast.postprocess.on_device import MASK_WORDS_PER_IMAGE

    subjects, classes = context.subjects, len(model.spec.class_names)
    raw, where = eager_outputs(model, subjects.pictures()[0].pixels)
    boxes_and_scores = np.ascontiguousarray(raw["predictions"][0, : 4 + classes])
    conf = subjects.conf(model)
    found = postprocess(boxes_and_scores, where, num_classes=classes, conf=conf, iou=IOU, max_det=context.scale.max_det)
    width, height = (found.xyxy[:, 2:] - found.xyxy[:, :2]).T + 1  # pixels at most
    words = np.cumsum(np.ceil(width) * np.ceil((height + 31) / 32))
    fit = int(np.searchsorted(words, MASK_WORDS_PER_IMAGE // 2))
    return conf if fit == len(found) else float(found.confidence[fit])


# ---- threads -----------------------------------------------------------------------------------------------


def check_threads(context: Context) -> Iterator[Row]:
    """Sessions opened side by side, a thread each, every answer compared; and one session that several threads ask."""
    subjects, scale = context.subjects, context.scale
    model = subjects.model(scale.networks[0])
    sources = [picture.source for picture in subjects.pictures()]
    sources += [np.ascontiguousarray(picture.pixels[::-1]) for picture in subjects.pictures()]
    with contextlib.ExitStack() as opened:
        first = opened.enter_context(subjects.open(model))
        with ThreadPoolExecutor(scale.threads) as pool:  # they capture their graphs while others load and allocate
            others = [pool.submit(subjects.open, model) for _ in range(scale.threads - 1)]
        sessions = [first, *(opened.enter_context(other.result()) for other in others)]
        expected = [sessions[0]([source])[0] for source in sources]
        seconds = min(scale.thread_seconds, 0.6 * context.until.left())
        stop = Deadline(seconds)
        outcomes: list[tuple[int, int, str]] = []

        def ask(session: Any, first: int) -> None:
            answered, wrong, fault = 0, 0, ""
            try:
                while stop.left() or answered < len(sources):
                    which = (first + answered) % len(sources)
                    wrong += not _same(session([sources[which]])[0], expected[which])
                    answered += 1
            except Exception as error:
                fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            outcomes.append((answered, wrong, fault))

        started = time.monotonic()
        threads = [threading.Thread(target=ask, args=(s, i), daemon=True) for i, s in enumerate(sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60)
        spent = time.monotonic() - started
        total, wrong = sum(o[0] for o in outcomes), sum(o[1] for o in outcomes)
        faults = [o[2] for o in outcomes if o[2]]
        if len(outcomes) < len(threads):
            faults.append(f"{len(threads) - len(outcomes)} threads did not end")
        detail = f"{total} answers, {wrong} wrong, {total / spent:.0f} a second in {spent:.0f} s"
        right = not faults and not wrong and total > 0
        name = f"{len(threads)} threads × own sessions, {subjects.origin(model)}"
        yield judged("threads", name, right, faults[0] if faults else detail, figure=total / spent, unit="images/s")
        yield _shared(sessions[-1], sources[0], expected[0])


def _shared(session: Any, source: Any, expected: Detections) -> Row:
    busy, wrong, faults = [0], [0], [""]
    stop = Deadline(5)

    def ask() -> None:
        while stop.left() and not busy[0]:
            try:
                wrong[0] += not _same(session([source])[0], expected)
            except SessionBusyError:
                busy[0] += 1
            except Exception as error:
                faults[0] = f"{type(error).__name__}: {error}"
                return

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    again = _same(session([source])[0], expected)
    right = busy[0] > 0 and not wrong[0] and not faults[0] and again
    detail = (
        faults[0]
        or f"SessionBusyError {busy[0]} times, {wrong[0]} wrong answers, afterwards {'right' if again else 'wrong'}"
    )
    return judged("threads", "a session that threads share", right, detail)
