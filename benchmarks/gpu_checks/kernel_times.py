"""What each kernel takes, beside the time that its bytes alone would take at the card's own copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpu_checks.kernel_results import crowd, on_device, placed
from gpu_checks.rows import Deadline, Row, absent, in_words, timed
from gpu_checks.subjects import Context, has
from visionfast.postprocess.kernels.layout import found_shape
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["check_kernel_times", "timed_with_kernels"]

NMS_GOAL_NS = 60e3
MASKS_GOAL_NS = 150e3
_CANDIDATES = 1000


def check_kernel_times(context: Context) -> Iterator[Row]:
    """Replayed from a CUDA graph, with a cold L2 cache each time, between two CUDA events."""
    if missing := has("triton"):
        yield absent("kernel times", "kernels", missing)
        return
    yield from _detections(context)
    if missing := has("pycocotools"):
        yield absent("kernel times", "masks", missing)
    else:
        yield from _masks(context)
    yield from _letterbox(context)


def _floor(context: Context, moved_bytes: float) -> str:
    if not context.copy_bytes_per_s:
        return f"{moved_bytes / 1e6:.2f} MB"
    return f"floor {in_words(moved_bytes / context.copy_bytes_per_s * 1e9)}"


def timed_with_kernels(
    context: Context,
    device: Any,
    name: str,
    work: Callable[[], Any],
    *,
    check: str = "kernel times",
    moved_bytes: float,
    detail: str,
    goal_ns: float | None = None,
) -> Iterator[Row]:
    """The whole of `work`; then its kernels one by one, as the profiler saw them, launched without a graph."""
    scale = context.scale
    until = Deadline(context.until.left() / 3)
    samples = context.machine.time(device, work, repeats=scale.repeats, until=until)
    beside = _floor(context, moved_bytes)
    yield timed(check, name, samples, beside=beside, goal_ns=goal_ns, detail=f"{detail}; cold L2")
    if context.until.left():
        each = context.machine.kernels_ns(device, work, repeats=min(scale.repeats, 50))
        for kernel, spent in each.items():
            yield timed(check, f"  · {kernel[:26]}", spent, detail="profiler; warm L2")
        if not each:
            yield absent(check, f"  · the kernels of {name}", "the profiler shows none")


def _detections(context: Context) -> Iterator[Row]:
    from visionfast.postprocess.kernels.detections import DetectionKernels

    scale, rng, device = context.scale, np.random.default_rng(context.seed), context.machine.device()
    at: list[Letterbox | None] = [letterbox_geometry(scale.frame_hw, scale.size_hw)]
    sizes = [
        (scale.anchors, scale.classes, 1),
        (scale.anchors, scale.classes, 8),
        (scale.many_anchors, scale.classes, 1),
    ]
    for anchors, classes, batch in sizes:
        # So many clusters that max_det boxes are kept of the thousand candidates that a crowded picture has.
        made = crowd(rng, anchors, classes, scale.size_hw, clusters=2000)
        best = np.sort(made[4:].max(axis=0))
        conf = float(best[-min(_CANDIDATES, anchors // 2) - 1])
        with device.current():
            kernels = DetectionKernels(
                batch=batch,
                anchors=anchors,
                num_classes=classes,
                coefficients=0,
                conf=conf,
                iou=0.7,
                max_det=scale.max_det,
                device=device.where,
            )
            predictions = on_device(device, np.repeat(made[None], batch, axis=0))
            where = on_device(device, placed(at * batch))
            kernels.enqueue(predictions, where)
            device.synchronize()
            kept, candidates = kernels.found[0, 0, :2].tolist()
        yield from timed_with_kernels(
            context,
            device,
            f"NMS {anchors} × {classes}, batch {batch}",
            lambda kernels=kernels, p=predictions, w=where: kernels.enqueue(p, w),  # type: ignore[misc]
            moved_bytes=predictions.nbytes + kernels.found.nbytes,
            detail=f"{kept} kept of {candidates}",
            goal_ns=NMS_GOAL_NS if (anchors, batch) == (8400, 1) else None,
        )


def _masks(context: Context) -> Iterator[Row]:
    from visionfast.postprocess.kernels.masks import MaskKernels

    scale, rng, device = context.scale, np.random.default_rng(context.seed), context.machine.device()
    (h, w), (height, width), m, n = scale.size_hw, scale.frame_hw, 32, scale.survivors
    at: list[Letterbox | None] = [letterbox_geometry(scale.frame_hw, scale.size_hw)]
    # A crowd as in photographs: sides of 4 to 33 % of the picture's.
    sides = rng.uniform(0.04, 0.33, (n, 2)) * (width, height)
    corner = rng.uniform(0, 1, (n, 2)) * ((width, height) - sides)
    xyxy = np.concatenate((corner, corner + sides), axis=1).astype(np.float32)
    rows = np.zeros(found_shape(1, scale.max_det), np.int32)
    rows[0, 0, 0] = n
    rows[0, 1 : 1 + n, :4] = xyxy.view(np.int32)
    rows[0, 1 : 1 + n, 6] = rng.permutation(scale.anchors)[:n]
    predictions = rng.normal(0, 1, (1, 4 + scale.classes + m, scale.anchors)).astype(np.float32)
    prototypes = rng.normal(0, 1, (1, m, h // 4, w // 4)).astype(np.float16)
    with device.current():
        kernels = MaskKernels(
            batch=1,
            num_classes=scale.classes,
            anchors=scale.anchors,
            prototypes_shape=(m, h // 4, w // 4),
            size_hw=scale.size_hw,
            max_det=scale.max_det,
            capacity_words=1 << 20,
            device=device.where,
        )
        tensors = [on_device(device, array) for array in (predictions, prototypes, rows, placed(at))]
        kernels.enqueue(*tensors)
        device.synchronize()
        words = int(kernels.offsets[0, -1].item())
    area = float(np.prod(xyxy[:, 2:] - xyxy[:, :2], axis=1).sum())
    yield from timed_with_kernels(
        context,
        device,
        f"masks of {n} objects, {width}×{height}",
        lambda: kernels.enqueue(*tensors),
        moved_bytes=prototypes.nbytes + n * m * 4 + words * 4,
        detail=f"boxes of {area / 1e6:.1f} Mpx",
        goal_ns=MASKS_GOAL_NS if (n, height) == (100, 1080) else None,
    )


def _letterbox(context: Context) -> Iterator[Row]:
    from visionfast.preprocess.kernels import DeviceLetterbox

    scale, rng, device = context.scale, np.random.default_rng(context.seed), context.machine.device()
    (h, w), (height, width) = scale.size_hw, scale.frame_hw
    with device.current():
        kernels = DeviceLetterbox(PreprocessSpec(scale.size_hw), device=device.where)
        out = device.empty((3, h, w), "float16")
    rgb = on_device(device, rng.integers(0, 256, (height, width, 3), np.uint8))
    y = on_device(device, rng.integers(0, 256, (height, width), np.uint8))
    uv = on_device(device, rng.integers(0, 256, (height // 2, width // 2, 2), np.uint8))

    def letterbox_rgb() -> None:
        kernels.rgb(rgb, out)

    def letterbox_nv12() -> None:
        kernels.nv12(y, uv, out)

    detail = "floor: the whole frame read once"
    for name, work, read in (("RGB", letterbox_rgb, rgb.nbytes), ("NV12", letterbox_nv12, y.nbytes + uv.nbytes)):
        title = f"letterbox {name} {width}×{height}"
        yield from timed_with_kernels(context, device, title, work, moved_bytes=read + out.nbytes, detail=detail)
