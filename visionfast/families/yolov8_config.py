"""A YOLO architecture as data: read strictly from a checkpoint's `yaml`, or found by the tensors' shapes.

ultralytics' `parse_model` evaluates parts of its configuration (`activation` is passed to `eval`, module
names are looked up, string arguments are searched among the local variables). A checkpoint's configuration
comes from an untrusted file, so a new one is written here from what passes an allow-list, and nothing else
reaches ultralytics.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visionfast.checkpoint.pickled import printable
from visionfast.errors import CheckpointError, UnsupportedModelError

__all__ = ["ARCHITECTURES", "YoloConfig", "candidate_configs", "read_config", "scale_of"]

# (depth, width) of each published size.
ARCHITECTURES: dict[str, dict[str, tuple[float, float]]] = {
    "yolov8": {"n": (0.33, 0.25), "s": (0.33, 0.5), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.0, 1.25)},
    "yolo11": {"n": (0.5, 0.25), "s": (0.5, 0.5), "m": (0.5, 1.0), "l": (1.0, 1.0), "x": (1.0, 1.5)},
}
# Their published descriptions, inside the ultralytics package.
_TEMPLATES = {"yolov8": "cfg/models/v8/yolov8{task}.yaml", "yolo11": "cfg/models/11/yolo11{task}.yaml"}

_HEADS = frozenset({"Detect", "Segment"})
_BLOCKS = frozenset(
    {"C2", "C2PSA", "C2f", "C3Ghost", "C3k2", "Concat", "Conv", "DWConv", "GhostConv", "SPPF", "nn.Upsample"}
)
_STRINGS = frozenset({"nc", "None", "True", "False", "nearest", "bilinear"})
_ACTIVATIONS = frozenset(
    {"ELU", "GELU", "Hardswish", "Identity", "LeakyReLU", "Mish", "ReLU", "ReLU6", "SiLU", "Softplus", "Tanh"}
)
_ACTIVATION_ARGUMENTS = frozenset({"alpha", "negative_slope", "inplace", "beta", "threshold"})
_MAX_LAYERS = 100
_MAX_REPEATS = 64
_MAX_CHANNELS = 8192
_MAX_SMALL = 64  # kernel, stride, padding, groups, dilation
_MAX_CLASSES = 100_000


@dataclass(frozen=True, slots=True)
class YoloConfig:
    """A checked configuration.

    Attributes:
        yaml: for ultralytics' `parse_model`: only known keys, only checked values.
        generation: `yolov8` or `yolo11`, by its blocks.
        scale: `n` to `x`, or empty when its depth and width are not published ones.
        task: `detect` or `segment`.
        num_classes: that the head has.
    """

    yaml: Mapping[str, Any]
    generation: str
    scale: str
    task: str
    num_classes: int


def read_config(raw: object, source: str) -> YoloConfig:
    """Checks a checkpoint's `yaml`.

    Raises:
        UnsupportedModelError: it has a layer or an activation that is not on the list, or another head.
        CheckpointError: it is not a configuration at all.
    """
    if not isinstance(raw, Mapping):
        raise _bad(source, f"its architecture is a {type(raw).__name__}, not a mapping")
    if raw.get("end2end"):
        raise UnsupportedModelError(f"{source}: an end-to-end (NMS-free) head is not handled; expected YOLOv8 or 11")
    channels = raw.get("channels", raw.get("ch", 3))
    if channels != 3:
        raise UnsupportedModelError(f"{source}: takes {printable(channels)} channels; expected 3 (RGB)")
    num_classes = _integer(raw.get("nc"), 1, _MAX_CLASSES, source, "nc")
    backbone = list(_layers(raw.get("backbone"), 0, source, "backbone"))
    head = list(_layers(raw.get("head"), len(backbone), source, "head"))
    if len(backbone) + len(head) > _MAX_LAYERS:
        raise _bad(source, f"its architecture has more than {_MAX_LAYERS} layers")
    layers = backbone + head
    if not head or layers[-1][2] not in _HEADS or any(layer[2] in _HEADS for layer in layers[:-1]):
        raise _bad(source, "its architecture does not end in one detection head")
    generation = "yolo11" if any(layer[2] == "C3k2" for layer in layers) else "yolov8"
    depth, width, max_channels, scale = _scaling(raw, source)
    yaml: dict[str, Any] = {
        "nc": num_classes,
        # parse_model asks for the scale's letter too: it decides on the kind of blocks in m, l and x.
        "scales": {scale or "custom": [depth, width, max_channels]},
        "scale": scale or "custom",
        "backbone": backbone,
        "head": head,
        "reg_max": _integer(raw.get("reg_max", 16), 2, 64, source, "reg_max"),
    }
    if raw.get("activation"):
        yaml["activation"] = _activation(raw["activation"], source)
    task = "segment" if layers[-1][2] == "Segment" else "detect"
    published = scale if scale in ARCHITECTURES[generation] else scale_of(generation, depth, width)
    return YoloConfig(yaml, generation, published, task, num_classes)


def scale_of(generation: str, depth: float, width: float) -> str:
    """The letter of a published depth and width, or empty."""
    for letter, published in ARCHITECTURES[generation].items():
        if math.isclose(depth, published[0]) and math.isclose(width, published[1]):
            return letter
    return ""


def candidate_configs(shapes: Mapping[str, tuple[int, ...]], source: str) -> Iterator[YoloConfig]:
    """Configurations that a state dict without one may have, by its first layer's width and its head.

    Args:
        shapes: parameter name (`0.conv.weight`) → shape.
        source: what messages call the file.
    """
    import importlib.util

    import yaml  # type: ignore[import-untyped]

    # Found, not imported: importing it logs.
    package = importlib.util.find_spec("ultralytics")
    if package is None or package.origin is None:
        raise UnsupportedModelError(
            f"{source}: a state dict's architecture is looked up in ultralytics: pip install 'visionfast[build]'"
        )
    first = shapes.get("0.conv.weight", (0,))[0]
    head = max((int(key.split(".", 1)[0]) for key in shapes if key.split(".", 1)[0].isdecimal()), default=0)
    classes = shapes.get(f"{head}.cv3.0.2.weight", (0,))[0]
    task = "-seg" if f"{head}.proto.cv1.conv.weight" in shapes else ""
    generation = "yolo11" if f"{head}.cv3.0.0.0.conv.weight" in shapes else "yolov8"
    path = Path(package.origin).parent / _TEMPLATES[generation].format(task=task)
    template = yaml.safe_load(path.read_text(encoding="utf-8"))
    for letter, (_depth, width) in ARCHITECTURES[generation].items():
        if 8 * math.ceil(64 * width / 8) == first:
            yield read_config({**template, "nc": classes, "scale": letter}, source)


# ---- the parts --------------------------------------------------------------------------------------------


def _bad(source: str, what: str) -> CheckpointError:
    return CheckpointError(f"{source}: damaged or made up: {what}; fetch or save the file again")


def _integer(value: object, low: int, high: int, source: str, what: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _bad(source, f"{what} is {printable(value, 20)}, not a whole number from {low} to {high}")
    return value


def _number(value: object, low: float, high: float, source: str, what: str) -> float:
    if type(value) not in (int, float) or not low <= float(value) <= high:  # type: ignore[arg-type]
        raise _bad(source, f"{what} is {printable(value, 20)}, not a number from {low} to {high}")
    return float(value)  # type: ignore[arg-type]


def _scaling(raw: Mapping[Any, Any], source: str) -> tuple[float, float, float, str]:
    """(depth, width, max_channels, scale letter or empty)."""
    depth, width, limit = raw.get("depth_multiple", 1.0), raw.get("width_multiple", 1.0), 1e9
    scale, scales = raw.get("scale"), raw.get("scales")
    if isinstance(scales, Mapping) and scales:
        row = scales.get(scale, next(iter(scales.values())))
        if not isinstance(row, (list, tuple)) or len(row) != 3:
            raise _bad(source, "its scales are not rows of depth, width and channels")
        depth, width, limit = row
    letter = scale if isinstance(scale, str) and re.fullmatch(r"[nsmlx]", scale) else ""
    return (
        _number(depth, 0.01, 4, source, "depth"),
        _number(width, 0.01, 4, source, "width"),
        _number(limit, 8, 1e9, source, "max_channels"),
        letter,
    )


def _layers(raw: object, start: int, source: str, part: str) -> Iterator[list[Any]]:
    if not isinstance(raw, (list, tuple)) or len(raw) > _MAX_LAYERS:
        raise _bad(source, f"its {part} is not a list of at most {_MAX_LAYERS} layers")
    for index, row in enumerate(raw, start):
        if not isinstance(row, (list, tuple)) or len(row) != 4:
            raise _bad(source, f"layer {index} is not [from, repeats, module, arguments]")
        inputs, repeats, module, arguments = row
        if not isinstance(module, str) or module not in _BLOCKS | _HEADS:
            raise UnsupportedModelError(
                f"{source}: layer {index} is {printable(module, 40)!r}, which is not one of YOLOv8's and "
                f"YOLO11's blocks ({', '.join(sorted(_BLOCKS | _HEADS))})"
            )
        sources = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        if not 1 <= len(sources) <= 16:
            raise _bad(source, f"layer {index} has {len(sources)} inputs")
        # -1 is the layer before; the first layer's is the image.
        first, last = -max(index, 1), max(index - 1, -1)
        checked = [_integer(i, first, last, source, f"layer {index}'s input") for i in sources]
        yield [
            checked if isinstance(inputs, (list, tuple)) else checked[0],
            _integer(repeats, 1, _MAX_REPEATS, source, f"layer {index}'s repeats"),
            module,
            _arguments(arguments, module, source, index),
        ]


def _arguments(raw: object, module: str, source: str, index: int) -> list[Any]:
    if not isinstance(raw, (list, tuple)) or len(raw) > 8:
        raise _bad(source, f"layer {index}'s arguments are not a short list")
    checked: list[Any] = []
    for position, value in enumerate(raw):
        wide = position == 0 or module in _HEADS
        limit: float = (_MAX_CHANNELS if wide else _MAX_SMALL) if module != "nn.Upsample" else 4
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            known = 0 <= value <= (8 if isinstance(value, float) else limit)
        else:
            known = value is None or isinstance(value, bool) or (isinstance(value, str) and value in _STRINGS)
        if known:
            checked.append(value)
        else:
            raise _bad(source, f"layer {index} ({module}) has the argument {printable(value, 40)!r}")
    return checked


def _activation(raw: object, source: str) -> str:
    """`torch.nn.LeakyReLU(0.1)`, written anew from a name of the list and literal numbers."""

    def refuse() -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{source}: the activation {printable(raw)!r} is not one of nn.X(numbers), X in "
            f"{', '.join(sorted(_ACTIVATIONS))}; nothing of it was run"
        )

    if not isinstance(raw, str) or len(raw) > 100:
        raise refuse()
    match = re.fullmatch(r"(?:torch\.)?nn\.(\w+)(\([^()]*\))", raw.strip(), re.ASCII)
    if match is None or match[1] not in _ACTIVATIONS:
        raise refuse()
    try:
        call = ast.parse(f"f{match[2]}", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise refuse() from None
    if not isinstance(call, ast.Call):
        raise refuse()
    given = [*(("", value) for value in call.args), *((k.arg, k.value) for k in call.keywords)]
    parts = []
    for key, node in given:
        if not isinstance(node, ast.Constant) or (key != "" and key not in _ACTIVATION_ARGUMENTS):
            raise refuse()
        value = node.value
        if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
            raise refuse()
        parts.append(f"{key}={value!r}" if key else repr(value))
    return f"torch.nn.{match[1]}({', '.join(parts)})"
