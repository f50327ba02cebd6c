"""The options of a request or a deployment: of the right types, in their ranges, classes by their ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from visionfast.errors import OptionError
from visionfast.pipeline import class_id_of
from visionfast.postprocess.detections import check_options
from visionfast.serving.wire import OPTIONS
from visionfast.types import ModelSpec

__all__ = ["DEFAULTS", "checked_options", "deployed_options"]

DEFAULTS: Mapping[str, Any] = {"conf": 0.25, "iou": 0.7, "max_det": 300, "classes": None, "class_agnostic": False}


def checked_options(given: Mapping[str, Any], class_names: tuple[str, ...]) -> dict[str, Any]:
    """Those of `OPTIONS` that are given, as `postprocess` takes them.

    Raises:
        OptionError: one that there is not, of another type, or out of its range.
    """
    if unknown := sorted(set(given) - set(OPTIONS)):
        raise OptionError(f"option {unknown[0]!r}: expected one of {', '.join(OPTIONS)}")
    options = dict(given)
    for name in ("conf", "iou"):
        if name in options and (isinstance(options[name], bool) or not isinstance(options[name], (int, float))):
            raise OptionError(f"{name}: expected a number from 0 to 1, got {options[name]!r}")
    max_det = options.get("max_det", DEFAULTS["max_det"])
    if isinstance(max_det, bool) or not isinstance(max_det, int):
        raise OptionError(f"max_det: expected a whole number, at least 1, got {max_det!r}")
    if not isinstance(options.get("class_agnostic", False), bool):
        raise OptionError(f"class_agnostic: expected true or false, got {options['class_agnostic']!r}")
    if (classes := options.get("classes")) is not None:
        if not isinstance(classes, (list, tuple)) or not all(type(one) in (int, str) for one in classes):
            raise OptionError(f"classes: expected a list of names or ids, got {classes!r}")
        options["classes"] = [class_id_of(one, class_names) for one in classes]
    ranged = {**DEFAULTS, **options}
    check_options(
        num_classes=len(class_names), **{name: ranged[name] for name in ("conf", "iou", "max_det", "classes")}
    )
    return options


def deployed_options(given: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """What a pipeline of this model takes where a request says nothing: those that are given, and `DEFAULTS`.

    Raises:
        OptionError: as for `checked_options`.
    """
    return {**DEFAULTS, **checked_options(given, spec.class_names)}
