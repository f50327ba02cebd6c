"""What the documentation copies from the code is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from visionfast.agreement import TOLERANCES
from visionfast.types import Precision

_MEASURES = {
    "IoU of a match": "min_iou",
    "confidence difference of a match": "max_confidence_difference",
    "objects without a match": "unmatched",
    "raw score difference": "max_score_difference",
    "raw box difference, input pixels": "max_box_difference_px",
    "mask IoU of a match": "min_mask_iou",
}


@pytest.mark.parametrize(("column", "precision"), [(1, "fp32"), (2, "fp16"), (3, "bf16")])
def test_tolerances(column: int, precision: Precision) -> None:
    text = (Path(__file__).parents[1] / "docs" / "build.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    (header,) = [cells for cells in rows if cells[0] == "worst allowed"]
    assert header[column] == f"`{precision}`"
    cells = {_MEASURES[row[0]]: row[column] for row in rows if row[0] in _MEASURES}
    assert cells.keys() == set(_MEASURES.values())
    bounds = {name: float(cell.strip("≤≥ ")) for name, cell in cells.items() if cell != "–"}
    assert bounds == TOLERANCES[precision]


def test_every_extra_that_is_named_exists() -> None:
    root = Path(__file__).parents[1]
    named = set()
    for path in (*(root / "visionfast").rglob("*.py"), *root.glob("*.md"), *(root / "docs").glob("*.md")):
        for extras in re.findall(r"(?:visionfast|'\.)\[([a-z,-]+)\]", path.read_text("utf-8")):
            named |= set(extras.split(","))
    declared = re.findall(r"^([a-z-]+) = \[", (root / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert {"build", "gpu", "openvino"} <= named <= set(declared)
