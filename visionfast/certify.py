"""Does the engine still agree with eager FP32 PyTorch, on real images, in the task's own measure?

Both get the same letterboxed pixels and the same post-processing; only what computes in between differs. Objects
are matched greedily by IoU within a class. An object that only one side has counts as unmatched, unless its
confidence is so near the threshold that the allowed difference explains it. Raw tensors are compared too, so that
images without objects prove something.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast import machine
from visionfast.backends.torch import TorchRunner
from visionfast.errors import CertificateError, ImageError
from visionfast.families import LoadedModel
from visionfast.pipeline import Detector, Segmenter
from visionfast.postprocess.masks import mask_iou
from visionfast.postprocess.nms import box_iou
from visionfast.types import Certificate, Detections, Precision, Runner

__all__ = ["TOLERANCES", "certify", "compare_detections", "default_images", "images_in"]

# Of a measure whose name begins with min, the least that is allowed; of the others, the most.
TOLERANCES: dict[Precision, dict[str, float]] = {
    "fp32": {"min_iou": 0.99, "max_confidence_difference": 0.01, "unmatched": 0, "max_score_difference": 0.01,
             "max_box_difference_px": 1.0, "min_mask_iou": 0.98},
    "fp16": {"min_iou": 0.97, "max_confidence_difference": 0.02, "unmatched": 0, "max_score_difference": 0.04,
             "min_mask_iou": 0.95},
    "bf16": {"min_iou": 0.90, "max_confidence_difference": 0.05, "unmatched": 0, "max_score_difference": 0.15,
             "min_mask_iou": 0.90},
}  # fmt: skip
_CONF = 0.25


def default_images() -> list[Path]:
    """Two photographs that install with the build extra (they ship inside ultralytics).

    Raises:
        CertificateError: they are not there.
    """
    import importlib.util

    spec = importlib.util.find_spec("ultralytics")
    folder = Path(spec.origin).parent / "assets" if spec and spec.origin else Path()
    found = [folder / name for name in ("bus.jpg", "zidane.jpg")]
    if not all(path.is_file() for path in found):
        raise CertificateError("no photographs to certify on; give a folder of real images with --images")
    return found


def certify(model: LoadedModel, runner: Runner, images: Sequence[Path], *, precision: Precision) -> Certificate:
    """Compares an engine's runner with the eager module, image by image.

    Args:
        model: the eager FP32 modules that the engine was made from.
        runner: of the engine; it is not closed.
        images: real ones; those that cannot be decoded are named in the certificate and left out.
        precision: picks the tolerances.

    Raises:
        CertificateError: no image could be used.
    """
    graph = model.spec.graphs[0]
    kind = Segmenter if model.spec.task == "segment" else Detector
    engine = _Recorder(runner)
    eager = _Recorder(TorchRunner(model.modules[graph.name], graph))
    entries: list[dict[str, Any]] = []
    measured: list[dict[str, float]] = []
    with kind(model.spec, eager, conf=_CONF) as reference:
        candidate = kind(model.spec, engine, conf=_CONF)
        for path in images:
            try:
                (expected,), (got,) = reference([path]), candidate([path])
            except ImageError as error:
                entries.append({"file": path.name, "error": error.reason})
                continue
            measures = compare_detections(
                expected, got, conf=_CONF, slack=TOLERANCES[precision]["max_confidence_difference"]
            )
            measures |= _compare_raw(eager.last, engine.last, len(model.spec.class_names))
            measured.append(measures)
            entries.append({"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), **measures})
    if not measured:
        raise CertificateError(f"none of the {len(images)} images can be decoded; give real ones with --images")
    total = _total(measured)
    bounds = {name: bound for name, bound in TOLERANCES[precision].items() if name in total}
    within = all(
        total[name] >= bound if name.startswith("min") else total[name] <= bound for name, bound in bounds.items()
    )
    return Certificate(
        status="passed" if within else "failed",
        reference=f"eager FP32 PyTorch, conf {_CONF}, iou 0.7",
        tolerances=bounds,
        measures=total,
        images=tuple(entries),
        environment=machine.environment(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def compare_detections(expected: Detections, got: Detections, *, conf: float, slack: float) -> dict[str, float]:
    """How far two answers for one image are apart.

    Args:
        expected, got: the answers.
        conf: the threshold that both were made with.
        slack: an unmatched object within this of the threshold is not counted.

    Returns:
        objects, unmatched, and where objects matched also min_iou, max_confidence_difference, min_mask_iou.
    """
    iou = box_iou(expected.xyxy, got.xyxy)  # (N, M)
    iou[expected.class_id[:, None] != got.class_id[None, :]] = 0
    pairs: list[tuple[int, int]] = []
    free = iou.copy()
    while free.size and free.max() >= 0.5:
        i, j = np.unravel_index(int(free.argmax()), free.shape)
        pairs.append((int(i), int(j)))
        free[i, :] = free[:, j] = 0
    left = (
        np.delete(expected.confidence, [i for i, _ in pairs]),
        np.delete(got.confidence, [j for _, j in pairs]),
    )
    unmatched = sum(int((confidence > conf + slack).sum()) for confidence in left)
    measures = {"objects": float(len(expected)), "unmatched": float(unmatched)}
    if pairs:
        i, j = np.array(pairs).T
        measures["min_iou"] = float(iou[i, j].min())
        measures["max_confidence_difference"] = float(np.abs(expected.confidence[i] - got.confidence[j]).max())
        if expected.mask is not None and got.mask is not None:
            measures["min_mask_iou"] = float(mask_iou(expected.mask, got.mask)[i, j].min())
    return measures


def _compare_raw(
    expected: dict[str, npt.NDArray[Any]], got: dict[str, npt.NDArray[Any]], num_classes: int
) -> dict[str, float]:
    """Scores of all anchors; boxes, in input pixels, of the 100 with the highest expected score."""
    a, b = expected["predictions"][0].astype(np.float32), got["predictions"][0].astype(np.float32)
    scores = slice(4, 4 + num_classes)
    best = np.argsort(-a[scores].max(0), kind="stable")[:100]
    score = np.abs(a[scores] - b[scores]).max()
    box = np.abs(a[:4, best] - b[:4, best]).max()
    # A NaN anywhere must fail, and JSON has no word for it nor for infinity: the largest number stands for both.
    worst = float(np.finfo(np.float32).max)
    return {
        "max_score_difference": float(np.nan_to_num(score, nan=worst, posinf=worst)),
        "max_box_difference_px": float(np.nan_to_num(box, nan=worst, posinf=worst)),
    }


def _total(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {"images": float(len(measured))}
    for name in dict.fromkeys(name for measures in measured for name in measures):
        values = [measures[name] for measures in measured if name in measures]
        total[name] = min(values) if name.startswith("min") else max(values) if name.startswith("max") else sum(values)
    return total


class _Recorder:
    """A runner that remembers what it last answered, and leaves closing to its owner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.inputs = runner.inputs
        self.outputs = runner.outputs
        self.last: dict[str, npt.NDArray[Any]] = {}

    def infer(self, feeds: Any, *, copy: bool = True) -> dict[str, npt.NDArray[Any]]:
        self.last = self._runner.infer(feeds, copy=True)
        return self.last

    def close(self) -> None:
        self.last = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def images_in(folder: Path) -> list[Path]:
    """The files of a folder that have an image's suffix, sorted.

    Raises:
        CertificateError: there is none.
    """
    suffixes = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in suffixes) if folder.is_dir() else []
    if not found:
        raise CertificateError(f"{os.fspath(folder)}: expected a folder with images to certify on")
    return found
