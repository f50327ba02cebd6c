"""Image bytes → the network's input tensor. `reference` and `reference_decode` are the definitions.

The names are loaded when they are first asked for: OpenCV, Pillow and DALI are not paid for before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visionfast.preprocess.antialias import crop, fit, geometry, resize_antialias_float, resize_antialias_u8
    from visionfast.preprocess.cpu import CpuPreprocessor
    from visionfast.preprocess.cpu_antialias import AntialiasPreprocessor
    from visionfast.preprocess.cpu_crop import CropPreprocessor
    from visionfast.preprocess.dali import DaliPreprocessor, input_pipeline
    from visionfast.preprocess.decode import decode_image
    from visionfast.preprocess.limits import DecodeLimits
    from visionfast.preprocess.prompts import parse_box, parse_point, prompt_tensors
    from visionfast.preprocess.reference import letterbox, letterbox_geometry, normalise
    from visionfast.preprocess.reference_decode import decode_reference

__all__ = [
    "AntialiasPreprocessor",
    "CpuPreprocessor",
    "CropPreprocessor",
    "DaliPreprocessor",
    "DecodeLimits",
    "crop",
    "decode_image",
    "decode_reference",
    "fit",
    "geometry",
    "input_pipeline",
    "letterbox",
    "letterbox_geometry",
    "normalise",
    "parse_box",
    "parse_point",
    "prompt_tensors",
    "resize_antialias_float",
    "resize_antialias_u8",
]

_MODULES = {
    "AntialiasPreprocessor": "cpu_antialias",
    "CpuPreprocessor": "cpu",
    "CropPreprocessor": "cpu_crop",
    "DaliPreprocessor": "dali",
    "DecodeLimits": "limits",
    "crop": "antialias",
    "decode_image": "decode",
    "decode_reference": "reference_decode",
    "fit": "antialias",
    "geometry": "antialias",
    "input_pipeline": "dali",
    "letterbox": "reference",
    "letterbox_geometry": "reference",
    "normalise": "reference",
    "parse_box": "prompts",
    "parse_point": "prompts",
    "prompt_tensors": "prompts",
    "resize_antialias_float": "antialias",
    "resize_antialias_u8": "antialias",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
