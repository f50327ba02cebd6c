"""The masks that a prompt segmenter's calls of its decoder gave, together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from visionfast.postprocess.choose import given_logits
from visionfast.postprocess.masks import InstanceMasks
from visionfast.results import Masks
from visionfast.sessions.prompts import Decoded
from visionfast.types import Letterbox, PromptSpec

__all__ = ["Answer"]


class Answer:
    """Collects masks, some prompts at a time.

    Attributes:
        stage_ns: nanoseconds of each stage, which the caller adds to.
    """

    def __init__(self, placed: Letterbox, stage_ns: dict[str, int]) -> None:
        self.stage_ns = stage_ns
        self._placed = placed
        self._counts: list[bytes] = []
        self._scores: list[npt.NDArray[np.float32]] = []
        self._prompts: list[npt.NDArray[np.int64]] = []
        self._logits: list[npt.NDArray[np.float32]] = []

    def add(self, decoded: Decoded, chosen: npt.NDArray[np.int64], first: int, logits_of: PromptSpec | None) -> None:
        """Adds chosen (P, C') masks of P prompts, the first of which is the caller's prompt number `first`."""
        flat = chosen.ravel()
        self._counts += decoded.masks(flat, self._placed).counts
        self._scores.append(decoded.scores.ravel()[flat])
        self._prompts.append(np.repeat(np.arange(first, first + len(chosen), dtype=np.int64), chosen.shape[1]))
        if logits_of is not None:
            self._logits.append(given_logits(decoded.logits(flat), logits_of))

    def masks(self) -> Masks:
        image_hw = self._placed.image_hw
        return Masks(
            mask=InstanceMasks(tuple(self._counts), image_hw),
            score=np.concatenate(self._scores),
            prompt=np.concatenate(self._prompts),
            image_hw=image_hw,
            logits=np.concatenate(self._logits) if self._logits else None,
            stage_ns=self.stage_ns,
        )
