"""An answer's three parts, each as most people write it and as visionfast has it, so that they can be exchanged one by
one: what comes before the network, the network, and what comes after it.

The seams are the same for all: an encoded image → (h, w, 3) u8 RGB of the network's size and where the image lies in
it → the network's outputs → objects in host memory. What the waterfall of changes (`bench.steps`) measures is made of
these.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from visionfast.bench.records import System
from visionfast.bench.systems import Answer, Call, taking_turns
from visionfast.postprocess.detections import postprocess
from visionfast.postprocess.masks import InstanceMasks
from visionfast.preprocess.antialias import geometry
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.results import Detections
from visionfast.types import Letterbox, ModelSpec, Runner

if TYPE_CHECKING:
    import torch

__all__ = [
    "After",
    "Before",
    "CompiledNetwork",
    "DenseMasks",
    "EagerNetwork",
    "Network",
    "OwnAfter",
    "OwnBefore",
    "PillowBefore",
    "Pipeline",
    "TorchvisionAfter",
    "as_results",
]

_Pixels: TypeAlias = npt.NDArray[np.uint8]


class Before(Protocol):
    """An encoded image → the network's size."""

    def decode(self, encoded: bytes) -> Any:
        """The picture, upright, RGB, as `place` takes it."""
        ...

    def place(self, picture: Any) -> tuple[_Pixels, Letterbox]:
        """(h, w, 3) u8 RGB, and where the picture lies in it."""
        ...


class Network(Protocol):
    """The network's input → its outputs, by their names in the model's graph."""

    def feed(self, pixels: _Pixels) -> Any:
        """(h, w, 3) u8 RGB → the input as the network takes it."""
        ...

    def run(self, feed: Any) -> Mapping[str, Any]:
        """Tensors or arrays, the batch of one first."""
        ...


After: TypeAlias = "Callable[[Mapping[str, Any], Letterbox], Any]"
"""The network's outputs, and where the picture lies in its input → what was found, in host memory."""


class Pipeline:
    """The three in a row: a system under test. Its stages are `decode`, `preprocess`, `engine` and `postprocess`.

    Args:
        system: who it is.
        before, network, after: the parts. What they hold belongs to the caller.
    """

    caches = False

    def __init__(self, system: System, before: Before, network: Network, after: After) -> None:
        self.system = system
        self._before, self._network, self._after = before, network, after

    def call(self, encoded: bytes) -> Answer:
        """What was found in one encoded image."""
        started = perf_counter_ns()
        picture = self._before.decode(encoded)
        decoded = perf_counter_ns()
        pixels, placed = self._before.place(picture)
        feed = self._network.feed(pixels)
        prepared = perf_counter_ns()
        outputs = self._network.run(feed)
        computed = perf_counter_ns()
        found = self._after(outputs, placed)
        stage_ns = {
            "decode": decoded - started,
            "preprocess": prepared - decoded,
            "engine": computed - prepared,
            "postprocess": perf_counter_ns() - computed,
        }
        return Answer(found, stage_ns)

    def parallel(self, n: int) -> Sequence[Call]:
        """Eager modules are asked by all threads at once; who wants a runner's buffers waits for a turn."""
        return taking_turns([self.call], n) if isinstance(self._network, CompiledNetwork) else [self.call] * n

    def close(self) -> None:
        pass


# ---- before the network -----------------------------------------------------------------------------------


