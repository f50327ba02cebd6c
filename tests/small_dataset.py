"""A data set in COCO's format, written as a test wants it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["annotation", "document", "write_dataset"]


def annotation(number: int, image: int, category: int = 1, **fields: Any) -> dict[str, Any]:
    """A box of 20 × 10 pixels, with whatever else is said of it."""
    box = {"bbox": [10, 20, 20, 10], "area": 200, "iscrowd": 0}
    return {"id": number, "image_id": image, "category_id": category} | box | fields


def document(
    images: Mapping[str, tuple[int, int]],
    annotations: Sequence[dict[str, Any]] = (),
    categories: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Images, name → height and width, have the ids 1, 2, …; categories are `kind 0` with the id 1, and so on."""
    named = {1: "kind 0", 2: "kind 1", 3: "kind 2"} if categories is None else categories
    return {
        "images": [
            {"id": number, "file_name": name, "height": height, "width": width}
            for number, (name, (height, width)) in enumerate(images.items(), 1)
        ],
        "annotations": list(annotations),
        "categories": [{"id": number, "name": name} for number, name in named.items()],
    }


def write_dataset(folder: Path, content: Any, file: str = "annotations/instances_val.json") -> Path:
    """The folder, with `content` in it as JSON, and `val/` for images."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")
    (folder / "val").mkdir(exist_ok=True)
    return folder
