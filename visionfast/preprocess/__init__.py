"""Image bytes → the network's input tensor. `reference` and `reference_decode` are the definitions.

The names are loaded when they are first asked for: OpenCV, Pillow and DALI are not paid for before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visionfast.preprocess.antialias import fit, geometry, resize_antialias_float, resize_antialias_u8
    from visionfast.preprocess.cpu import CpuPreprocessor
    from visionfast.preprocess.cpu_antialias import AntialiasPreprocessor
    from visionfast.preprocess.dali import DaliPreprocessor, letterbox_pipeline
    from visionfast.preprocess.decode import decode_image
    from visionfast.preprocess.limits import DecodeLimits
    from visionfast.preprocess.prompts import parse_box, parse_point, prompt_tensors
    from visionfast.preprocess.reference import letterbox, letterbox_geometry, normalise
    from visionfast.preprocess.reference_decode import decode_reference

__all__ = [
    "AntialiasPreprocessor",
    "CpuPreprocessor",
    "DaliPreprocessor",
    "DecodeLimits",
    "decode_image",
    "decode_reference",
    "fit",
    "geometry",
    "letterbox",
    "letterbox_geometry",
    "letterbox_pipeline",
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
    "DaliPreprocessor": "dali",
    "DecodeLimits": "limits",
    "decode_image": "decode",
    "decode_reference": "reference_decode",
    "fit": "antialias",
    "geometry": "antialias",
    "letterbox": "reference",
    "letterbox_geometry": "reference",
    "letterbox_pipeline": "dali",
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
