"""The card, and how fast its memory copies: the unit of every floor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpu_checks.rows import Row, absent, timed
from gpu_checks.subjects import Context, has

__all__ = ["check_device"]

_OPTIONAL = {
    "torchvision": "torchvision",
    "DALI": "nvidia.dali",
    "TensorRT": "tensorrt",
    "TensorRT-RTX": "tensorrt_rtx",
    "ultralytics": "ultralytics",
    "ONNX": "onnx",
    "simplejpeg": "simplejpeg",
    "Pillow": "PIL",
    "pycocotools": "pycocotools",
}
_COPY_BYTES = 1 << 30
COPY_ROW = "copy bandwidth"


def check_device(context: Context) -> Iterator[Row]:
    """Who is here, who is not, the copy bandwidth (D2D, read and written), and what an empty launch takes."""
    machine = context.machine
    device = machine.device()
    facts = machine.facts()
    words = ", ".join(f"{k} {facts[k]}" for k in ("driver_version", "clocks.sm", "power.limit", "torch") if k in facts)
    yield Row("device", machine.name, "ok", detail=words)
    for name, module in _OPTIONAL.items():
        if has(module):
            yield absent("device", name, "not installed")
    for note in context.subjects.notes:
        yield absent("device", "a checkpoint", note)

    size = 1 << 16 if machine.is_rehearsal else _COPY_BYTES
    with device.current():
        source, target = device.empty((size,), "uint8"), device.empty((size,), "uint8")
        source.zero_()
    device.synchronize()
    samples = machine.time(device, lambda: device.copy(source, target), repeats=30, until=context.until)
    if samples:
        rate = 2 * size / float(np.median(samples))  # bytes a nanosecond: GB/s
        yield Row("device", COPY_ROW, "ok", rate, "GB/s", detail=f"device to device, {size >> 20} MiB, read + written")

    def next_to_nothing() -> None:
        source[:16].zero_()

    samples = machine.time(device, next_to_nothing, repeats=context.scale.repeats, until=context.until)
    yield timed("device", "an all but empty graph", samples, detail="what a launch costs between two events")
