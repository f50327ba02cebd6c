"""The options of a request or a deployment, by the model's task: of the right types, in their ranges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from visionfast.embedding import check_key
from visionfast.errors import OptionError
from visionfast.pipeline import class_id_of
from visionfast.postprocess.detections import check_options
from visionfast.serving.wire import options_of
from visionfast.types import ModelSpec, Task

__all__ = ["DEFAULTS", "checked_options", "deployed_options", "options_of_request"]

DEFAULTS: Mapping[str, Any] = {"conf": 0.25, "iou": 0.7, "max_det": 300, "classes": None, "class_agnostic": False}
"""Of a detector."""

_DEPLOYED: Mapping[Task, Mapping[str, Any]] = {
    "detect": DEFAULTS,
    "segment": DEFAULTS,
    "embed": {"normalise": False},
    "prompt-segment": {"multimask": False, "image_cache_mb": 1024},
}
"""What a deployment may say, and what holds where it does not."""

_MOST_MB = 1 << 30


def checked_options(given: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The options of a request that are given, of `wire.options_of`, as the model's stage takes them.

    Raises:
        OptionError: one that there is not, of another type, or out of its range.
    """
    return _checked(given, spec, options_of(spec.task))


def deployed_options(given: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """What a pipeline of this model takes where a request says nothing: those that are given, and defaults.

    For `prompt-segment` also `image_cache_mb`, MiB of encoded images that a process keeps.

    Raises:
        OptionError: as for `checked_options`; also one that only a request may have.
    """
    defaults = _DEPLOYED[spec.task]
    return {**defaults, **_checked(given, spec, defaults)}


def options_of_request(given: Mapping[str, Any], deployed: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """What holds for a request: what it says, and where it says nothing what was deployed; as the stage takes them.

    Raises:
        OptionError: as for `checked_options`.
    """
    fixed = {"num_classes": len(spec.class_names)} if spec.task in ("detect", "segment") else {}
    return {**fixed, **deployed, **checked_options(given, spec)}


def _checked(given: Mapping[str, Any], spec: ModelSpec, known: Collection[str]) -> dict[str, Any]:
    if unknown := sorted(set(given) - set(known)):
        of = "" if known == options_of(spec.task) else f" for {spec.name}, a model for {spec.task}"
        raise OptionError(f"option {unknown[0]!r}: expected one of {', '.join(known)}{of}")
    return _CHECKS[spec.task](dict(given), spec)


def _of_objects(options: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    for name in ("conf", "iou"):
        if name in options and (isinstance(options[name], bool) or not isinstance(options[name], (int, float))):
            raise OptionError(f"{name}: expected a number from 0 to 1, got {options[name]!r}")
    max_det = options.get("max_det", DEFAULTS["max_det"])
    if isinstance(max_det, bool) or not isinstance(max_det, int):
        raise OptionError(f"max_det: expected a whole number, at least 1, got {max_det!r}")
    _check_truth(options, "class_agnostic")
    if (classes := options.get("classes")) is not None:
        if not isinstance(classes, (list, tuple)) or not all(type(one) in (int, str) for one in classes):
            raise OptionError(f"classes: expected a list of names or ids, got {classes!r}")
        options["classes"] = [class_id_of(one, spec.class_names) for one in classes]
    ranged = {**DEFAULTS, **options}
    check_options(
        num_classes=len(spec.class_names), **{name: ranged[name] for name in ("conf", "iou", "max_det", "classes")}
    )
    return options


def _of_vectors(options: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    _check_truth(options, "normalise", "patches")
    return options


def _of_masks(options: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Of these, what has to fit the image is left to `PromptSegmenter`."""
    _check_truth(options, "multimask", "logits")
    if "image_key" in options:
        check_key(options["image_key"])
    size = options.get("image_cache_mb", 0)
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < _MOST_MB:
        raise OptionError(f"image_cache_mb: expected a whole number of MiB, at least 0, got {size!r}")
    if (everything := options.get("everything")) is None:
        return options
    if not isinstance(everything, dict) or "progress" in everything:
        raise OptionError(
            f'everything: expected its options, such as {{"points_per_side": 16}}, got {everything!r:.80}'
        )
    if others := sorted(set(options) - {"everything"}):
        raise OptionError(f"everything: expected it alone, got {others[0]} too; its own options stand inside it")
    return options


_CHECKS: Mapping[Task, Callable[[dict[str, Any], ModelSpec], dict[str, Any]]] = {
    "detect": _of_objects,
    "segment": _of_objects,
    "embed": _of_vectors,
    "prompt-segment": _of_masks,
}


def _check_truth(options: Mapping[str, Any], *names: str) -> None:
    """Raises `OptionError` for one that is neither true nor false."""
    for name in names:
        if not isinstance(options.get(name, False), bool):
            raise OptionError(f"{name}: expected true or false, got {options[name]!r}")
