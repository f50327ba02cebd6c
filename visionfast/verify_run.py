"""Is an engine as accurate as the checkpoint that it was built from? Measured on a data set, as COCO measures.

Both sides get the same encoded images and give objects in original pixels; both are judged by COCO's own matching.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, Literal

from visionfast import artifacts, machine
from visionfast._version import __version__
from visionfast.errors import ImageError, OptionError
from visionfast.pipeline import open_engine, runs_here
from visionfast.preprocess.limits import DecodeLimits
from visionfast.terminal import one_line
from visionfast.types import EngineManifest
from visionfast.verify_classes import ClassMatch, match_classes
from visionfast.verify_dataset import CocoDataset, read_dataset
from visionfast.verify_matches import Kind, Matcher
from visionfast.verify_report import BadImage, Comparison, VerifyReport, compare
from visionfast.verify_sides import Side, answered, eager_side, naive_side
from visionfast.whole_numbers import checked_whole

__all__ = ["CONF", "IOU", "MAX_DET", "REFERENCES", "TOLERANCE_POINTS", "Reference", "verify"]

CONF, IOU, MAX_DET = 0.001, 0.7, 300
"""What both sides find objects with, as ultralytics validates: average precision needs the unlikely ones too."""

TOLERANCE_POINTS = 0.5
"""How far apart the two mAP50-95 may be, in points of 100.

Small beside what choosing a model is about, a point and more, and well above what rounding does on a data set that is
large enough to say so: on 27 photographs FP32 in OpenVINO moved YOLOv8n by 0.00 points, and BF16 by +0.59, of which the
interval (-0.29 to +1.02) says that they are too few to tell. Either way counts: an engine that is better by as much is
not what was built from the checkpoint either.
"""

Reference = Literal["eager", "naive"]
REFERENCES: dict[Reference, str] = {
    "eager": f"eager FP32 PyTorch between visionfast's own pre- and post-processing, conf {CONF}, iou {IOU}",
    "naive": f"naive PyTorch: PIL, torchvision, eager FP32, conf {CONF}, iou {IOU}",
}
"""What an engine can be compared with.

