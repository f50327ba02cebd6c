"""The way most people run YOLOv8 in their own code: what visionfast's figures stand beside.

PIL decodes, torchvision resizes and pads to the square letterbox, `to_tensor` makes floats of it, the module runs
as ultralytics loads it (eager, FP32, convolution and batch normalisation unfused), torchvision suppresses, and the
boxes go back to the picture. Nothing is made slow on purpose: inference mode, candidates filtered before the
suppression, and every processor that may be used (importing ultralytics alone leaves torch one thread fewer).
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from visionfast import machine
from visionfast.errors import BackendUnavailableError, UnsupportedModelError
from visionfast.types import Detections

if TYPE_CHECKING:
    import torch

__all__ = ["NaivePyTorch"]


class NaivePyTorch:
    """Encoded bytes in, final boxes out, on the CPU.

    Args:
        weights: a YOLOv8 detection checkpoint as ultralytics saves it. It is opened with visionfast's allow-list
            first: ultralytics' own loader runs whatever a pickle says.
        size_hw: of the input, pixels.
        conf: objects above this confidence.
        iou: of two boxes of one class that overlap more than this, the less confident one goes.
        max_det: objects an image at most.

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
        self._module: torch.nn.Module = module.float().eval()
        self._size_hw = size_hw
        self._conf, self._iou, self._max_det = conf, iou, max_det

    def __call__(self, encoded: bytes) -> Detections:
        """The objects in one encoded image, in its pixels, by descending confidence."""
        import torch
        from torchvision.ops import batched_nms

        pixels, gain, (left, top), image_hw = self._letterbox(encoded)  # (1, 3, h, w)
        with torch.inference_mode():
            predictions = self._module(pixels)[0][0].T  # (A, 4 + classes): cx cy w h, scores
            confidence, class_id = predictions[:, 4:].max(dim=1)
            above = confidence > self._conf
            centre, size = predictions[above, :2], predictions[above, 2:4]
            xyxy = torch.cat([centre - size / 2, centre + size / 2], dim=1)  # (N, 4) input pixels
            confidence, class_id = confidence[above], class_id[above]
            kept = batched_nms(xyxy, confidence, class_id, self._iou)[: self._max_det]
            xyxy = (xyxy[kept] - torch.tensor([left, top, left, top])) / gain  # original pixels
            xyxy[:, 0::2].clamp_(0, image_hw[1])
            xyxy[:, 1::2].clamp_(0, image_hw[0])
        return Detections(
            xyxy=xyxy.numpy().astype(np.float32, copy=False),
            confidence=confidence[kept].numpy().astype(np.float32, copy=False),
            class_id=class_id[kept].numpy().astype(np.int64, copy=False),
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