class PillowBefore:
    """Pillow and torchvision's transforms, as examples and tutorials have them."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec.preprocess

    def decode(self, encoded: bytes) -> Any:
        from PIL import Image, ImageOps

        return ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")

    def place(self, picture: Any) -> tuple[_Pixels, Letterbox]:
        from torchvision.transforms import InterpolationMode, functional

        (width, height), (h, w) = picture.size, self._spec.size_hw
        if self._spec.resize == "letterbox":
            placed = letterbox_geometry((height, width), self._spec.size_hw)
            new_h, new_w = placed.resized_hw
            picture = functional.resize(picture, [new_h, new_w])
            right, bottom = w - new_w - placed.left, h - new_h - placed.top
            picture = functional.pad(picture, [placed.left, placed.top, right, bottom], fill=self._spec.pad_value)
        else:
            placed = geometry((height, width), self._spec)
            bicubic = InterpolationMode.BICUBIC
            if self._spec.resize == "centre-crop":
                assert self._spec.cover_hw is not None
                picture = functional.resize(picture, min(self._spec.cover_hw), interpolation=bicubic)
                picture = functional.center_crop(picture, [h, w])
            else:
                picture = functional.resize(picture, [h, w], interpolation=bicubic)
        return np.array(picture), placed  # a copy: torch takes no read-only array


class OwnBefore:
    """visionfast's decoding and resizing, with buffers made anew for every image: a session's are kept."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec.preprocess

    def decode(self, encoded: bytes) -> _Pixels:
        return decode_image(encoded)

    def place(self, picture: _Pixels) -> tuple[_Pixels, Letterbox]:
        pixels = np.empty((*self._spec.size_hw, 3), np.uint8)
        made: CpuPreprocessor | CropPreprocessor
        made = (CpuPreprocessor if self._spec.resize == "letterbox" else CropPreprocessor)(self._spec)
        return pixels, made.write(picture, pixels)


# ---- the network ------------------------------------------------------------------------------------------


class EagerNetwork:
    """A PyTorch module on the CPU, under `inference_mode`.

    Args:
        module: (1, 3, h, w) → the graph's outputs in their order, or, as ultralytics' modules, a sequence that begins
            with them. It is copied.
        spec: of the model.
        dtype: that it computes in; default: `torch.float32`.
    """

    def __init__(self, module: torch.nn.Module, spec: ModelSpec, dtype: torch.dtype | None = None) -> None:
        import torch

        self._module = copy.deepcopy(module).eval().to(dtype or torch.float32)
        self._dtype = dtype or torch.float32
        self._names = [tensor.name for tensor in spec.graphs[0].outputs]
        self._mean, self._std = spec.preprocess.mean, spec.preprocess.std

    def feed(self, pixels: _Pixels) -> Any:
        import torch
        from torchvision.transforms import functional

        tensor = functional.to_tensor(pixels)  # (3, h, w) f32, 0..1
        if any(self._mean) or any(value != 1 for value in self._std):
            tensor = functional.normalize(tensor, list(self._mean), list(self._std))
        assert isinstance(tensor, torch.Tensor)
        return tensor[None].to(self._dtype)

    def run(self, feed: Any) -> Mapping[str, Any]:
        import torch

        with torch.inference_mode():
            outputs = self._module(feed)
        # ultralytics: ((predictions, prototypes), …), (predictions, …)
        while isinstance(outputs, (tuple, list)) and isinstance(outputs[0], (tuple, list)):
            outputs = outputs[0]
        every = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        return dict(zip(self._names, every, strict=False))


class CompiledNetwork:
    """A runner of the model's engine; closed by whom it belongs to. The outputs are copied out of its buffers.

    Args:
        runner: of the graph; an engine that normalises takes the pixels as they are.
    """

    def __init__(self, runner: Runner) -> None:
        (self._input,) = runner.inputs
        assert self._input.layout == "NHWC", "engines on a CPU take pixels"
        self._runner = runner

    def feed(self, pixels: _Pixels) -> Any:
        return {self._input.name: pixels[None]}

    def run(self, feed: Any) -> Mapping[str, Any]:
        return self._runner.infer(feed)


# ---- after the network ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class DenseMasks:
    """What is found by those who keep masks as they were computed.

    Attributes:
        detections: the objects, without their masks.
        masks: (N, H, W) bool, original pixels.
    """

    detections: Detections
    masks: npt.NDArray[np.bool_]


def as_results(found: Any) -> Any:
    """What a part or a baseline found, as visionfast's own result, to be compared; not part of anybody's time."""
    if isinstance(found, DenseMasks):
        return replace(found.detections, mask=InstanceMasks.from_dense(found.masks))
    if isinstance(found, np.ndarray) and found.dtype == np.bool_:  # (N, H, W)
        return InstanceMasks.from_dense(found)
    return found


