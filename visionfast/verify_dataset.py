"""A data set in COCO's format: its images, what is on them, and where their files are.

`instances_*.json` as https://cocodataset.org/#format-data has it, for detection. It is data from elsewhere: all that
is used of it is checked here, so that a mistake in it is named and not measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeGuard

from visionfast.errors import ImageError, ImageNotFoundError, OptionError
from visionfast.terminal import one_line
from visionfast.verify_segments import check_segmentation, segmentation_size

__all__ = ["CocoDataset", "DatasetImage", "LabelledObject", "annotation_file", "read_dataset"]

_MAX_INT = 2**63 - 1
_LOOKED_FOR = ("annotations/instances_*.json", "instances*.json", "_annotations.coco.json")


@dataclass(frozen=True, slots=True)
class LabelledObject:
    """One annotation.

    Attributes:
        category_id: key of `CocoDataset.categories`.
        xywh: left, top, width and height, original pixels.
        area: of the object itself, pixels: what makes it small, medium or large.
        crowd: a region of many that were not told apart: what is found in it counts neither way.
        segmentation: polygons or run lengths, as the file has them; `None` where they are not asked for.
    """

    category_id: int
    xywh: tuple[float, float, float, float]
    area: float
    crowd: bool
    segmentation: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class DatasetImage:
    """One image.

    Attributes:
        id: the file's number for it.
        file_name: below the images' folder.
        image_hw: pixels, as the file says; `None` where it does not.
        objects: on it, perhaps none.
    """

    id: int
    file_name: str
    image_hw: tuple[int, int] | None
    objects: tuple[LabelledObject, ...]


@dataclass(frozen=True, slots=True)
class CocoDataset:
    """A data set, read and checked.

    Attributes:
        annotations: the JSON file.
        sha256: of its bytes.
        folder: that the images' names are below.
        images: by ascending id, the order in which COCO's evaluation takes them.
        categories: id → name.
    """

    annotations: Path
    sha256: str
    folder: Path
    images: tuple[DatasetImage, ...]
    categories: Mapping[int, str]

    @property
    def has_masks(self) -> bool:
        """Whether the objects have a segmentation. All do or none: `read_dataset` sees to it."""
        return any(thing.segmentation is not None for image in self.images for thing in image.objects)

    def path(self, image: DatasetImage) -> Path:
        """An image's file, below `folder`. A link there is followed: data sets are often folders of links.

        Raises:
            ImageError: its name leads out of the folder.
        """
        return _below(self.folder, image.file_name)


def read_dataset(
    path: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    masks: bool = False,
) -> CocoDataset:
    """Reads and checks a data set.

    Args:
        path: its folder, with `annotations/instances_*.json`, `instances*.json` or `_annotations.coco.json` in it, or
            the JSON file itself.
        images: folder of the images; default: the one of those that are usual in which there is one.
        limit: only the first so many images, in the file's order.
        masks: take the objects' segmentations too, where they have some.

    Raises:
        OptionError: there is none, there are several, or something in it is not as it should be.
    """
    file = annotation_file(Path(path))
    try:
        content = file.read_bytes()
        document = json.loads(content)
    except OSError as error:
        raise OptionError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{file}: expected COCO's JSON, but it is damaged ({error})") from error
    reader = _Reader(file, document)
    found = reader.images(limit, masks)
    return CocoDataset(
        annotations=file,
        sha256=hashlib.sha256(content).hexdigest(),
        folder=_image_folder(file, found, images),
        images=tuple(sorted(found, key=lambda image: image.id)),
        categories=reader.categories,
    )


def annotation_file(path: Path) -> Path:
    """The JSON file of `read_dataset`'s `path`; raises `OptionError` where there is none, or are several."""
    if path.is_file():
        return path
    found = [file for pattern in _LOOKED_FOR for file in sorted(path.glob(pattern)) if file.is_file()]
    if not found:
        raise OptionError(f"{path}: expected a data set in COCO's format, with {' or '.join(_LOOKED_FOR)} in it")
    if len(found) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in found)
        raise OptionError(f"{path}: expected one file of annotations, got {names}; name the one that you mean")
    return found[0]


def _image_folder(file: Path, images: Sequence[DatasetImage], named: str | os.PathLike[str] | None) -> Path:
    """The named folder, or the first of the usual ones in which one of the first images is."""
    if named is not None:
        if not Path(named).is_dir():
            raise OptionError(f"{os.fspath(named)}: expected the images' folder")
        return Path(named)
    root = file.parent.parent if file.parent.name == "annotations" else file.parent
    split = file.stem.removeprefix("instances_")
    folders = [root / split, root / "images" / split, root / "images", root]
    for folder in folders:
        if folder.is_dir() and any(_is_there(folder, image) for image in images[:100]):
            return folder
    looked = ", ".join(str(folder) for folder in folders)
    raise OptionError(f"{file}: none of its first images is in {looked}; name their folder (--images)")


def _is_there(folder: Path, image: DatasetImage) -> bool:
    try:
        return _below(folder, image.file_name).is_file()
    except (ImageError, OSError):
        return False


