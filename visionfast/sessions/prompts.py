"""What stands between a prompt segmenter and its two engines: encode an image, decode prompts, read masks.

`P` prompts of `N` points each; `C` masks a prompt (4); `H, W` original pixels. Where features and logits are, in host
memory or on a GPU, is the session's own business: what crosses this interface is small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from visionfast.postprocess.masks import InstanceMasks
from visionfast.types import Letterbox, PromptTensors

__all__ = ["Decoded", "Features", "PromptSession"]

Features: TypeAlias = Mapping[str, Any]
"""The encoder's outputs by name: arrays on the host, or tensors on the session's device. Never live buffers."""


class Decoded(Protocol):
    """What the decoder gave for P prompts, as long as the caller keeps it: P × C masks of 256 × 256 logits, which are
    numbered prompt by prompt, `prompt * C + candidate`.

    Attributes:
        scores: (P, C) float32 on the host, the predicted IoU of each mask.
    """

    scores: npt.NDArray[np.float32]

    def logits(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """(K, 256, 256) float32 on the host, of the K chosen masks."""
        ...

    def stability(
        self, chosen: npt.NDArray[np.int64], delta: float, placed: Letterbox | None = None
    ) -> npt.NDArray[np.float32]:
        """(K,) float32: pixels above `+delta` over pixels above `-delta`, of each chosen mask.

        Counted on the logits as they are, or, with `placed`, enlarged to the original image. Where no pixel is above
        `-delta`, 1 on the logits as they are (SAM 2's decoder) and NaN enlarged (the generators: 0 / 0 keeps nothing).
        """
        ...

    def masks(self, chosen: npt.NDArray[np.int64], placed: Letterbox) -> InstanceMasks:
        """The chosen masks at the original image's resolution: logits enlarged, above 0."""
        ...


class PromptSession(Protocol):
    """One model's encoder and decoder. Safe for several threads: they take turns at each of the two engines.

    Attributes:
        prompts: that one call of `decode` is fastest with: on a CPU one, on a GPU as many as the engine takes.
        points: that a prompt may have at most, padding and box corners among them.
    """

    prompts: int
    points: int

    def encode(self, pixels: npt.NDArray[np.uint8], stage_ns: dict[str, int] | None = None) -> Features:
        """(H, W, 3) uint8 RGB → the features, which are the caller's.

        Args:
            pixels: of the image.
            stage_ns: takes the nanoseconds of `preprocess` and `encoder`, where it is given; and of `turn`, where
                another thread's image was encoded first.

        Raises:
            BackendError: the runtime failed, or the session is closed.
        """
        ...

    def decode(self, features: Features, prompts: PromptTensors) -> Decoded:
        """Any number of prompts of one length on one image.

        Raises:
            BackendError: the runtime failed, or the session is closed.
        """
        ...

    def close(self) -> None:
        """Frees both engines; closing twice is harmless."""
        ...