`eager`: what is left is what the engine itself changed. `naive`: other code for everything, so that a mistake in
visionfast's own shows too; its resize is antialiased, ultralytics' and so visionfast's is not, which is a difference
where pictures are made smaller.
"""

_MAX_RESAMPLES = 100_000


def verify(
    engine: str | os.PathLike[str],
    dataset: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    reference: Reference = "eager",
    limit: int | None = None,
    tolerance_points: float = TOLERANCE_POINTS,
    resamples: int = 1000,
    seed: int = 0,
    threads: int | None = None,
    device: str | None = None,
    limits: DecodeLimits | None = None,
    trust_checkpoint: bool = False,
    progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
) -> VerifyReport:
    """Average precision of an engine and of eager PyTorch on a data set, and their difference.

    An image that is missing, damaged or of another size than its annotations say is named in the report and left out on
    both sides. Memory does not grow with what is found but for 28 bytes an object.

    Args:
        engine: as for `Detector.open`; of a detector or a segmenter.
        dataset: folder in COCO's format, or its JSON file (`visionfast.verify_dataset.read_dataset`).
        images: folder of its images; default: one of the usual.
        weights: the checkpoint that the engine was built from; default: found under models/ by its sha256.
        reference: what to compare with (`REFERENCES`); `naive` for detectors only.
        limit: only the first so many images.
        tolerance_points: that the two mAP50-95 may be apart, in points of 100, either way.
        resamples: samples of the images that the difference's interval comes from.
        seed: of these samples.
        threads, device, limits: as for `Detector.open`.
        trust_checkpoint: load a pickle without the allow-list.
        progress: is told the stage, and of how many images how many are done.

    Raises:
        OptionError: the engine is for another task, the data set is not as it should be, shares no class with the
            engine or has no object of one, an option is out of its range, or no image could be used.
        ArtifactError, ManifestError: there is no such engine, it is damaged, or the weights are not under models/.
        CheckpointError: the weights are not those that the engine was built from, or cannot be used.
        BackendError: this machine cannot run the engine, or has no PyTorch to compare with.
    """
    if reference not in REFERENCES:
        raise OptionError(f"reference: expected {' or '.join(REFERENCES)}, got {reference!r}")
    if not (math.isfinite(tolerance_points) and tolerance_points >= 0):
        raise OptionError(f"tolerance: expected points of mAP, at least 0, got {tolerance_points!r}")
    resamples = checked_whole("resamples", resamples, _MAX_RESAMPLES)
    limit = None if limit is None else checked_whole("limit", limit, 2**31)
    folder = artifacts.find_engine(engine, usable=runs_here)
    progress("checking the engine's files", 0, None)
    manifest = artifacts.read_manifest(folder, verify=True)
    _check_task(manifest, reference)
    progress("reading the data set", 0, None)
    data = read_dataset(dataset, images=images, limit=limit, masks=manifest.spec.task == "segment")
    classes = match_classes(manifest.spec.class_names, data.categories)
    _check_objects(data, classes)

    progress("reading the checkpoint", 0, None)
    named = None if weights is None else artifacts.find_model(os.fspath(weights))
    options: dict[str, Any] = {"conf": CONF, "iou": IOU, "max_det": MAX_DET, "limits": limits or DecodeLimits()}
    with contextlib.ExitStack() as opened:
        theirs: Side
        if reference == "naive":
            theirs = naive_side(manifest, named, options)
        else:
            theirs = opened.enter_context(eager_side(folder, manifest, named, trust_checkpoint, threads, options))
        ours: Any = opened.enter_context(open_engine(folder, threads=threads, device=device, **options))
        pairs, bad = _matched(data, classes, (ours, theirs), manifest.spec.batch, options["limits"], progress)
    if len(bad) == len(data.images):
        first = f"{bad[0].file}: {bad[0].reason}"
        raise OptionError(f"{data.annotations}: none of its {len(bad)} images can be used; {first}")

    progress("resampling the images", 0, None)
    names = tuple(manifest.spec.class_names[class_id] for class_id in classes.categories)
    compared: dict[Kind, Comparison] = {}
    for kind, (mine, reference_matcher) in pairs.items():
        compared[kind] = compare(
            mine.matches(), reference_matcher.matches(), class_names=names, resamples=resamples, seed=seed
        )
    return VerifyReport(
        engine=artifacts.near(folder),
        model=manifest.spec.architecture,
        task=manifest.spec.task,
        backend=f"{manifest.backend} {manifest.runtime_version}",
        precision=manifest.precision,
        device=manifest.device,
        weights_sha256=manifest.weights_sha256,
        engine_sha256=dict(manifest.sha256),
        certificate=manifest.certificate.status,
        reference=REFERENCES[reference],
        annotations=str(data.annotations),
        annotations_sha256=data.sha256,
        images=len(data.images) - len(bad),
        objects=pairs["boxes"][0].matches().objects,
        bad_images=bad,
        classes=names,
        classes_without_category=classes.without_category,
        categories_without_class=classes.without_class,
        boxes=compared["boxes"],
        masks=compared.get("masks"),
        tolerance_points=float(tolerance_points),
        settings={"conf": CONF, "iou": IOU, "max_det": MAX_DET, "resamples": resamples, "seed": seed},
        environment=machine.environment() | {"torch": machine.package_version("torch")},
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        visionfast_version=__version__,
    )


def _check_task(manifest: EngineManifest, reference: Reference) -> None:
    name, task = manifest.spec.name, manifest.spec.task
    if task not in ("detect", "segment"):
        raise OptionError(f"{name}: a model for {task}; average precision is for detect and segment")
    if reference == "naive" and task != "detect":
        raise OptionError(f"{name}: a model for {task}; the reference naive finds boxes only: compare with eager")


def _check_objects(data: CocoDataset, classes: ClassMatch) -> None:
    """Raises `OptionError` where there is nothing to find: whatever an engine did would pass."""
    wanted = set(classes.categories.values())
    things = (thing for image in data.images for thing in image.objects)
    if not any(thing.category_id in wanted and not thing.crowd for thing in things):
        raise OptionError(f"{data.annotations}: expected objects of the engine's classes on {len(data.images)} images")


def _matched(
    data: CocoDataset,
    classes: ClassMatch,
    sides: tuple[Side, Side],
    batch: int,
    limits: DecodeLimits,
    progress: Callable[[str, int, int | None], None],
) -> tuple[Mapping[Kind, tuple[Matcher, Matcher]], tuple[BadImage, ...]]:
    """What both sides found held against what is there, and the images that one of them had no answer to."""
    kinds: tuple[Kind, ...] = ("boxes", "masks") if data.has_masks else ("boxes",)
    pairs = {kind: (Matcher(kind, classes.categories), Matcher(kind, classes.categories)) for kind in kinds}
    bad = []
    for image, answers in answered(data, sides, batch, limits, progress):
        if isinstance(answers, ImageError):
            bad.append(BadImage(one_line(image.file_name), answers.kind, one_line(answers.reason)))
            continue
        for pair in pairs.values():
            for matcher, found in zip(pair, answers, strict=True):
                matcher.add(image.objects, found)
    return pairs, tuple(bad)
