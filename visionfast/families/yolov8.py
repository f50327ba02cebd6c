"""YOLOv8 and YOLO11: detection and instance segmentation, any size, any classes.

ultralytics rebuilds the network from its description, and does nothing more: the tensors are loaded strictly, and
the box decoding is ours (distribution focal loss, Li et al. 2020, arXiv:2006.04388), so that it can stay in FP32.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from visionfast.checkpoint import Checkpoint
from visionfast.errors import BackendUnavailableError, CheckpointError, OptionError, UnsupportedModelError
from visionfast.families import LoadedModel
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, Task, TensorSpec

__all__ = ["load", "recognises"]

GRAPH = "model"
_LAYERS = frozenset(
    {"Conv", "DWConv", "C2f", "C3", "C3k2", "C2PSA", "SPPF", "Concat", "nn.Upsample", "Detect", "Segment"}
)
_ACTIVATION = re.compile(r"(torch\.)?nn\.(SiLU|ReLU|ReLU6|Hardswish|Mish|GELU|Identity)\(\)|(torch\.)?nn\.LeakyReLU\([0-9.]+\)")
_WIDTHS = {16: "n", 32: "s", 48: "m", 64: "ml", 80: "x", 96: "x"}  # of the first convolution, by scale
_KEPT_KEYS = (
    "nc", "scales", "scale", "depth_multiple", "width_multiple", "backbone", "head", "activation", "reg_max", "ch",
    "channels", "end2end",
)  # fmt: skip


def recognises(checkpoint: Checkpoint) -> bool:
    """Whether the state dict has the network layout `model.<layer>.…` that ends in a detection head."""
    return "model.0.conv.weight" in checkpoint.state_dict and _head_index(checkpoint.state_dict) is not None


def load(
    checkpoint: Checkpoint, *, name: str, size_hw: tuple[int, int] | None = None, batch: int = 1
) -> LoadedModel:
    """Rebuilds the model in FP32 for a fixed input size.

    Args:
        checkpoint: opened by `open_checkpoint`.
        name: of the model, for its spec.
        size_hw: of the input, pixels, multiples of the largest stride; default: what the checkpoint says, or 640.
        batch: images a call, at least 1.

    Raises:
        UnsupportedModelError: its task or its layers are not handled.
        CheckpointError: its tensors do not fit the network it describes.
        OptionError: the size or the batch is impossible.
    """
    task = _task(checkpoint)
    network = _rebuild(checkpoint, task)
    head = network.model[-1]
    strides = tuple(int(stride) for stride in head.stride)
    size_hw = _check_size(size_hw or _default_size(checkpoint), max(strides), batch)
    module = _graph(network, size_hw, strides).eval()

    (h, w), nc = size_hw, int(head.nc)
    masks = int(head.nm) if task == "segment" else 0
    anchors = sum((h // s) * (w // s) for s in strides)
    outputs = [TensorSpec("predictions", (batch, 4 + nc + masks, anchors), "float32")]
    if masks:
        outputs.append(TensorSpec("prototypes", (batch, masks, h // 4, w // 4), "float32"))
    graph = GraphSpec(GRAPH, (TensorSpec("images", (batch, 3, h, w), "float32", "NCHW"),), tuple(outputs))
    spec = ModelSpec(
        name=name,
        family="yolov8",
        architecture=_architecture(network, task),
        task=task,
        graphs=(graph,),
        preprocess=PreprocessSpec(size_hw),
        class_names=_class_names(checkpoint, nc),
        strides=strides,
        license=str(checkpoint.metadata.get("license", "")),
    )
    return LoadedModel(spec, {GRAPH: module}, {GRAPH: ("decode",)})


def _head_index(state_dict: Mapping[str, Any]) -> int | None:
    found = [match for key in state_dict if (match := re.match(r"model\.(\d+)\.cv3\.0\.", key))]
    layers = [int(match[1]) for match in found if f"model.{match[1]}.cv2.0.0.conv.weight" in state_dict]
    return max(layers, default=None)


def _task(checkpoint: Checkpoint) -> Task:
    """Told from the head's own tensors; a file's word about itself may be wrong."""
    state, head = checkpoint.state_dict, _head_index(checkpoint.state_dict)
    if any(key.startswith(f"model.{head}.one2one_cv2.") for key in state):
        raise UnsupportedModelError(f"{checkpoint.path}: an end-to-end (NMS-free) YOLO; expected YOLOv8 or YOLO11")
    if f"model.{head}.proto.cv1.conv.weight" in state:
        return "segment"
    if any(key.startswith(f"model.{head}.cv4.") for key in state):
        raise UnsupportedModelError(
            f"{checkpoint.path}: a YOLO for pose or oriented boxes; expected detection or segmentation"
        )
    return "detect"


def _import_tasks() -> Any:
    # Set before its first import: ultralytics greets on stdout otherwise.
    os.environ.setdefault("YOLO_VERBOSE", "False")
    try:
        from ultralytics.nn import tasks
    except ImportError as error:
        raise BackendUnavailableError(
            f"ultralytics: rebuilding a YOLO needs it, but {error}; `pip install 'visionfast[build]'`"
        ) from error
    logging.getLogger("ultralytics").setLevel(logging.ERROR)
    return tasks


def _rebuild(checkpoint: Checkpoint, task: Task) -> Any:
    """The network with the checkpoint's tensors, strictly, batch norms folded into convolutions."""
    tasks = _import_tasks()
    made = tasks.SegmentationModel if task == "segment" else tasks.DetectionModel
    state = {name: t.float() if t.is_floating_point() else t for name, t in checkpoint.state_dict.items()}
    head = _head_index(state)
    nc = int(state[f"model.{head}.cv3.0.2.bias"].shape[0])
    problem = ""
    for description in _descriptions(checkpoint, task, int(state["model.0.conv.weight"].shape[0])):
        try:
            network = made(description, ch=int(state["model.0.conv.weight"].shape[1]), nc=nc, verbose=False)
        except Exception as error:  # parse_model raises anything on a description that makes no network
            raise CheckpointError(f"{checkpoint.path}: its description makes no network ({error})") from error
        if not any(".bn." in key for key in state):
            network.fuse(verbose=False)  # saved after folding: the same has to be folded here before loading
        problem = _mismatch(network.state_dict(), state)
        if not problem:
            network.load_state_dict(state, strict=True)
            return network.eval().fuse(verbose=False)
    raise CheckpointError(f"{checkpoint.path}: its tensors do not fit the network it should be ({problem})")


