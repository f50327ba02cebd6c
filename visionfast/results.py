"""Results: what an engine says about one image. Names and shapes as in `supervision`, coordinates in original pixels.

`H, W` are pixels of the original image after its EXIF orientation was applied, `N` objects, `M` masks, `P` prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, ServerError, ShapeError
from visionfast.types import Letterbox

if TYPE_CHECKING:
    from visionfast.postprocess.masks import InstanceMasks

__all__ = ["Detections", "Embeddings", "Masks", "unit_vectors"]


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

    def __getitem__(self, index: int | slice | npt.NDArray[Any] | Sequence[int]) -> Detections:
        """The selected objects; `index` is a position, a slice, a boolean mask or a list of positions."""
        chosen = np.atleast_1d(np.arange(len(self))[index])
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


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """The masks that prompts on one image gave, prompt by prompt, and in the decoder's order within a prompt.

    Attributes:
        mask: the M masks at original resolution, run-length encoded; some may be empty.
        score: (M,) float32, the model's own prediction of each mask's IoU, roughly 0..1.
        prompt: (M,) int64, which prompt it answers, from 0.
        image_hw: the original image, pixels, after its EXIF orientation.
        logits: (M, 256, 256) float32, each mask before it was enlarged: `mask_input` of a prompt that goes on from
            it; `None` where they were not asked for.
        stability: (M,) float32, how little the mask depends on its threshold, 0..1; `None` but in everything mode.
        points: (M, 2) float32, the point that prompted it, original pixels; `None` but in everything mode.
        stage_ns: nanoseconds of each stage: `hash`, `decode`, `preprocess`, `encoder` where the image was encoded for
            this call, then `decoder`, `postprocess`.
    """

    mask: InstanceMasks
    score: npt.NDArray[np.float32]
    prompt: npt.NDArray[np.int64]
    image_hw: tuple[int, int]
    logits: npt.NDArray[np.float32] | None = None
    stability: npt.NDArray[np.float32] | None = None
    points: npt.NDArray[np.float32] | None = None
    stage_ns: Mapping[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        m = len(self.mask)
        for name, array, tail in (
            ("score", self.score, ()),
            ("prompt", self.prompt, ()),
            ("logits", self.logits, None),
            ("stability", self.stability, ()),
            ("points", self.points, (2,)),
        ):
            if array is None:
                continue
            if array.shape[:1] != (m,) or (tail is not None and array.shape[1:] != tail):
                raise ShapeError(f"Masks.{name}: expected {(m, *(tail or ('…',)))}, got {array.shape}")
        if self.mask.image_hw != self.image_hw:
            raise ShapeError(f"Masks.mask: expected masks of {self.image_hw}, got {self.mask.image_hw}")

    @classmethod
    def empty(cls, image_hw: tuple[int, int]) -> Masks:
        """No mask."""
        from visionfast.postprocess.masks import InstanceMasks

        return cls(InstanceMasks((), image_hw), np.zeros(0, np.float32), np.zeros(0, np.int64), image_hw)

    def __repr__(self) -> str:
        h, w = self.image_hw
        scores = ", ".join(f"{score:.2f}" for score in self.score[:6]) + (", …" if len(self) > 6 else "")
        return f"Masks({len(self)} of {w}×{h}, score [{scores}])"

    def __len__(self) -> int:
        return len(self.mask)

    def __iter__(self) -> Iterator[Masks]:
        """One mask after the other, each as `Masks` of one."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int | slice | npt.NDArray[Any] | Sequence[int]) -> Masks:
        """The selected masks; `index` is a position, a slice, a boolean mask or a list of positions."""
        chosen = np.atleast_1d(np.arange(len(self))[index])
        return Masks(
            mask=self.mask[chosen],
            score=self.score[chosen],
            prompt=self.prompt[chosen],
            image_hw=self.image_hw,
            logits=None if self.logits is None else self.logits[chosen],
            stability=None if self.stability is None else self.stability[chosen],
            points=None if self.points is None else self.points[chosen],
            stage_ns=self.stage_ns,
        )

    @property
    def xyxy(self) -> npt.NDArray[np.float32]:
        """(M, 4) float32: the corners of each mask's own extent, original pixels; 0 for an empty one."""
        left_top_size = self.mask.xywh()
        return np.concatenate([left_top_size[:, :2], left_top_size[:, :2] + left_top_size[:, 2:]], 1).astype(np.float32)

    def to_supervision(self) -> Any:
        """As `supervision.Detections`, with the scores as confidence, and `data["prompt"]`; masks become dense."""
        import supervision as sv

        return sv.Detections(
            xyxy=self.xyxy,
            confidence=self.score.copy(),
            mask=self.mask.dense(),
            data={"prompt": self.prompt.copy()},
        )


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The vectors of N images. An image that could not be read has NaN in its rows, and its error in `errors`.

    Attributes:
        cls: (N, D) float32, one vector an image: DINO's class token behind the last norm.
        patches: (N, h, w, D) float32, one vector a patch of the network's input; `None` where they were not asked for.
        placed: where each image lies in the network's input; `None` for one that could not be read.
        errors: number of the image → what is wrong with it; from a server also why its request was refused.
        stage_ns: for each image the nanoseconds of `decode`, `preprocess` and `engine`.
    """

    cls: npt.NDArray[np.float32]
    patches: npt.NDArray[np.float32] | None
    placed: tuple[Letterbox | None, ...]
    errors: Mapping[int, ImageError | ServerError] = field(default_factory=dict)
    stage_ns: tuple[Mapping[str, int], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.cls.ndim != 2:
            raise ShapeError(f"Embeddings.cls: expected (N, D), got {self.cls.shape}")
        n, d = self.cls.shape
        if len(self.placed) != n:
            raise ShapeError(f"Embeddings.placed: expected {n}, got {len(self.placed)}")
        if self.patches is not None and (self.patches.ndim != 4 or self.patches.shape[::3] != (n, d)):
            raise ShapeError(f"Embeddings.patches: expected ({n}, h, w, {d}), got {self.patches.shape}")

    def __len__(self) -> int:
        return len(self.cls)

    def __repr__(self) -> str:
        patches = "" if self.patches is None else ", {}×{} patches each".format(*self.patches.shape[1:3])
        bad = f", {len(self.errors)} could not be read" if self.errors else ""
        return f"Embeddings({len(self)} images, {self.cls.shape[1]} channels{patches}{bad})"

    def normalised(self) -> Embeddings:
        """Every vector scaled to a length of 1, so that a product of two is their cosine; a zero one stays zero."""
        patches = None if self.patches is None else unit_vectors(self.patches)
        return replace(self, cls=unit_vectors(self.cls), patches=patches)


def unit_vectors(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(…, D) to length 1; a zero vector stays zero. In float64: float32's squares overflow from 1.8e19."""
    wide = vectors.astype(np.float64)
    lengths = np.sqrt(np.einsum("...d,...d->...", wide, wide))[..., None]
    scaled: npt.NDArray[np.float32] = np.divide(wide, lengths, out=wide, where=lengths > 0).astype(np.float32)
    return scaled
