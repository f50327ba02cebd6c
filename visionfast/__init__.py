"""visionfast: vision checkpoints, unchanged, compiled and served as fast as the machine allows.

    import visionfast as vf

    with vf.Detector.open("yolov8s") as detector:
        detections = detector(["bus.jpg"])[0]

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from visionfast._version import __version__

if TYPE_CHECKING:
    from visionfast.embed_job import embed_folder
    from visionfast.embedder import Embedder
    from visionfast.embedding_cache import EmbeddingCache
    from visionfast.embedding_search import search
    from visionfast.errors import ImageError, SessionBusyError, VisionfastError
    from visionfast.pipeline import Detector, Segmenter
    from visionfast.pipeline import open_engine as open  # noqa: A004 (vf.open, as in gzip.open)
    from visionfast.preprocess.decode import DecodeLimits
    from visionfast.preprocess.nv12 import Nv12Frame
    from visionfast.prompt_segmenter import PromptSegmenter
    from visionfast.results import Detections, Embeddings, Masks
    from visionfast.serving.client import Client
    from visionfast.serving.client_async import AsyncClient
    from visionfast.types import Certificate, EngineManifest, ModelSpec
    from visionfast.verify_report import VerifyReport
    from visionfast.verify_run import verify

__all__ = [
    "AsyncClient",
    "Certificate",
    "Client",
    "DecodeLimits",
    "Detections",
    "Detector",
    "Embedder",
    "EmbeddingCache",
    "Embeddings",
    "EngineManifest",
    "ImageError",
    "Masks",
    "ModelSpec",
    "Nv12Frame",
    "PromptSegmenter",
    "Segmenter",
    "SessionBusyError",
    "VerifyReport",
    "VisionfastError",
    "__version__",
    "embed_folder",
    "open",
    "search",
    "verify",
]

_HOMES = {
    "AsyncClient": "serving.client_async",
    "Certificate": "types",
    "Client": "serving.client",
    "DecodeLimits": "preprocess.decode",
    "Detections": "results",
    "Detector": "pipeline",
    "Embedder": "embedder",
    "EmbeddingCache": "embedding_cache",
    "Embeddings": "results",
    "EngineManifest": "types",
    "ImageError": "errors",
    "Masks": "results",
    "ModelSpec": "types",
    "Nv12Frame": "preprocess.nv12",
    "PromptSegmenter": "prompt_segmenter",
    "Segmenter": "pipeline",
    "SessionBusyError": "errors",
    "VerifyReport": "verify_report",
    "VisionfastError": "errors",
    "embed_folder": "embed_job",
    "open": "pipeline",
    "search": "embedding_search",
    "verify": "verify_run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'visionfast' has no attribute {name!r}; there are {', '.join(__all__)}")
    module = importlib.import_module(f"visionfast.{_HOMES[name]}")
    value = getattr(module, "open_engine" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