def _mismatch(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    for name in [*expected, *got]:
        if name not in got:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is not expected"
        if expected[name].shape != got[name].shape:
            return f"{name}: expected {tuple(expected[name].shape)}, got {tuple(got[name].shape)}"
    return ""


def _descriptions(checkpoint: Checkpoint, task: Task, width: int) -> Iterator[Any]:
    """What the network may be: the checkpoint's own description, else the published ones of its width."""
    description = checkpoint.metadata.get("yaml")
    if isinstance(description, dict):
        yield _checked_description(description, checkpoint)
        return
    suffix = "-seg" if task == "segment" else ""
    for version in ("yolov8", "yolo11"):
        for scale in _WIDTHS.get(width, ""):
            yield f"{version}{scale}{suffix}.yaml"


def _checked_description(description: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """ultralytics evaluates parts of a description (`activation` goes through `eval`), so it is checked first."""
    where = f"{checkpoint.path}: its network description"
    kept = {key: description[key] for key in _KEPT_KEYS if key in description}
    activation = kept.get("activation")
    if activation is not None and not (isinstance(activation, str) and _ACTIVATION.fullmatch(activation)):
        raise CheckpointError(f"{where}: activation {activation!r} is not a plain torch.nn activation; refused")
    if kept.get("end2end"):
        raise UnsupportedModelError(f"{checkpoint.path}: an end-to-end (NMS-free) YOLO; expected YOLOv8 or YOLO11")
    layers = [*_listed(kept.get("backbone"), where), *_listed(kept.get("head"), where)]
    for layer in layers:
        if not (isinstance(layer, (list, tuple)) and len(layer) == 4):
            raise CheckpointError(f"{where}: expected [from, repeats, layer, arguments], got {layer!r}")
        _, repeats, kind, arguments = layer
        if kind not in _LAYERS:
            raise UnsupportedModelError(
                f"{where}: layer {kind!r} is not one of YOLOv8's or YOLO11's: {', '.join(sorted(_LAYERS))}"
            )
        if not (isinstance(repeats, int) and 0 < repeats <= 100):
            raise CheckpointError(f"{where}: expected 1 to 100 repeats of {kind}, got {repeats!r}")
        for argument in _listed(arguments, where):
            if not _plain(argument):
                raise CheckpointError(f"{where}: argument {argument!r} of {kind} is not a plain value; refused")
    return kept


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"{where}: expected a list, got {value!r}")
    return list(value)


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_plain(item) for item in value)
    if isinstance(value, str):
        return value in ("nc", "None", "nearest", "bilinear", "True", "False", "reg_max")
    return value is None or (isinstance(value, (bool, int, float)) and abs(value) <= 1 << 20)


def _default_size(checkpoint: Checkpoint) -> tuple[int, int]:
    size = (checkpoint.metadata.get("args") or {}).get("imgsz", 640)
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return int(size[0]), int(size[1])
    return (int(size), int(size)) if isinstance(size, int) else (640, 640)


