"""Of the masks that a prompt decoder proposes, the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from visionfast.types import PromptSpec

if TYPE_CHECKING:
    from visionfast.sessions.prompts import Decoded

__all__ = ["choose_masks", "given_logits"]


def choose_masks(decoded: Decoded, spec: PromptSpec, multimask: bool) -> npt.NDArray[np.int64]:
    """Which of each prompt's C masks answer it.

    Where one mask is asked for it is the first; under `spec.stability` (SAM 2) only if it hardly depends on its
    threshold, and else the best-scored of the others (the first of equal ones; a NaN score counts as the highest):
    `MaskDecoder._dynamic_multimask_via_stability` of sam2 1.1.

    Args:
        decoded: what the decoder gave for P prompts.
        spec: of the model.
        multimask: all masks but the first, which stands for a prompt that is clear.

    Returns:
        (P, C') int64, C' = C - 1 or 1: `prompt * C + candidate`, as `Decoded` numbers them.
    """
    prompts, candidates = decoded.scores.shape
    number = np.arange(prompts * candidates, dtype=np.int64).reshape(prompts, candidates)
    if multimask:
        return number[:, 1:]
    chosen = number[:, 0]
    if spec.stability is not None:
        delta, least = spec.stability
        stable = decoded.stability(chosen, delta) >= np.float32(least)  # in float32, as PyTorch compares
        chosen = np.where(stable, chosen, chosen + 1 + decoded.scores[:, 1:].argmax(axis=1))
    return chosen[:, None]


def given_logits(logits: npt.NDArray[np.float32], spec: PromptSpec) -> npt.NDArray[np.float32]:
    """Logits as they are given back, within ± `spec.logit_limit` (SAM 2's predictor); masks are made of them before.

    Any shape. NaN stays NaN. Where there is no limit, the argument itself.
    """
    if spec.logit_limit is None:
        return logits
    limit = np.float32(spec.logit_limit)
    limited: npt.NDArray[np.float32] = np.clip(logits, -limit, limit)
    return limited
