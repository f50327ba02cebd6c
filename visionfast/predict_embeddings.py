"""`visionfast predict` on an embedder's engine: vectors as JSON, and the patches as a picture of their components."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, ShapeError
from visionfast.postprocess.principal import PrincipalBasis, principal_basis
from visionfast.predict_output import report
from visionfast.sessions.embeddings import Embedded
from visionfast.types import Letterbox

__all__ = ["Described", "Embeds", "draw_patches", "embedded", "run_embedder", "shared_basis"]

_SIDE = 1024
"""Pixels of a picture's longer side: there are no more than some dozen patches to be seen along it."""

_PATCH_SIDE = 8
"""Pixels that a patch has at least, where the picture's side stays within `_SIDE_MOST`."""

_SIDE_MOST = 4096
_DIMMED = 0.35
_GAP = 8
_SAMPLE = 16_384
"""Vectors that a shared basis is made of at most: 25 MB of DINOv2 ViT-S, 100 MB of ViT-g."""


class Embeds(Protocol):
    """What gives files vectors: an `Embedder`, or one on a server."""

    @property
    def dim(self) -> int:
        """Channels of a vector."""
        ...

    @property
    def grid_hw(self) -> tuple[int, int]:
        """Patches of an image."""
        ...

    def stream(
        self, items: Sequence[Path], *, load: Callable[[Path], Path], patches: bool
    ) -> Generator[tuple[Path, Embedded | ImageError], None, None]:
        """As `Embedder.stream`."""
        ...


def run_embedder(
    embedder: Embeds,
    paths: Sequence[Path],
    *,
    save: Path | None,
    json_to: str | None,
    shared_colours: bool = False,
) -> int:
    """Embeds the files; what comes of each, and what is raised, is said at `predict_output.report`.

    Args:
        embedder: that gives the vectors.
        paths: of the images.
        save: folder for the pictures.
        json_to: file for the JSON lines; `-` is stdout.
        shared_colours: one basis for all pictures, so that a colour means the same in each; the files are embedded
            twice for that, the first time for the basis.

    Returns:
        how many files could not be answered.
    """
    basis = shared_basis(embedder, paths) if shared_colours and save is not None else None
    answers = (
        (path, answer if isinstance(answer, ImageError) else Described(answer, basis))
        for path, answer in embedded(embedder, paths, patches=True)
    )
    return report(answers, paths, save=save, json_to=json_to)


