"""Results: what an engine says about one image. Names and shapes as in `supervision`, coordinates in original pixels.

`H, W` are pixels of the original image after its EXIF orientation was applied, `N` objects, `M` masks, `P` prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError

if TYPE_CHECKING:
    from visionfast.postprocess.masks import InstanceMasks

__all__ = ["Detections"]


@dataclass(frozen=True, slots=True, eq=False)
class Detections:
    """The objects found in one image, by descending confidence. Names and shapes as in `supervision`.

    Attributes:
        xyxy: (N, 4) float32, corners in original pixels, inside the image.
        confidence: (N,) float32, 0..1.
        class_id: (N,) int64, index into the engine's `class_names`.
        image_hw: the original image, pixels, after its EXIF orientation.
        mask: the N instance masks at original resolution, run-length encoded; `None` for a detector.
        stage_ns: nanoseconds of each stage, for this image; a batch's engine time is shared out evenly.
    """

    xyxy: npt.NDArray[np.float32]
    confidence: npt.NDArray[np.float32]
    class_id: npt.NDArray[np.int64]
    image_hw: tuple[int, int]
    mask: InstanceMasks | None = None
    stage_ns: Mapping[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        n = len(self.xyxy)
        for name, array, shape in (
            ("xyxy", self.xyxy, (n, 4)),
            ("confidence", self.confidence, (n,)),
            ("class_id", self.class_id, (n,)),
        ):
            if array.shape != shape:
                raise ShapeError(f"Detections.{name}: expected {shape}, got {array.shape}")
        if self.mask is not None and len(self.mask) != n:
            raise ShapeError(f"Detections.mask: expected {n} masks, got {len(self.mask)}")

    @classmethod
    def empty(cls, image_hw: tuple[int, int]) -> Detections:
        """No object: xyxy is (0, 4)."""
        return cls(
            xyxy=np.zeros((0, 4), np.float32),
            confidence=np.zeros(0, np.float32),
            class_id=np.zeros(0, np.int64),
            image_hw=image_hw,
        )

    def __len__(self) -> int:
        return len(self.xyxy)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("Detections has no order of fields: use .xyxy, .confidence, .class_id, .mask")

    def __getitem__(self, index: slice | npt.NDArray[Any] | Sequence[int]) -> Detections:
        """The selected objects; `index` is a slice, a boolean mask or a list of positions."""
        chosen = np.arange(len(self))[index]
        return Detections(
            xyxy=self.xyxy[chosen],
            confidence=self.confidence[chosen],
            class_id=self.class_id[chosen],
            image_hw=self.image_hw,
            mask=None if self.mask is None else self.mask[chosen],
            stage_ns=self.stage_ns,
        )

    def to_supervision(self, class_names: Sequence[str] = ()) -> Any:
        """As `supervision.Detections`, with `data["class_name"]` when names are given.

        Masks become a dense (N, H, W) boolean array, as supervision's own annotators expect.
        """
        import supervision as sv

        names = np.array([class_names[i] for i in self.class_id], dtype=str) if class_names else None
        return sv.Detections(
            xyxy=self.xyxy.copy(),
            confidence=self.confidence.copy(),
            class_id=self.class_id.copy(),
            mask=None if self.mask is None else self.mask.dense(),
            data={} if names is None else {"class_name": names},
        )