class TorchvisionAfter:
    """Boxes suppressed by torchvision; masks enlarged by `interpolate`, first to the input and then to the picture.

    Vectors are copied to NumPy, and nothing else.

    Args:
        spec: of the model.
        conf, iou, max_det: as for `Detector`.
    """

    def __init__(self, spec: ModelSpec, *, conf: float = 0.25, iou: float = 0.7, max_det: int = 300) -> None:
        self._spec = spec
        self._conf, self._iou, self._max_det = conf, iou, max_det

    def __call__(self, outputs: Mapping[str, Any], placed: Letterbox) -> Any:
        import torch

        tensors = {name: torch.as_tensor(output)[0] for name, output in outputs.items()}
        if self._spec.task == "embed":
            return tensors["cls"].float().numpy()  # (D,)
        detections, coefficients, boxes = self._boxes(tensors["predictions"].T, placed)
        if self._spec.task == "detect":
            return detections
        return DenseMasks(detections, self._masks(tensors["prototypes"], coefficients, boxes, placed))

    def _boxes(self, rows: torch.Tensor, placed: Letterbox) -> tuple[Detections, torch.Tensor, torch.Tensor]:
        """`rows` (A, 4 + C + M): cx cy w h, scores, coefficients → the objects, (N, M) and (N, 4) original pixels."""
        import torch
        from torchvision.ops import batched_nms

        classes = len(self._spec.class_names)
        confidence, class_id = rows[:, 4 : 4 + classes].max(dim=1)
        above = confidence > self._conf
        centre, size = rows[above, :2], rows[above, 2:4]
        xyxy = torch.cat([centre - size / 2, centre + size / 2], dim=1).float()  # (N, 4) input pixels
        confidence, class_id = confidence[above].float(), class_id[above]
        kept = batched_nms(xyxy, confidence, class_id, self._iou)[: self._max_det]
        corner = torch.tensor([placed.left, placed.top, placed.left, placed.top])
        xyxy = (xyxy[kept] - corner) / placed.gain  # original pixels
        xyxy[:, 0::2].clamp_(0, placed.image_hw[1])
        xyxy[:, 1::2].clamp_(0, placed.image_hw[0])
        found = Detections(
            xyxy=xyxy.numpy(),
            confidence=confidence[kept].numpy(),
            class_id=class_id[kept].numpy().astype(np.int64, copy=False),
            image_hw=placed.image_hw,
        )
        return found, rows[above, 4 + classes :][kept].float(), xyxy

    def _masks(
        self, prototypes: torch.Tensor, coefficients: torch.Tensor, xyxy: torch.Tensor, placed: Letterbox
    ) -> npt.NDArray[np.bool_]:
        """`prototypes` (M, mh, mw) → (N, H, W) bool."""
        import torch
        from torch.nn.functional import interpolate

        height, width = placed.image_hw
        if not len(coefficients):
            return np.zeros((0, height, width), np.bool_)
        planes, mh, mw = prototypes.shape
        masks = (coefficients @ prototypes.float().view(planes, -1)).view(1, -1, mh, mw)
        masks = interpolate(masks, placed.size_hw, mode="bilinear")
        new_h, new_w = placed.resized_hw
        masks = masks[:, :, placed.top : placed.top + new_h, placed.left : placed.left + new_w]
        masks = interpolate(masks, placed.image_hw, mode="bilinear")[0] > 0  # (N, H, W)
        y, x = torch.arange(height)[None, :, None], torch.arange(width)[None, None, :]
        x1, y1, x2, y2 = (xyxy[:, i, None, None] for i in range(4))
        inside: npt.NDArray[np.bool_] = (masks & (x >= x1) & (x < x2) & (y >= y1) & (y < y2)).numpy()
        return inside


class OwnAfter:
    """visionfast's post-processing in NumPy. Arguments as for `TorchvisionAfter`."""

    def __init__(self, spec: ModelSpec, *, conf: float = 0.25, iou: float = 0.7, max_det: int = 300) -> None:
        self._task = spec.task
        self._options: dict[str, Any] = {
            "num_classes": len(spec.class_names),
            "conf": conf,
            "iou": iou,
            "max_det": max_det,
        }

    def __call__(self, outputs: Mapping[str, Any], placed: Letterbox) -> Any:
        arrays = {name: np.asarray(output)[0] for name, output in outputs.items()}
        if self._task == "embed":
            return arrays["cls"].astype(np.float32)  # (D,)
        prototypes = arrays.get("prototypes")
        return postprocess(arrays["predictions"], placed, prototypes=prototypes, **self._options)
