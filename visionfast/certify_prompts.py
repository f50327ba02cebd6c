"""Does a prompt segmenter's engine still agree with eager FP32 PyTorch, on real images, for a fixed set of prompts?

Both get the same pixels, the same prompts and the same post-processing; only the two graphs in between differ. All
four masks of every prompt are compared at the image's own size, so that no choice between them hides anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.agreement import PROMPT_TOLERANCES, compare_masks, embedding_cosine, verdict
from visionfast.backends.torch import TorchRunner
from visionfast.errors import ImageError
from visionfast.families import LoadedModel
from visionfast.preprocess.antialias import geometry
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.prompts import prompt_tensors
from visionfast.sessions.prompts import Decoded, Features, PromptSession
from visionfast.sessions.prompts_host import HostPromptSession
from visionfast.types import Certificate, Letterbox, Precision, PromptSpec, PromptTensors

__all__ = ["PROMPTS", "certify_prompts", "eager_session", "prompts_for", "run_prompts"]

PROMPTS: dict[str, tuple[list[tuple[float, float, int]] | None, tuple[float, float, float, float] | None]] = {
    "point": ([(0.5, 0.5, 1)], None),
    "another point": ([(0.3, 0.7, 1)], None),
    "points": ([(0.5, 0.5, 1), (0.6, 0.4, 1), (0.1, 0.1, 0)], None),
    "box": (None, (0.25, 0.25, 0.75, 0.75)),
    "box and point": ([(0.5, 0.6, 1)], (0.2, 0.3, 0.9, 0.95)),
}
"""Points and a box each, in parts of the picture's width and height."""


def certify_prompts(
    model: LoadedModel, candidate: PromptSession, images: Sequence[Path], *, precision: Precision
) -> Certificate:
    """Compares an engine with the eager modules, image by image and prompt by prompt.

    Args:
        model: the eager FP32 modules that the engine was made from.
        candidate: the engine as it is served; it is not closed.
        images: real ones; those that cannot be decoded are named in the certificate and left out.
        precision: picks the tolerances.

    Raises:
        CertificateError: no image could be used.
    """
    entries: list[dict[str, Any]] = []
    measured: list[dict[str, float]] = []
    reference = eager_session(model)
    for path in images:
        try:
            pixels = decode_image(path)
        except ImageError as error:
            entries.append({"file": path.name, "error": error.reason})
            continue
        measures = _compared(model, reference, candidate, pixels)
        measured.append(measures)
        entries.append({"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), **measures})
    return verdict(
        measured,
        entries,
        tolerances=PROMPT_TOLERANCES[precision],
        reference="eager FP32 PyTorch; prompts: one point twice, several points, a box, a box and a point, points and "
        "a mask; four masks each",
    )


def eager_session(model: LoadedModel) -> HostPromptSession:
    """The eager modules behind the same interface as an engine."""
    encoder, decoder = (TorchRunner(model.modules[graph.name], graph) for graph in model.spec.graphs)
    return HostPromptSession(model.spec, encoder, decoder)


def prompts_for(
    image_hw: tuple[int, int], placed: Letterbox, spec: PromptSpec, *, most_points: int
) -> dict[str, PromptTensors]:
    """`PROMPTS` on an image of this size, as the decoder takes them."""
    height, width = image_hw
    made = {}
    for name, (points, box) in PROMPTS.items():
        made[name] = prompt_tensors(
            None if points is None else [(x * width, y * height, label) for x, y, label in points],
            None if box is None else (box[0] * width, box[1] * height, box[2] * width, box[3] * height),
            placed=placed,
            spec=spec,
            most_points=most_points,
        )
    return made


def run_prompts(model: LoadedModel, session: PromptSession, pixels: npt.NDArray[np.uint8]) -> None:
    """Encodes an image and decodes `PROMPTS` on it, for those that watch the modules."""
    assert model.spec.prompts is not None
    placed = geometry(pixels.shape[:2], model.spec.preprocess)
    features = session.encode(pixels)
    for tensors in prompts_for(placed.image_hw, placed, model.spec.prompts, most_points=session.points).values():
        session.decode(features, tensors)


def _compared(
    model: LoadedModel, reference: PromptSession, candidate: PromptSession, pixels: npt.NDArray[np.uint8]
) -> dict[str, float]:
    assert model.spec.prompts is not None
    placed = geometry(pixels.shape[:2], model.spec.preprocess)
    prompts = prompts_for(placed.image_hw, placed, model.spec.prompts, most_points=reference.points)
    expected_features, got_features = reference.encode(pixels), candidate.encode(pixels)
    pairs: list[tuple[Decoded, Decoded]] = []
    for tensors in prompts.values():
        pairs.append((reference.decode(expected_features, tensors), candidate.decode(got_features, tensors)))
    # A second click goes on from the first one's mask: the reference's, so that errors don't add up.
    before = pairs[0][0].logits(np.zeros(1, np.int64))[:, None]  # (1, 1, 256, 256)
    again = PromptTensors(prompts["points"].points, prompts["points"].labels, before)
    pairs.append((reference.decode(expected_features, again), candidate.decode(got_features, again)))
    return embedding_cosine(_on_host(expected_features), _on_host(got_features)) | compare_masks(pairs, placed)


def _on_host(features: Features) -> dict[str, npt.NDArray[np.float32]]:
    return {
        name: np.asarray(value.float().cpu() if hasattr(value, "cpu") else value, np.float32)
        for name, value in features.items()
    }
