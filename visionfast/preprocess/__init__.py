"""Image bytes → the network's input tensor. `reference` and `reference_decode` are the definitions.

The names are loaded when they are first asked for: OpenCV, Pillow and DALI are not paid for before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visionfast.preprocess.cpu import CpuPreprocessor
    from visionfast.preprocess.dali import DaliPreprocessor, letterbox_pipeline
    from visionfast.preprocess.decode import decode_image
    from visionfast.preprocess.limits import DecodeLimits
    from visionfast.preprocess.reference import letterbox, letterbox_geometry, normalise
    from visionfast.preprocess.reference_decode import decode_reference

__all__ = [
    "CpuPreprocessor",
    "DaliPreprocessor",
    "DecodeLimits",
    "decode_image",
    "decode_reference",
    "letterbox",
    "letterbox_geometry",
    "letterbox_pipeline",
    "normalise",
]

_MODULES = {
    "CpuPreprocessor": "cpu",
    "DaliPreprocessor": "dali",
    "DecodeLimits": "limits",
    "decode_image": "decode",
    "decode_reference": "reference_decode",
    "letterbox": "reference",
    "letterbox_geometry": "reference",
    "letterbox_pipeline": "dali",
    "normalise": "reference",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
