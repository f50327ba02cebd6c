"""The way most people run YOLOv8 in their own code: what visionfast's figures stand beside.

PIL decodes, torchvision resizes and pads to the square letterbox, `to_tensor` makes floats of it, the module runs
as ultralytics loads it (eager, FP32, convolution and batch normalisation unfused), torchvision suppresses, and the
boxes go back to the picture. Nothing is made slow on purpose: inference mode, candidates filtered before the
suppression, and every processor that may be used (importing ultralytics alone leaves torch one thread fewer).

On a GPU it is what the same code becomes with `.to("cuda")`: decoding and letterbox stay on the CPU.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visionfast import machine
from visionfast.errors import BackendUnavailableError, UnsupportedModelError
from visionfast.results import Detections

if TYPE_CHECKING:
    import torch

__all__ = ["NaivePyTorch"]


class NaivePyTorch:
    """Encoded bytes in, final boxes out.

    Args:
        weights: a YOLOv8 detection checkpoint as ultralytics saves it. It is opened with visionfast's allow-list
            first: ultralytics' own loader runs whatever a pickle says.
        size_hw: of the input, pixels.
        conf: objects above this confidence.
        iou: of two boxes of one class that overlap more than this, the less confident one goes.
        max_det: objects an image at most.
        device: that the module runs on.

    Raises:
        CheckpointError: the file is not a checkpoint, is refused, or is not for detection.
        BackendUnavailableError: ultralytics, torch or torchvision is missing.
    """

    def __init__(
        self,
        weights: Path,
        *,
        size_hw: tuple[int, int] = (640, 640),
        conf: float = 0.25,
        iou: float = 0.7,
        max_det: int = 300,
        device: str | torch.device = "cpu",
    ) -> None:
        from visionfast.checkpoint import open_checkpoint

        open_checkpoint(weights)
        os.environ.setdefault("YOLO_OFFLINE", "true")
        try:
            import torch
            import torchvision  # noqa: F401
            from ultralytics.models import YOLO
        except ImportError as error:
            raise BackendUnavailableError(
                f"naive PyTorch: expected ultralytics and torchvision, but {error}; `pip install 'visionfast[build]'`"
            ) from error
        torch.set_num_threads(machine.usable_cpus())
        loaded = YOLO(str(weights))
        if loaded.task != "detect":
            raise UnsupportedModelError(
                f"{weights}: expected a model for detection, got one for {loaded.task}; "
                "the naive baseline decodes boxes only"
            )
        module: Any = loaded.model
        self._set(module.float().eval(), size_hw, (conf, iou, max_det), torch.device(device), torch.float32)

    @classmethod
    def of_module(
        cls,
        module: torch.nn.Module,
        *,
        size_hw: tuple[int, int] = (640, 640),
        conf: float = 0.25,
        iou: float = 0.7,
        max_det: int = 300,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> NaivePyTorch:
        """Of a module that is there already, as fused as it is; it is copied.

        Args:
            module: (B, 3, h, w) → (B, 4 + classes, A), or a tuple that begins with it.
            size_hw, conf, iou, max_det, device: as for the class.
            dtype: that it runs in, `torch.float16` for what `.half()` makes of it; default: `torch.float32`.
        """
        import torch

        made = cls.__new__(cls)
        copied = copy.deepcopy(module).eval()
        made._set(copied, size_hw, (conf, iou, max_det), torch.device(device), dtype or torch.float32)
        return made

    def _set(
        self,
        module: torch.nn.Module,
        size_hw: tuple[int, int],
        thresholds: tuple[float, float, int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._module = module.to(device=device, dtype=dtype)
        self._size_hw = size_hw
        self._conf, self._iou, self._max_det = thresholds
        self._device, self._dtype = device, dtype

    def __call__(self, encoded: bytes) -> Detections:
        """The objects in one encoded image, in its pixels, by descending confidence."""
        return self.many([encoded])[0]

    def many(self, images: Sequence[bytes]) -> list[Detections]:
        """Those of several images, which go through the module together."""
        import torch

        placed = [self._letterbox(encoded) for encoded in images]
        pixels = torch.cat([tensor for tensor, *_ in placed]).to(device=self._device, dtype=self._dtype)  # (B, 3, h, w)
        with torch.inference_mode():
            outputs = self._module(pixels)
            predictions = outputs[0] if isinstance(outputs, (tuple, list)) else outputs  # (B, 4 + classes, A)
            return [
                self._found(rows.T, gain, corner, image_hw)
                for rows, (_, gain, corner, image_hw) in zip(predictions, placed, strict=True)
            ]

    def _found(
        self, predictions: torch.Tensor, gain: float, corner: tuple[int, int], image_hw: tuple[int, int]
    ) -> Detections:
        """One image's objects: `predictions` (A, 4 + classes) are cx cy w h, scores; its picture's (left, top)."""
        import torch
        from torchvision.ops import batched_nms

        left, top = corner
        confidence, class_id = predictions[:, 4:].max(dim=1)
        above = confidence > self._conf
        centre, size = predictions[above, :2], predictions[above, 2:4]
        xyxy = torch.cat([centre - size / 2, centre + size / 2], dim=1).float()  # (N, 4) input pixels
        confidence, class_id = confidence[above].float(), class_id[above]
        kept = batched_nms(xyxy, confidence, class_id, self._iou)[: self._max_det]
        offset = torch.tensor([left, top, left, top], device=xyxy.device)
        xyxy = (xyxy[kept] - offset) / gain  # original pixels
        xyxy[:, 0::2].clamp_(0, image_hw[1])
        xyxy[:, 1::2].clamp_(0, image_hw[0])
        return Detections(
            xyxy=xyxy.cpu().numpy(),
            confidence=confidence[kept].cpu().numpy(),
            class_id=class_id[kept].cpu().numpy().astype(np.int64, copy=False),
            image_hw=image_hw,
        )

    def _letterbox(self, encoded: bytes) -> tuple[torch.Tensor, float, tuple[int, int], tuple[int, int]]:
        """The input tensor, its gain (input pixels per original pixel), the picture's (left, top) and (H, W)."""
        from PIL import Image, ImageOps
        from torchvision.transforms import functional

        image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
        (h, w), (width, height) = self._size_hw, image.size
        gain = min(h / height, w / width)
        new_h, new_w = max(1, round(height * gain)), max(1, round(width * gain))
        left, top = (w - new_w) // 2, (h - new_h) // 2
        image = functional.resize(image, [new_h, new_w])
        image = functional.pad(image, [left, top, w - new_w - left, h - new_h - top], fill=114)
        return functional.to_tensor(image)[None], gain, (left, top), (height, width)
