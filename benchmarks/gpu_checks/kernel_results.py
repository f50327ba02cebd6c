"""Every kernel against its definition in NumPy, on fresh random input and on the awkward cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_checks.rows import Row, absent, judged
from gpu_checks.subjects import Context, Scale, has
from visionfast.cuda import Device
from visionfast.postprocess.kernels.layout import COLUMNS, placement, read_found
from visionfast.preprocess.reference import letterbox, letterbox_geometry, normalise
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["Case", "check_detections", "check_letterbox", "check_masks", "crowd", "on_device", "placed"]

# A mask's pixel may fall on either side where its logit is this near to 0, relative to Σ |coefficient| × the plane's
# largest value, which no logit passes: float32 rounds at 6e-8 of that, a few times for each prototype.
MASK_ROUNDING = 2e-6
_LETTERBOX_HW = ((1080, 1920), (1081, 1923), (810, 1080), (37, 1500), (1500, 37), (1, 1), (2160, 3840))


def crowd(
    rng: np.random.Generator,
    anchors: int,
    classes: int,
    size_hw: tuple[int, int],
    *,
    extra: int = 0,
    clusters: int = 60,
) -> npt.NDArray[np.float32]:
    """(4 + C + M, A): clusters of boxes that overlap each other a lot, some of them wider than the input."""
    (h, w), side = size_hw, max(size_hw)
    centres = rng.uniform(0, (w, h), (clusters, 2))
    sizes = rng.uniform(side / 128, side / 2, (clusters, 2))
    member = rng.integers(0, clusters, anchors)
    boxes = np.concatenate((centres[member], sizes[member]), axis=1) + rng.normal(0, side / 100, (anchors, 4))
    boxes[:, 2:] = np.abs(boxes[:, 2:])
    scores = rng.random((anchors, classes), np.float32) ** 6
    coefficients = rng.normal(0, 1, (anchors, extra))
    return np.ascontiguousarray(np.concatenate((boxes, scores, coefficients), axis=1).T.astype(np.float32))


def placed(letterboxes: list[Letterbox | None]) -> npt.NDArray[np.float32]:
    """(B, 8) float32, see `kernels.layout`."""
    rows = np.zeros((len(letterboxes), COLUMNS), np.float32)
    placement(letterboxes, rows)
    return rows


def on_device(device: Device, array: npt.NDArray[Any]) -> torch.Tensor:
    with device.current():
        return torch.from_numpy(array).to(device.where)


# ---- detections --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """`predictions` (B, 4 + C + M, A) of images that lie at `letterboxes`."""

    name: str
    predictions: npt.NDArray[np.float32]
    classes: int
    letterboxes: list[Letterbox | None]
    options: dict[str, Any] = field(default_factory=dict)


def _cases(scale: Scale, rng: np.random.Generator) -> Iterator[Case]:
    size_hw, a, c = scale.size_hw, scale.anchors, scale.classes
    wide, tall = letterbox_geometry(scale.frame_hw, size_hw), letterbox_geometry((1080, 810), size_hw)

    def case(
        name: str,
        change: Callable[[npt.NDArray[np.float32]], None] = lambda p: None,
        *,
        boxes: list[Letterbox | None] | None = None,
        anchors: int = a,
        classes: int = c,
        extra: int = 0,
        **options: Any,
    ) -> Case:
        where = boxes or [wide]
        made = np.stack([crowd(rng, anchors, classes, size_hw, extra=extra) for _ in where])
        change(made)
        return Case(name, made, classes, where, {"conf": 0.25, "iou": 0.7, "max_det": scale.max_det} | options)

    def tied(p: npt.NDArray[np.float32]) -> None:
        p[:, 4:] = np.round(p[:, 4:] * 4) / 4
        p[:, :4] = np.round(p[:, :4] / 8) * 8

    def odd(p: npt.NDArray[np.float32]) -> None:
        flat = p.reshape(-1)
        some = rng.integers(0, flat.size, flat.size // 500 + 6)
        flat[some] = rng.choice(np.array([np.nan, np.inf, -np.inf, 3e38, -1, 0], np.float32), some.size)

    def same(p: npt.NDArray[np.float32]) -> None:
        p[:, :4] = np.array([40, 30, 20, 10], np.float32)[None, :, None]

    def flat(p: npt.NDArray[np.float32]) -> None:
        p[:, 2:4, ::2] = 0

    def outside(p: npt.NDArray[np.float32]) -> None:
        p[:, :2, ::2] += 3 * max(size_hw)
        p[:, :2, 1::4] -= 3 * max(size_hw)

    def none(p: npt.NDArray[np.float32]) -> None:
        p[:, 4:] = 0

    yield case(f"{a} × {c}")
    yield case("batch of 8, masks' rows, empty slots", boxes=[wide, tall, None, wide, tall, None, wide, tall], extra=32)
    yield case("no candidate", none)
    yield case("every anchor a candidate", conf=0.0)
    yield case("ties", tied, iou=0.5)
    yield case("NaN, infinities, zeros", odd)
    yield case("identical boxes", same)
    yield case("identical boxes, none suppressed", same, iou=1.0, conf=0.01)
    yield case("boxes of no size", flat, iou=0.0)
    yield case("boxes outside the image", outside)
    yield case("more survivors than max_det", iou=1.0, conf=0.01)
    yield case("class-agnostic", class_agnostic=True, boxes=[tall])
    yield case("two of the classes", classes_wanted=True)
    yield case(f"{scale.many_classes} classes", classes=scale.many_classes)
    yield case(f"{scale.many_anchors} anchors", anchors=scale.many_anchors)
    slots: list[Letterbox | None] = [wide, tall] * (scale.many_slots // 2)
    yield case(f"batch of {len(slots)}", boxes=slots, anchors=a // 4)
    yield case("one anchor", anchors=1, conf=0.0)


def check_detections(context: Context) -> Iterator[Row]:
    """Candidates, NMS and boxes: equal to the definition in every bit (-0.0 is 0.0)."""
    if missing := has("triton"):
        yield absent("detections", "kernels", missing)
        return
    from visionfast.postprocess.detections import postprocess
    from visionfast.postprocess.kernels.detections import DetectionKernels

    device, rng = context.machine.device(), np.random.default_rng(context.seed)
    for case in _cases(context.scale, rng):
        if not context.until.left():
            yield Row("detections", case.name, "not run", detail="out of time")
            continue
        batch, rows, anchors = case.predictions.shape
        options = dict(case.options)
        if options.pop("classes_wanted", False):
            options["classes"] = [0, case.classes - 1]
        with device.current():
            kernels = DetectionKernels(
                batch=batch,
                anchors=anchors,
                num_classes=case.classes,
                coefficients=rows - 4 - case.classes,
                device=device.where,
                **options,
            )
            predictions = on_device(device, case.predictions)
            where = on_device(device, placed(case.letterboxes))
            for _ in range(2):  # a second run finds what the first one left
                kernels.enqueue(predictions, where)
            device.synchronize()
            found_rows = kernels.found.cpu().numpy()
        wrong, objects = "", 0
        for slot, at in enumerate(case.letterboxes):
            got = read_found(found_rows[slot])
            if at is None:
                wrong = wrong or (f"slot {slot} has no image and {len(got.xyxy)} objects" if len(got.xyxy) else "")
                continue
            relevant = np.ascontiguousarray(case.predictions[slot, : 4 + case.classes])
            with np.errstate(all="ignore"):
                expected = postprocess(relevant, at, num_classes=case.classes, **options)
            objects += len(expected)
            for name in ("xyxy", "confidence", "class_id"):
                if not np.array_equal(getattr(got, name), getattr(expected, name)):
                    counts = f"{len(got.xyxy)} objects, expected {len(expected)}"
                    wrong = wrong or f"slot {slot}: {name} differs from the definition ({counts})"
        yield judged(
            "detections", f"detections: {case.name}", not wrong, wrong or f"{objects} objects, equal to the bit"
        )


# ---- masks -------------------------------------------------------------------------------------------------


def check_masks(context: Context) -> Iterator[Row]:
    """Mask decoding, packed: the definition's pixels but for those whose logit is 0 within rounding."""
    if missing := has("triton") or has("pycocotools"):
        yield absent("masks", "kernels", missing)
        return
    scale, rng = context.scale, np.random.default_rng(context.seed + 1)
    device = context.machine.device()
    for half in (True, False):
        for name, image_hw, objects in (
            ("frame", scale.frame_hw, 6),
            ("odd sides", (97, 333), 12),
            ("narrow", (3, 700), 5),
            ("none", (64, 64), 0),
        ):
            if not context.until.left():
                yield Row("masks", name, "not run", detail="out of time")
                continue
            detail, right = _compare_masks(device, scale, rng, image_hw, objects, half)
            yield judged("masks", f"masks: {name}, {'FP16' if half else 'FP32'} prototypes", right, detail)


