"""`visionfast predict` on a detector's engine: many files in, every one of them answered."""

from __future__ import annotations

import glob
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, OptionError
from visionfast.image_files import IMAGE_SUFFIXES, count_deeper
from visionfast.pipeline import Detector
from visionfast.predict_output import report
from visionfast.results import Detections
from visionfast.terminal import one_line

__all__ = ["Found", "detected", "expand", "run", "tell_overlooked"]


def expand(sources: Sequence[str]) -> list[Path]:
    """Files, the images in directories, and what globs match, in the order given, each once.

    Raises:
        OptionError: a directory without an image or that cannot be read, or a glob that matches nothing.
    """
    found: dict[Path, None] = {}
    for source in sources:
        try:
            found.update(dict.fromkeys(_expanded(source)))
        except OSError as error:
            raise OptionError(f"{source}: cannot be read ({error.strerror})") from error
    return list(found)


def tell_overlooked(sources: Sequence[str]) -> None:
    """A line on stderr for each directory that has images in folders below it, which `expand` does not look at."""
    for source in sources:
        if os.path.isdir(source) and (count := count_deeper(source)):  # noqa: PTH112
            print(f"visionfast: {one_line(_deeper(source, count))}", file=sys.stderr)


def _deeper(source: str, count: int) -> str:
    of_images = f"{count} images are" if count > 1 else "1 image is"
    pattern = f"{glob.escape(source.rstrip('/'))}/**/*"
    return f"{of_images} in folders below {source}, and not looked at; '{pattern}' takes them too"


def _expanded(source: str) -> list[Path]:
    path = Path(source)
    # Unlike pathlib's, these raise nothing where a folder on the way is closed: such a file is that one image's error.
    if os.path.isdir(path):  # noqa: PTH112
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES and p.is_file())
        if not inside:
            deeper = f"; {_deeper(source, count)}" if (count := count_deeper(path)) else ""
            raise OptionError(f"{source}: expected a directory with images, found none in it{deeper}")
        return inside
    if not os.path.exists(path) and glob.has_magic(source):  # noqa: PTH110
        # Path.glob refuses absolute patterns.
        matches = sorted(Path(p) for p in glob.glob(source, recursive=True))  # noqa: PTH207
        matches = [p for p in matches if p.is_file()]
        if not matches:
            raise OptionError(f"{source}: expected a pattern that matches images, it matches nothing")
        return matches
    return [path]


def run(detector: Detector, paths: Sequence[Path], *, save: Path | None, json_to: str | None) -> int:
    """Answers the files; what comes of each, and what is raised, is said at `predict_output.report`.

    Returns:
        how many files could not be answered.
    """
    class_names = detector.class_names
    answers = (
        (path, answer if isinstance(answer, ImageError) else Found(answer, class_names))
        for path, answer in detected(detector, paths)
    )
    return report(answers, paths, save=save, json_to=json_to)


def detected(detector: Detector, paths: Sequence[Path]) -> Iterator[tuple[Path, Detections | ImageError]]:
    """Every file with its answer, in order; asked as they are wanted, a batch at a time."""
    batch = detector.spec.batch
    for first in range(0, len(paths), batch):
        some = paths[first : first + batch]
        yield from zip(some, detector(some, on_error="return"), strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A detector's answer for one image, on its way out."""

    detections: Detections
    class_names: Sequence[str]

    @property
    def image_hw(self) -> tuple[int, int]:
        return self.detections.image_hw

    @property
    def stage_ns(self) -> Mapping[str, int]:
        return self.detections.stage_ns

    def words(self) -> str:
        counted = Counter(self.class_names[int(i)] for i in self.detections.class_id)
        return ", ".join(f"{count} {name}" for name, count in counted.items()) or "nothing found"

    def record(self) -> dict[str, Any]:
        found = self.detections
        masks = found.mask.rle() if found.mask is not None else None
        objects = [
            {
                "xyxy": [round(float(value), 2) for value in found.xyxy[i]],
                "confidence": round(float(found.confidence[i]), 4),
                "class_id": int(found.class_id[i]),
                "class_name": self.class_names[int(found.class_id[i])],
                **({"mask": masks[i]} if masks is not None else {}),
            }
            for i in range(len(found))
        ]
        return {"detections": objects}

    def draw(self, image_rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        from visionfast.draw import draw

        return draw(image_rgb, self.detections, self.class_names)
