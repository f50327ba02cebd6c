"""YOLOv8 and YOLO11, detection and segmentation, of any size and class count, read from the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from visionfast.checkpoint import Checkpoint
from visionfast.checkpoint.pickled import printable
from visionfast.errors import CheckpointError, OptionError, UnsupportedModelError
from visionfast.families import LoadedModel
from visionfast.families.yolov8_config import YoloConfig, candidate_configs, read_config
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, Resize, Task, TensorSpec
from visionfast.whole_numbers import MAX_BATCH, checked_whole

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["YoloV8"]

GRAPH = "model"
_DEFAULT_SIZE = 640
_MAX_SIZE = 8192
_MAX_NAME = 200
# `model.0.conv.weight` in a checkpoint; `0.…` from the bare blocks, `model.model.0.…` from ultralytics'
# wrapper, `module.…` from data-parallel training.
_KEY = re.compile(r"(?:module\.)?(?:model\.)*(\d+\..+)", re.ASCII)


class YoloV8:
    """The family, see `visionfast.families.Family`."""

    name = "yolov8"
    handles = "YOLOv8 and YOLO11, tasks detect and segment"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        keys = _weights(checkpoint).keys()
        return _task(keys) in ("detect", "segment") and not _is_end_to_end(checkpoint, keys)

    def describe(self, checkpoint: Checkpoint) -> str:
        keys = _weights(checkpoint).keys()
        task = _task(keys)
        model_class = printable(checkpoint.metadata.get("model_class", ""))
        if model_class.startswith("models."):
            return "YOLOv5, of the yolov5 repository"
        if any(".anchors" in key or ".anchor_grid" in key for key in keys):
            return "YOLOv5 or YOLOv7 (anchors)"
        if any("dec_score_head" in key for key in keys):
            return "RT-DETR"
        if _is_end_to_end(checkpoint, keys):
            return "YOLOv10 or YOLO26 (an end-to-end head without NMS)"
        if task:
            said = checkpoint.metadata.get("task")
            return f"a YOLO {said if said in ('pose', 'obb', 'classify') else task} model"
        return model_class

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        name: str,
        size_hw: tuple[int, int] | None = None,
        batch: int = 1,
        resize: Resize | None = None,
    ) -> LoadedModel:
        from visionfast.families.weights import check_finite
        from visionfast.families.yolov8_modules import YoloGraph, level_strides, load_weights

        source = str(checkpoint.path)
        weights = _weights(checkpoint)
        config, blocks = _rebuild(checkpoint, weights, source)
        strides = level_strides(blocks, source)
        size_hw = _checked_size(size_hw or _trained_size(checkpoint, max(strides)), max(strides))
        batch = checked_whole("batch", batch, MAX_BATCH)
        if resize is not None:
            raise OptionError(f"resize {resize}: a YOLO model's images are letterboxed; leave it out")
        check_finite(weights, source)
        load_weights(blocks, weights, **_batch_norm_eps(checkpoint))
        module = YoloGraph(blocks, size_hw, strides).eval()
        task: Task = "segment" if config.task == "segment" else "detect"
        spec = ModelSpec(
            name=name,
            family=self.name,
            architecture=_architecture(config, strides),
            task=task,
            graphs=(_graph_spec(module, config, size_hw, strides, batch),),
            preprocess=PreprocessSpec(size_hw),
            class_names=_class_names(checkpoint.metadata.get("names"), config.num_classes, source),
            strides=strides,
            license=printable(checkpoint.metadata.get("license") or "", _MAX_NAME),
        )
        return LoadedModel(spec, {GRAPH: module}, {GRAPH: ("decode",)})


# ---- telling by the parameters' names ---------------------------------------------------------------------


def _weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The weights under the blocks' own names, `0.conv.weight`; what has another form is left as it is."""
    found = {}
    for key, tensor in checkpoint.state_dict.items():
        match = _KEY.fullmatch(key)
        found[match[1] if match else key] = tensor
    return found


def _task(keys: Any) -> str:
    """The task by the head's branches, or empty when it is not a YOLO head."""
    parts = {(match[1], match[2]) for key in keys if (match := re.match(r"(\d+)\.(\w+)\.", key))}
    heads = {index for index, part in parts if part in ("dfl", "linear")}  # other blocks have a cv2 too
    branches = {part for index, part in parts if index in heads}
    if {"cv2", "cv3", "dfl"} <= branches:
        if "proto" in branches:
            return "segment"
        return "pose or obb" if "cv4" in branches else "detect"
    return "classify" if "linear" in branches and "0.conv.weight" in keys else ""


def _is_end_to_end(checkpoint: Checkpoint, keys: Any) -> bool:
    yaml = checkpoint.metadata.get("yaml")
    return any(".one2one_cv" in key for key in keys) or bool(isinstance(yaml, Mapping) and yaml.get("end2end"))


# ---- the network ------------------------------------------------------------------------------------------