def _compare_masks(
    device: Device, scale: Scale, rng: np.random.Generator, image_hw: tuple[int, int], objects: int, half: bool
) -> tuple[str, bool]:
    from visionfast.postprocess.kernels.layout import found_shape
    from visionfast.postprocess.kernels.masks import MaskKernels
    from visionfast.postprocess.packed import unpack
    from visionfast.postprocess.prototypes import mask_logits_reference, masks_reference

    (h, w), classes, m = scale.size_hw, scale.classes, 32
    at: list[Letterbox | None] = [letterbox_geometry(image_hw, scale.size_hw), None]
    anchors = max(objects, 1) * 3
    predictions = rng.normal(0, 1, (2, 4 + classes + m, anchors)).astype(np.float32)
    prototypes = rng.normal(0, 1, (2, m, h // 4, w // 4)).astype(np.float16 if half else np.float32)
    corners = np.sort(rng.uniform(-0.1, 1.1, (objects, 2, 2)), axis=1).reshape(objects, 4)
    xyxy = (corners * np.array([image_hw[1], image_hw[0]] * 2)).clip(0, (image_hw[1], image_hw[0]) * 2)
    xyxy = xyxy.astype(np.float32)
    anchor = rng.permutation(anchors)[:objects]
    rows = np.zeros(found_shape(2, scale.max_det + 12), np.int32)
    rows[0, 0, 0] = objects
    rows[0, 1 : 1 + objects, :4] = xyxy.view(np.int32)
    rows[0, 1 : 1 + objects, 6] = anchor
    with device.current():
        kernels = MaskKernels(
            batch=2,
            num_classes=classes,
            anchors=anchors,
            prototypes_shape=(m, h // 4, w // 4),
            size_hw=scale.size_hw,
            max_det=scale.max_det + 12,
            capacity_words=1 << 14,  # so that large masks take several rounds
            device=device.where,
        )
        tensors = [on_device(device, array) for array in (predictions, prototypes, rows, placed(at))]
        kernels.enqueue(*tensors)
        device.synchronize()
        offsets, words = kernels.fetch(*tensors)
    if offsets[1, -1] != len(words) or offsets[0, objects] != len(words):
        return f"offsets end at {offsets[1, -1]}, {len(words)} words", False
    assert at[0] is not None
    got = unpack(words, offsets[0, : objects + 1], xyxy, image_hw).dense()
    coefficients = np.ascontiguousarray(predictions[0, 4 + classes :].T[anchor])  # (N, M)
    expected = masks_reference(prototypes[0], coefficients, xyxy, at[0])
    largest = np.abs(prototypes[0].astype(np.float32)).max(axis=(1, 2))
    scale_of = (np.abs(coefficients) * largest).sum(axis=1)[:, None, None]
    undecided = np.abs(mask_logits_reference(prototypes[0], coefficients, at[0])) < MASK_ROUNDING * scale_of
    differ = got != expected
    beyond = int((differ & ~undecided).sum())
    detail = (
        f"{objects} masks, {int(expected.sum())} pixels; {int(differ.sum())} differ within rounding, {beyond} beyond"
    )
    return detail, beyond == 0 and undecided.sum() <= 1 + undecided.size // 1000


# ---- letterbox ---------------------------------------------------------------------------------------------


def check_letterbox(context: Context) -> Iterator[Row]:
    """Letterbox and normalise, of RGB and of NV12 frames: equal to the definition in every bit."""
    if missing := has("triton"):
        yield absent("letterbox", "kernels", missing)
        return
    from visionfast.preprocess.kernels import DeviceLetterbox
    from visionfast.preprocess.nv12 import nv12_to_rgb

    scale, rng, device = context.scale, np.random.default_rng(context.seed + 2), context.machine.device()
    spec = PreprocessSpec(scale.size_hw)
    h, w = scale.size_hw
    with device.current():
        kernels = DeviceLetterbox(spec, device=device.where)
    sizes = _LETTERBOX_HW if not context.machine.is_rehearsal else ((18, 32), (7, 50), (1, 1))
    for dtype in ("float16", "float32", "uint8"):
        wrong = ""
        for image_hw in sizes:
            image = rng.integers(0, 256, (*image_hw, 3), np.uint8)
            got = _filled(device, dtype, h, w, lambda out, i=image: kernels.rgb(on_device(device, i), out))  # type: ignore[misc]
            wrong = wrong or _difference(got, image, spec, dtype, image_hw)
        yield judged(
            "letterbox", f"letterbox RGB → {dtype}", not wrong, wrong or f"{len(sizes)} sizes, equal to the bit"
        )
    for matrix, full_range in (("bt601", False), ("bt709", True)):
        wrong = ""
        even = [(hw[0] // 2 * 2 or 2, hw[1] // 2 * 2 or 2) for hw in sizes]
        for image_hw in even:
            y = rng.integers(0, 256, image_hw, np.uint8)
            uv = rng.integers(0, 256, (image_hw[0] // 2, image_hw[1] // 2, 2), np.uint8)
            to: Any = {"matrix": matrix, "full_range": full_range}
            image = nv12_to_rgb(y, uv, **to)
            got = _filled(
                device,
                "float16",
                h,
                w,
                lambda out, y=y, uv=uv, to=to: kernels.nv12(on_device(device, y), on_device(device, uv), out, **to),  # type: ignore[misc]
            )
            wrong = wrong or _difference(got, image, spec, "float16", image_hw)
        name = f"letterbox NV12 {matrix}{' full range' if full_range else ''}"
        yield judged("letterbox", name, not wrong, wrong or f"{len(even)} sizes, equal to the bit")


def _filled(device: Device, dtype: str, h: int, w: int, write: Callable[[torch.Tensor], Any]) -> npt.NDArray[Any]:
    with device.current():
        out = device.empty((h, w, 3) if dtype == "uint8" else (3, h, w), dtype)
        out.fill_(99)
        write(out)
        device.synchronize()
        return np.asarray(out.cpu().numpy())


def _difference(
    got: npt.NDArray[Any], image: npt.NDArray[np.uint8], spec: PreprocessSpec, dtype: str, image_hw: tuple[int, int]
) -> str:
    canvas, _ = letterbox(image, spec)
    expected = canvas if dtype == "uint8" else normalise(canvas, spec, dtype)
    differ = int((got != expected).sum())
    return f"{image_hw[1]}×{image_hw[0]}: {differ} of {got.size} values differ from the definition" if differ else ""