def shared_basis(embedder: Embeds, paths: Sequence[Path]) -> PrincipalBasis | None:
    """One basis for the patches of several images, in bounded memory: of many images, some patches of each.

    The patches are taken evenly, the same ones in every run. `None` where no image can be read.
    """
    grid_h, grid_w = embedder.grid_hw
    of_each = min(grid_h * grid_w, max(1, _SAMPLE // max(1, len(paths))))
    taken = np.linspace(0, grid_h * grid_w - 1, of_each).round().astype(np.int64)
    stride = max(1, -(-len(paths) // _SAMPLE))  # of more images than that, not even one of each
    sample = [
        _patches(answer).reshape(-1, embedder.dim)[taken]
        for _, answer in embedded(embedder, paths[::stride], patches=True)
        if isinstance(answer, Embedded)
    ]
    return principal_basis(np.concatenate(sample)) if sample else None


class _NotFiniteError(ImageError):
    """The engine's numbers for this image are none."""

    kind = "not-finite"


def embedded(embedder: Embeds, paths: Sequence[Path], *, patches: bool) -> Iterator[tuple[Path, Embedded | ImageError]]:
    """Every file with its vectors, all of them finite, or what is wrong; in order, decoded beside the engine."""
    with contextlib.closing(embedder.stream(paths, load=lambda path: path, patches=patches)) as answers:
        for path, answer in answers:
            if isinstance(answer, ImageError) or _is_finite(answer):
                yield path, answer
            else:
                reason = "the engine gives NaN or Inf for it; `visionfast certify` says how far it is from PyTorch"
                yield path, _NotFiniteError(str(path), reason)


def _is_finite(answer: Embedded) -> bool:
    vectors = [answer.cls] if answer.patches is None else [answer.cls, answer.patches]
    return all(np.isfinite(one).all() for one in vectors)


def _patches(answer: Embedded) -> npt.NDArray[np.float32]:
    assert answer.patches is not None
    return answer.patches


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """An embedder's answer for one image, on its way out; `basis` is `None` where the image has its own."""

    embedded: Embedded
    basis: PrincipalBasis | None = None

    @property
    def image_hw(self) -> tuple[int, int]:
        return self.embedded.placed.image_hw

    @property
    def stage_ns(self) -> Mapping[str, int]:
        return self.embedded.stage_ns

    def words(self) -> str:
        h, w, channels = _patches(self.embedded).shape
        return f"{channels} channels, {w}×{h} patches"

    def record(self) -> dict[str, Any]:
        # A float32's shortest digits, which give the same float32 when they are read.
        cls = [float(str(value)) for value in self.embedded.cls]
        return {"cls": cls, "grid_hw": list(_patches(self.embedded).shape[:2])}

    def draw(self, image_rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        patches = _patches(self.embedded)
        basis = principal_basis(patches) if self.basis is None else self.basis
        return draw_patches(image_rgb, basis.colours(patches), self.embedded.placed)


def draw_patches(
    image_rgb: npt.NDArray[np.uint8], colours: npt.NDArray[np.uint8], placed: Letterbox
) -> npt.NDArray[np.uint8]:
    """The picture with the network's window outlined, and beside it (below a wide one) the patches' colours in place.

    All of the picture is shown, for a crop is what a network most often missed something by. Each patch is one square
    of one colour: a smooth transition would show detail that no vector has.

    Args:
        image_rgb: (H, W, 3) uint8, the image the patches belong to.
        colours: (h, w, 3) uint8 of each patch (`principal_basis`).
        placed: where the image lies in the network's input.

    Returns:
        (H', W', 3) uint8 RGB, scaled to a convenient size.

    Raises:
        ShapeError: the image is not (H, W, 3) uint8, or not of the size that was embedded.
    """
    import cv2

    height, width = placed.image_hw
    if image_rgb.shape != (height, width, 3) or image_rgb.dtype != np.uint8:
        raise ShapeError(
            f"image_rgb: expected {(height, width, 3)} uint8, got {image_rgb.shape} {image_rgb.dtype.name}"
        )
    gains = placed.resized_hw[0] / height, placed.resized_hw[1] / width  # original pixels × gain = input pixels
    window_hw = placed.size_hw[0] / gains[0], placed.size_hw[1] / gains[1]
    scale = min(1.0, _SIDE / max(height, width))
    scale = max(scale, *(_PATCH_SIDE * cells / side for cells, side in zip(colours.shape[:2], window_hw, strict=True)))
    scale = min(scale, _SIDE_MOST / max(height, width))
    shown_h, shown_w = max(1, round(height * scale)), max(1, round(width * scale))
    left = cv2.resize(image_rgb, (shown_w, shown_h), interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    scales = shown_h / height / gains[0], shown_w / width / gains[1]  # input pixels × scale = shown pixels
    top, bottom = (round((y - placed.top) * scales[0]) for y in (0, placed.size_hw[0]))
    start, end = (round((x - placed.left) * scales[1]) for x in (0, placed.size_hw[1]))
    # The crop is rounded to whole input pixels, of which an enlargement shows some.
    top, start, bottom, end = max(0, top), max(0, start), min(shown_h, bottom), min(shown_w, end)
    right = (left * _DIMMED).astype(np.uint8)
    window_wh = max(1, end - start), max(1, bottom - top)
    tiles = cv2.resize(colours, window_wh, interpolation=cv2.INTER_NEAREST)
    right[top:bottom, start:end] = tiles[: bottom - top, : end - start]
    if (bottom - top, end - start) != (shown_h, shown_w):
        cv2.rectangle(left, (start, top), (end - 1, bottom - 1), (0, 0, 0), 3)
        cv2.rectangle(left, (start, top), (end - 1, bottom - 1), (255, 255, 255), 1)
    axis = 0 if width > 2 * height else 1
    gap = np.full((_GAP, shown_w, 3) if axis == 0 else (shown_h, _GAP, 3), 255, np.uint8)
    return np.concatenate([left, gap, right], axis=axis)