def _check_size(size_hw: tuple[int, int], stride: int, batch: int) -> tuple[int, int]:
    if batch < 1:
        raise OptionError(f"batch: expected at least 1, got {batch}")
    for side in size_hw:
        if side < stride or side % stride:
            below = max(stride, side // stride * stride)
            raise OptionError(
                f"imgsz {size_hw[0]}x{size_hw[1]}: expected multiples of the stride {stride}, got {side}; "
                f"the nearest are {below} and {below + stride}"
            )
        if side > 8192:
            raise OptionError(f"imgsz {size_hw[0]}x{size_hw[1]}: expected at most 8192, got {side}")
    return size_hw


def _class_names(checkpoint: Checkpoint, nc: int) -> tuple[str, ...]:
    names = checkpoint.metadata.get("names")
    if isinstance(names, (list, tuple)):
        names = dict(enumerate(names))
    if not isinstance(names, dict):
        return tuple(f"class_{i}" for i in range(nc))
    if sorted(names, key=str) != sorted(range(nc), key=str):
        raise CheckpointError(f"{checkpoint.path}: expected names for classes 0 to {nc - 1}, got {len(names)} names")
    return tuple(str(names[i]) for i in range(nc))


def _architecture(network: Any, task: Task) -> str:
    version = "yolo11" if any(type(layer).__name__ == "C3k2" for layer in network.model) else "yolov8"
    width = int(network.model[0].conv.out_channels)
    scale = network.yaml.get("scale") or _WIDTHS.get(width, "?")[:1]
    return f"{version}{scale}{'-seg' if task == 'segment' else ''}"


def _graph(network: Any, size_hw: tuple[int, int], strides: tuple[int, ...]) -> Any:
    """Our module around the rebuilt layers. Defined here because torch is imported only to build."""
    import torch
    from torch import Tensor, nn

    class Decode(nn.Module):
        """Raw head outputs → (B, 4 + nc + nm, A): cx, cy, w, h in input pixels, class scores, mask coefficients."""

        anchors: Tensor
        strides: Tensor
        bins: Tensor

        def __init__(self, reg_max: int) -> None:
            super().__init__()
            centres, scales = [], []
            for stride in strides:
                rows, columns = size_hw[0] // stride, size_hw[1] // stride
                y, x = torch.meshgrid(torch.arange(rows) + 0.5, torch.arange(columns) + 0.5, indexing="ij")
                centres.append(torch.stack((x, y)).reshape(2, -1))
                scales.append(torch.full((1, rows * columns), float(stride)))
            self.register_buffer("anchors", torch.cat(centres, 1)[None])  # (1, 2, A), in cells
            self.register_buffer("strides", torch.cat(scales, 1)[None])  # (1, 1, A)
            self.register_buffer("bins", torch.arange(reg_max, dtype=torch.float32).reshape(1, 1, -1, 1))

        def forward(self, boxes: Tensor, scores: Tensor, *coefficients: Tensor) -> Tensor:
            b, _, a = boxes.shape
            # The expectation over the bins: left, top, right, bottom distances in cells.
            ltrb = (boxes.reshape(b, 4, -1, a).softmax(2) * self.bins).sum(2)  # (B, 4, A)
            low, high = self.anchors - ltrb[:, :2], self.anchors + ltrb[:, 2:]
            cxcywh = torch.cat(((low + high) / 2, high - low), 1) * self.strides
            return torch.cat((cxcywh, scores.sigmoid(), *coefficients), 1)

    class Graph(nn.Module):
        """images (B, 3, h, w) → predictions, and prototypes of a segmenter."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = network.model[:-1]
            self.head = network.model[-1]
            self.saved = frozenset(network.save)
            self.segments = hasattr(self.head, "proto")
            self.decode = Decode(int(self.head.reg_max))

        def forward(self, images: Tensor) -> Any:
            x: Any = images
            kept: list[Tensor | None] = []
            for layer in self.layers:
                x = layer(self._inputs(layer, x, kept))
                kept.append(x if layer.i in self.saved else None)
            levels = [kept[i] for i in self.head.f]
            boxes = self._over_levels(self.head.cv2, levels)
            scores = self._over_levels(self.head.cv3, levels)
            if not self.segments:
                return self.decode(boxes, scores)
            return self.decode(boxes, scores, self._over_levels(self.head.cv4, levels)), self.head.proto(levels[0])

        def _inputs(self, layer: Any, previous: Any, kept: list[Tensor | None]) -> Any:
            if layer.f == -1:
                return previous
            if isinstance(layer.f, int):
                return kept[layer.f]
            return [previous if i == -1 else kept[i] for i in layer.f]

        def _over_levels(self, branches: Any, levels: list[Any]) -> Tensor:
            return torch.cat([branch(x).flatten(2) for branch, x in zip(branches, levels, strict=True)], 2)

    return Graph()
