"""An engine's raw tensors → boxes, classes and masks in the original image's pixels."""

from visionfast.postprocess.detections import check_options, postprocess
from visionfast.postprocess.masks import InstanceMasks, mask_iou

__all__ = ["InstanceMasks", "check_options", "mask_iou", "postprocess"]
