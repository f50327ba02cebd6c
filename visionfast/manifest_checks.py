"""Is an engine.json, whose fields have the right types, one that an engine can be run by?

It is data from elsewhere: what is said here in one line would be a crash, or a wrong answer, further on.
"""

from __future__ import annotations

import re

from visionfast.errors import ManifestError
from visionfast.types import EngineManifest, GraphSpec, ModelSpec, PreprocessSpec, TensorSpec

__all__ = ["check_manifest"]

_IMAGES = {"NCHW": ("float32", "float16"), "NHWC": ("uint8",)}
"""Layout of an image input → dtypes that it may have."""


def check_manifest(manifest: EngineManifest) -> None:
    """Raises `ManifestError` unless the fields go together."""
    if re.fullmatch(r"cpu|cuda|sm\d{2,3}", manifest.device, re.ASCII) is None:
        raise ManifestError(f"device: expected cpu, cuda or a GPU generation such as sm89, got {manifest.device!r}")
    spec = manifest.spec
    _check_preprocess(spec.preprocess)
    if (spec.task == "prompt-segment") != (spec.prompts is not None):
        raise ManifestError("spec.prompts: expected it for prompt-segment and for no other task")
    if not spec.graphs:
        raise ManifestError("expected at least one graph, got none")
    for graph in spec.graphs:
        _check_graph(graph)
        if graph.name not in manifest.files:
            raise ManifestError(f"no file for the graph {graph.name!r}")
    if spec.task == "embed":
        _check_embedder(spec)
    for name in manifest.files.values():
        if name not in manifest.sha256:
            raise ManifestError(f"no sha256 for {name!r}")


def _check_preprocess(pre: PreprocessSpec) -> None:
    padded = pre.resize != "letterbox" if pre.pad_value is None else 0 <= pre.pad_value <= 255
    if min(pre.size_hw) < 1 or not padded or not all(pre.std):
        raise ManifestError(
            f"preprocess: expected sides of at least 1 pixel, pad_value 0..255 and no std of 0, got {pre}"
        )
    if (pre.resize == "centre-crop") != (pre.cover_hw is not None):
        raise ManifestError(f"preprocess: expected cover_hw for centre-crop and for no other, got {pre}")
    if pre.cover_hw is not None and any(c < s for c, s in zip(pre.cover_hw, pre.size_hw, strict=True)):
        raise ManifestError(f"preprocess: cover_hw: expected at least {pre.size_hw}, got {pre.cover_hw}")


def _check_graph(graph: GraphSpec) -> None:
    if not graph.inputs or not graph.outputs:
        raise ManifestError(f"graph {graph.name!r}: expected at least one input and output")
    for tensor in (*graph.inputs, *graph.outputs):
        if not tensor.shape or min(tensor.shape) < 1:
            raise ManifestError(f"{tensor.name}: expected a shape of sides of at least 1, got {tensor.shape}")
        if tensor.axes and (len(tensor.axes) != len(tensor.shape) or set(tensor.axes) - {"", *graph.usual}):
            raise ManifestError(
                f"{tensor.name}: expected an axis of {', '.join(graph.usual) or 'none'} or '' for each side of its "
                f"shape, got {tensor.axes}"
            )


def _check_embedder(spec: ModelSpec) -> None:
    """Images of the size that the preprocessing makes, one vector for each and one for each of its square patches."""
    pre = spec.preprocess
    if pre.resize not in ("centre-crop", "stretch"):
        raise ManifestError(f"preprocess: resize: expected centre-crop or stretch for embed, got {pre.resize}")
    if len(spec.graphs) != 1 or len(spec.graphs[0].inputs) != 1 or len(spec.graphs[0].outputs) != 2:
        raise ManifestError("expected one graph with one input and the outputs cls and patches for embed")
    (graph,) = spec.graphs
    (images,), (cls, patches), (h, w) = graph.inputs, graph.outputs, pre.size_hw
    n = spec.batch
    expected = {"NCHW": (n, 3, h, w), "NHWC": (n, h, w, 3)}
    if images.shape != expected.get(images.layout) or images.dtype not in _IMAGES[images.layout]:
        raise ManifestError(
            f"{images.name}: expected {expected['NCHW']} NCHW float32 or float16, or {expected['NHWC']} NHWC uint8, "
            f"got {images.shown} {images.layout} {images.dtype}"
        )
    if not _are_vectors(cls, patches, n) or not _are_square(patches.shape[1:3], (h, w)):
        raise ManifestError(
            f"expected {cls.name} ({n}, D) and {patches.name} ({n}, h, w, D), float32 or float16, of square patches of "
            f"{h}×{w} pixels, got {cls.shown} {cls.dtype} and {patches.shown} {patches.dtype}"
        )


def _are_vectors(cls: TensorSpec, patches: TensorSpec, batch: int) -> bool:
    channels = cls.shape[-1]
    return (
        cls.shape == (batch, channels)
        and len(patches.shape) == 4
        and patches.shape[::3] == (batch, channels)
        and all(not tensor.axes and tensor.dtype in ("float32", "float16") for tensor in (cls, patches))
    )


def _are_square(grid_hw: tuple[int, ...], size_hw: tuple[int, int]) -> bool:
    sides = {size / count for count, size in zip(grid_hw, size_hw, strict=True)}
    return len(sides) == 1 and sides.pop().is_integer()
