"""The publishers' own predictors for Segment Anything as a system under test: one click on each image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import cv2
import numpy as np

from visionfast.bench.official_sam import official_predictor
from visionfast.bench.records import System
from visionfast.bench.systems import Answer, Call, taking_turns
from visionfast.checkpoint import open_checkpoint

__all__ = ["OfficialPredictor"]


class OfficialPredictor:
    """As its own examples have it: OpenCV decodes, then `set_image` and `predict`. Eager FP32 PyTorch.

    The click is that of `engine_systems.PromptSystem`: half of the shorter side from the left and from the top.

    Args:
        system: who it is.
        weights: the checkpoint.
        architecture: as `ModelSpec.architecture` says.

    Raises:
        BackendUnavailableError: the publisher's package is missing.
        CheckpointError: the checkpoint is refused.
    """

    caches = False

    def __init__(self, system: System, weights: Path, architecture: str) -> None:
        self.system = system
        self._predictor: Any = official_predictor(open_checkpoint(weights), architecture)

    def call(self, encoded: bytes) -> Answer:
        started = perf_counter_ns()
        blue_first = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
        pixels = cv2.cvtColor(np.asarray(blue_first), cv2.COLOR_BGR2RGB)  # (H, W, 3) u8
        decoded = perf_counter_ns()
        self._predictor.set_image(pixels)
        encoded_ns = perf_counter_ns()
        middle = min(pixels.shape[:2]) / 2
        masks, _scores, _logits = self._predictor.predict(
            point_coords=np.array([[middle, middle]]), point_labels=np.array([1]), multimask_output=False
        )
        stage_ns = {
            "decode": decoded - started,
            "encoder": encoded_ns - decoded,  # with its preprocessing
            "decoder": perf_counter_ns() - encoded_ns,  # with its post-processing
        }
        return Answer(masks.astype(np.bool_, copy=False), stage_ns)  # (1, H, W)

    def parallel(self, n: int) -> Sequence[Call]:
        """It keeps the image in itself: who asks meanwhile waits."""
        return taking_turns([self.call], n)

    def close(self) -> None:
        pass