def _rebuild(
    checkpoint: Checkpoint, weights: Mapping[str, torch.Tensor], source: str
) -> tuple[YoloConfig, nn.Sequential]:
    """The configuration and its blocks, whose shapes are the weights'."""
    from visionfast.families.yolov8_modules import build_blocks, shapes_agree, without_batch_norm

    raw = checkpoint.metadata.get("yaml")
    if raw is None:
        candidates = candidate_configs({k: tuple(v.shape) for k, v in weights.items()}, source)
    else:
        candidates = iter([read_config(raw, source)])
    difference = "its first layer is of no published width"
    for config in candidates:
        blocks = without_batch_norm(build_blocks(config, source), weights)
        difference = shapes_agree(blocks, weights)
        if not difference:
            return config, blocks
    if raw is None:
        raise UnsupportedModelError(
            f"{source}: a state dict without an architecture, and not of one of YOLOv8's or YOLO11's "
            f"published sizes ({difference}); use the checkpoint that training wrote"
        )
    raise CheckpointError(f"{source}: its weights are not those of its architecture: {difference}")


def _batch_norm_eps(checkpoint: Checkpoint) -> dict[str, float]:
    known = checkpoint.metadata.get("batch_norm_eps") or ()
    if len(known) > 1:
        raise UnsupportedModelError(
            f"{checkpoint.path}: its batch norms differ in eps ({', '.join(map(str, known[:4]))}); expected one value"
        )
    return {"eps": float(known[0])} if known else {}


# ---- the spec ---------------------------------------------------------------------------------------------


def _architecture(config: YoloConfig, strides: tuple[int, ...]) -> str:
    pyramids: dict[tuple[int, ...], str] = {(4, 8, 16, 32): "-p2", (8, 16, 32, 64): "-p6"}
    pyramid = pyramids.get(strides, "")
    return f"{config.generation}{config.scale}{pyramid}{'-seg' if config.task == 'segment' else ''}"


def _graph_spec(
    module: nn.Module, config: YoloConfig, size_hw: tuple[int, int], strides: tuple[int, ...], batch: int
) -> GraphSpec:
    import torch

    # Without memory: only the shapes are wanted.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        outputs = module(torch.empty(batch, 3, *size_hw))
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    names = ("predictions", "prototypes")[: len(tensors)]
    return GraphSpec(
        GRAPH,
        (TensorSpec("images", (batch, 3, *size_hw), "float32", "NCHW"),),
        tuple(TensorSpec(n, tuple(t.shape), "float32") for n, t in zip(names, tensors, strict=True)),
    )


def _checked_size(size_hw: tuple[int, int], stride: int) -> tuple[int, int]:
    if all(stride <= side <= _MAX_SIZE and side % stride == 0 for side in size_hw):
        return size_hw
    nearest = ["x".join(str(_to_multiple(side, stride, up)) for side in size_hw) for up in (False, True)]
    raise OptionError(
        f"imgsz: expected multiples of {stride} from {stride} to {_MAX_SIZE} (height x width), got "
        f"{size_hw[0]}x{size_hw[1]}; the nearest are {' and '.join(dict.fromkeys(nearest))}"
    )


def _to_multiple(side: int, stride: int, up: bool) -> int:
    whole = side // stride + (1 if up and side % stride else 0)
    return min(max(whole, 1) * stride, _MAX_SIZE)


def _trained_size(checkpoint: Checkpoint, stride: int) -> tuple[int, int]:
    """The training's `imgsz`, rounded up to what the network takes, as ultralytics does; 640 when not said."""
    for place in ("args", "train_args", "imgsz"):
        said = checkpoint.metadata.get(place)
        size = said.get("imgsz") if isinstance(said, Mapping) else said
        if isinstance(size, (list, tuple)) and len(size) == 1:
            size = size[0]
        sides: list[Any] = list(size) if isinstance(size, (list, tuple)) and len(size) == 2 else [size, size]
        if all(type(side) is int and 1 <= side <= _MAX_SIZE for side in sides):
            return _to_multiple(sides[0], stride, True), _to_multiple(sides[1], stride, True)
    return _DEFAULT_SIZE, _DEFAULT_SIZE


def _class_names(raw: Any, num_classes: int, source: str) -> tuple[str, ...]:
    if raw is None:
        return tuple(f"class_{i}" for i in range(num_classes))
    pairs = dict(enumerate(raw)) if isinstance(raw, (list, tuple)) else raw
    if not isinstance(pairs, Mapping):
        raise CheckpointError(f"{source}: its class names are a {type(raw).__name__}; expected names by number")
    by_id = {int(key) if str(key).isdecimal() else -1: value for key, value in pairs.items()}
    if sorted(by_id) != list(range(num_classes)):
        raise CheckpointError(
            f"{source}: its {len(pairs)} class names are not numbered 0 to {num_classes - 1}, as its head's "
            f"{num_classes} classes are"
        )
    return tuple(printable(by_id[i], _MAX_NAME) for i in range(num_classes))
