"""What the documentation copies from the code is what the code says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from visionfast.agreement import EMBED_TOLERANCES, PROMPT_TOLERANCES, TOLERANCES
from visionfast.cli import build_verb
from visionfast.cli_embed import embed_verb
from visionfast.cli_predict import predict_verb
from visionfast.cli_search import search_verb
from visionfast.cli_verify import verify_verb
from visionfast.types import Precision

_DOCS = Path(__file__).parents[1] / "docs"
_MEASURES = {
    "IoU of a match": "min_iou",
    "confidence difference of a match": "max_confidence_difference",
    "objects without a match": "unmatched",
    "raw score difference": "max_score_difference",
    "raw box difference, input pixels": "max_box_difference_px",
    "mask IoU of a match": "min_mask_iou",
}
_PROMPT_MEASURES = {
    "cosine of the embeddings": "min_embedding_cosine",
    "IoU of a mask": "min_mask_iou",
    "predicted IoU difference": "max_predicted_iou_difference",
    "logit difference, parts of their root mean square": "max_logit_difference",
}
_EMBED_MEASURES = {
    "cosine of the class tokens": "min_cls_cosine",
    "cosine of a patch's vectors": "min_patch_cosine",
    "difference of a vector's length, parts of it": "max_norm_difference",
    "difference of two images' similarity": "max_similarity_difference",
    "neighbours out of order": "moved_neighbours",
}


def _rows(page: str) -> list[list[str]]:
    text = (_DOCS / page).read_text("utf-8")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


@pytest.mark.parametrize(
    ("page", "measures", "tolerances"),
    [
        ("build.md", _MEASURES, TOLERANCES),
        ("segment.md", _PROMPT_MEASURES, PROMPT_TOLERANCES),
        ("embed.md", _EMBED_MEASURES, EMBED_TOLERANCES),
    ],
)
@pytest.mark.parametrize(("column", "precision"), [(1, "fp32"), (2, "fp16"), (3, "bf16")])
def test_tolerances(
    column: int,
    precision: Precision,
    page: str,
    measures: Mapping[str, str],
    tolerances: Mapping[Precision, Mapping[str, float]],
) -> None:
    rows = _rows(page)
    (header,) = [cells for cells in rows if cells[0] == "worst allowed"]
    assert header[column] == f"`{precision}`"
    cells = {measures[row[0]]: row[column] for row in rows if row[0] in measures}
    assert cells.keys() == set(measures.values())
    bounds = {name: float(cell.strip("≤≥ ")) for name, cell in cells.items() if cell != "–"}
    assert bounds == tolerances[precision]


def test_every_option_of_predict_that_is_named_exists() -> None:
    pages = [(_DOCS / page).read_text("utf-8") for page in ("predict.md", "segment.md")]
    named = set(re.findall(r"--[a-z][a-z-]*", " ".join(pages))) - {"--model", "--precision"}  # of build
    parameters = inspect.signature(predict_verb).parameters
    declared = {f"--{name.replace('_', '-')}" for name in parameters if name not in ("engine", "sources")}
    assert {"--json", "--point", "--everything", "--boxes-from", "--cache"} <= named <= declared


def test_every_option_of_embed_and_search_is_named() -> None:
    named = set(re.findall(r"--[a-z][a-z0-9-]*", (_DOCS / "embed.md").read_text("utf-8")))
    declared = {
        f"--{name.replace('_', '-')}"
        for verb in (embed_verb, search_verb)
        for name in inspect.signature(verb).parameters
        if name not in ("engine", "folder", "output", "table", "queries", "k")
    }
    others = {
        f"--{name.replace('_', '-')}"
        for verb in (build_verb, predict_verb)
        for name in inspect.signature(verb).parameters
    }
    assert declared <= named <= declared | others | {"--engine"}


def test_every_option_of_build_is_named() -> None:
    named = set(re.findall(r"--[a-z][a-z0-9-]*", (_DOCS / "build.md").read_text("utf-8")))
    assert named == {f"--{name.replace('_', '-')}" for name in inspect.signature(build_verb).parameters}


def test_every_option_of_verify_is_named() -> None:
    named = set(re.findall(r"--[a-z][a-z0-9-]*", (_DOCS / "verify.md").read_text("utf-8")))
    parameters = inspect.signature(verify_verb).parameters
    assert named == {f"--{name.replace('_', '-')}" for name in parameters if name != "engine"}


def test_every_extra_that_is_named_exists() -> None:
    root = Path(__file__).parents[1]
    named = set()
    for path in (*(root / "visionfast").rglob("*.py"), *root.glob("*.md"), *(root / "docs").glob("*.md")):
        for extras in re.findall(r"(?:visionfast|'\.)\[([a-z,-]+)\]", path.read_text("utf-8")):
            named |= set(extras.split(","))
    declared = re.findall(r"^([a-z-]+) = \[", (root / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert {"build", "gpu", "openvino"} <= named <= set(declared)


def test_every_public_name_that_is_shown_exists() -> None:
    import visionfast

    pages = [*Path(__file__).parents[1].glob("*.md"), *_DOCS.glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"\bvf\.(\w+)", page.read_text("utf-8"))}
    assert {"Detector", "PromptSegmenter", "EmbeddingCache"} <= shown <= set(visionfast.__all__)
