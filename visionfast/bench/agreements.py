"""Whether those who are measured give the same answers: speed alone says nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.agreement import compare_detections
from visionfast.bench.parts import EagerNetwork, OwnAfter, OwnBefore, Pipeline, as_results
from visionfast.bench.records import Input, System
from visionfast.bench.sam_peer import OfficialPredictor
from visionfast.bench.systems import SystemUnderTest
from visionfast.checkpoint import open_checkpoint
from visionfast.families import LoadedModel, identify
from visionfast.postprocess.masks import InstanceMasks, mask_iou
from visionfast.results import Detections, Embeddings, Masks
from visionfast.types import EngineManifest

__all__ = ["add_agreement", "agreement", "eager_model"]

_CONF = 0.25


def eager_model(weights: Path, manifest: EngineManifest) -> LoadedModel:
    """The eager FP32 modules that an engine was made from, for its size.

    Raises:
        CheckpointError: the checkpoint is refused.
        UnsupportedModelError: it is none that visionfast handles.
    """
    checkpoint, spec = open_checkpoint(weights), manifest.spec
    return identify(checkpoint).load(checkpoint, name=spec.name, size_hw=spec.preprocess.size_hw)


def add_agreement(
    systems: Sequence[SystemUnderTest], weights: Path, manifest: EngineManifest, inputs: Sequence[Input]
) -> None:
    """Asks everybody about the images, and writes `agreement` into their details: how far they are from eager FP32
    PyTorch on pixels as the checkpoint was trained with, for Segment Anything from its publisher's own predictor.

    Args:
        systems: whose details it is written into.
        weights: the checkpoint.
        manifest: of one of its engines.
        inputs: images; with none there is nothing to say.
    """
    if not inputs:
        return
    reference = _reference(weights, manifest)
    expected = [reference.call(image.encoded).found for image in inputs]
    for system in systems:
        found = [system.call(image.encoded).found for image in inputs]
        details = {**system.system.details, "agreement": agreement(expected, found)}
        system.system = replace(system.system, details=details)


def _reference(weights: Path, manifest: EngineManifest) -> SystemUnderTest:
    who, spec = System("reference", "eager FP32 PyTorch", "naive"), manifest.spec
    if spec.task == "prompt-segment":
        return OfficialPredictor(who, weights, spec.architecture)
    (module,) = eager_model(weights, manifest).modules.values()
    return Pipeline(who, OwnBefore(spec), EagerNetwork(module, spec), OwnAfter(spec))


def agreement(expected: Sequence[Any], found: Sequence[Any]) -> str:
    """How far answers are from those expected, image by image, in words.

    Args:
        expected, found: of each image, what a system found (`Answer.found`): objects, masks or a vector.
    """
    pairs = [(as_results(a), as_results(b)) for a, b in zip(expected, found, strict=True)]
    if isinstance(pairs[0][0], Detections):
        return _detections(pairs)
    if isinstance(pairs[0][0], (Masks, InstanceMasks)):
        least = min(float(mask_iou(_first_mask(a), _first_mask(b))[0, 0]) for a, b in pairs)
        return f"least mask IoU {least:.3f}"
    return f"least cosine {min(_cosine(_vector(a), _vector(b)) for a, b in pairs):.6f}"


def _detections(pairs: Sequence[tuple[Detections, Detections]]) -> str:
    total: Counter[str] = Counter()
    least: dict[str, float] = {}
    for expected, found in pairs:
        measures = compare_detections(expected, found, conf=_CONF, slack=0.0)
        total.update({name: int(measures[name]) for name in ("objects", "unmatched")})
        for name, words in (("min_iou", "IoU"), ("min_mask_iou", "mask IoU")):
            if name in measures:
                least[words] = min(least.get(words, 1.0), measures[name])
    if not least and not total["unmatched"]:
        return "no objects in these images"
    figures = [f"least {words} {value:.3f}" for words, value in least.items()]
    return ", ".join([f"{total['objects']} objects, {total['unmatched']} unmatched", *figures])


def _first_mask(found: Masks | InstanceMasks) -> InstanceMasks:
    return (found.mask if isinstance(found, Masks) else found)[[0]]


def _vector(found: Any) -> npt.NDArray[np.float64]:
    vector: npt.NDArray[np.float64] = (found.cls[0] if isinstance(found, Embeddings) else found).astype(np.float64)
    return vector


def _cosine(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