def _below(folder: Path, name: str) -> Path:
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    if not name.strip() or "\0" in name or posix.is_absolute() or windows.anchor or ".." in windows.parts:
        raise ImageNotFoundError(one_line(name), f"expected a file below {folder}, got a name that leads elsewhere")
    return folder / posix


class _Reader:
    """A document's parts, each checked as it is taken; every error says where it is."""

    def __init__(self, file: Path, document: Any) -> None:
        if not isinstance(document, dict):
            raise OptionError(f"{file}: expected COCO's JSON, an object, got {type(document).__name__}")
        self._file = file
        self._document = document
        self.categories = self._categories()

    def _bad(self, where: str, expected: str, got: object) -> OptionError:
        shown = repr(got)
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        return OptionError(f"{self._file}: {where}: expected {expected}, got {one_line(shown)}")

    def _list(self, key: str) -> list[dict[str, Any]]:
        value = self._document.get(key)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._bad(key, "a list of objects", value)
        return value

    def _ids(self, key: str) -> Iterable[tuple[int, dict[str, Any]]]:
        seen = set()
        for position, item in enumerate(self._list(key)):
            number = item.get("id")
            if not _is_whole(number):
                raise self._bad(f"{key}[{position}]: id", "a whole number", number)
            if number in seen:
                raise self._bad(f"{key}[{position}]: id", "each once", number)
            seen.add(number)
            yield number, item

    def _categories(self) -> dict[int, str]:
        categories: dict[int, str] = {}
        for number, item in self._ids("categories"):
            name = item.get("name")
            if not isinstance(name, str) or not name.strip():
                raise self._bad(f"category {number}: name", "text", name)
            categories[number] = name
        return categories

    def images(self, limit: int | None, masks: bool) -> list[DatasetImage]:
        """The first `limit`, with their objects."""
        listed = list(self._ids("images"))
        if not listed:
            raise self._bad("images", "at least one", [])
        known = {number for number, _ in listed}
        taken = dict(listed[:limit])
        objects = self._objects(known, taken, masks)
        return [self._image(number, item, tuple(objects.get(number, ()))) for number, item in taken.items()]

    def _image(self, number: int, item: dict[str, Any], objects: tuple[LabelledObject, ...]) -> DatasetImage:
        name, height, width = item.get("file_name"), item.get("height"), item.get("width")
        if not isinstance(name, str):
            raise self._bad(f"image {number}: file_name", "text", name)
        segmented = [thing.segmentation for thing in objects if thing.segmentation is not None]
        if height is None and width is None and not segmented:
            return DatasetImage(number, name, None, objects)
        if not (_is_whole(height) and _is_whole(width) and height > 0 and width > 0):
            raise self._bad(f"image {number}: height, width", "pixels", (height, width))
        for size in filter(None, map(segmentation_size, segmented)):
            if size != (height, width):
                raise self._bad(f"image {number}: an object's run lengths", f"for {height}×{width} pixels", size)
        return DatasetImage(number, name, (height, width), objects)

    def _objects(
        self, known: set[int], taken: Mapping[int, dict[str, Any]], masks: bool
    ) -> dict[int, list[LabelledObject]]:
        """Image's id → its objects."""
        objects: dict[int, list[LabelledObject]] = {}
        with_masks: Counter[bool] = Counter()
        for position, item in enumerate(self._list("annotations")):
            where = f"annotation {item.get('id', f'[{position}]')}"
            if not _is_whole(image := item.get("image_id")) or image not in known:
                raise self._bad(f"{where}: image_id", "the id of an image", image)
            if image not in taken:
                continue
            thing = self._object(where, item, masks)
            with_masks[thing.segmentation is not None] += 1
            objects.setdefault(image, []).append(thing)
        if masks and len(with_masks) == 2:
            raise self._bad("annotations", "a segmentation for every one or for none", f"{with_masks[False]} without")
        return objects

    def _object(self, where: str, item: dict[str, Any], masks: bool) -> LabelledObject:
        category, box, area, crowd = (item.get(key) for key in ("category_id", "bbox", "area", "iscrowd"))
        if not _is_whole(category) or category not in self.categories:
            raise self._bad(f"{where}: category_id", "the id of a category", category)
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)) or min(box[2:]) < 0:
            raise self._bad(f"{where}: bbox", "[left, top, width, height] in pixels", box)
        if not _is_number(area) or area < 0:
            raise self._bad(f"{where}: area", "the object's pixels", area)
        if crowd not in (None, 0, 1):
            raise self._bad(f"{where}: iscrowd", "0 or 1", crowd)
        segmentation = item.get("segmentation") if masks else None
        if segmentation and (wrong := check_segmentation(segmentation)):
            raise self._bad(f"{where}: segmentation", wrong, segmentation)
        return LabelledObject(
            category, (float(box[0]), float(box[1]), float(box[2]), float(box[3])), float(area), bool(crowd),
            segmentation or None,
        )  # fmt: skip


def _is_whole(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) <= _MAX_INT


def _is_number(value: object) -> TypeGuard[float]:
    # JSON's whole numbers have as many digits as they like: not every one is a float.
    return _is_whole(value) or (type(value) is float and math.isfinite(value))
