"""Specs: frozen dataclasses with shapes and units in the fields' docs. Results are in `visionfast.results`.

Nothing here imports a runtime; `numpy` is the only dependency. `H, W` are pixels of the original image after
its EXIF orientation was applied, `h, w` pixels of the network's input, `N` objects or images, `A` anchors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from visionfast.errors import ShapeError

__all__ = [
    "Certificate",
    "EngineManifest",
    "FloatArray",
    "GraphSpec",
    "Letterbox",
    "ModelSpec",
    "Precision",
    "PreprocessSpec",
    "Runner",
    "Task",
    "TensorSpec",
]

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Task: TypeAlias = Literal["detect", "segment"]
Precision: TypeAlias = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a graph.

    Attributes:
        name: as in the graph.
        shape: fixed, the batch first.
        dtype: NumPy's name: `float32`, `float16`, `uint8`.
        layout: `NCHW` or `NHWC` for images, else empty. A `uint8` `NHWC` image input means that
            normalisation is inside the engine.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = ""

    def check(self, array: npt.NDArray[Any]) -> None:
        """Raises `ShapeError` unless `array` has this shape and dtype."""
        if array.shape != self.shape or array.dtype.name != self.dtype:
            got = f"{tuple(array.shape)} {array.dtype.name}"
            raise ShapeError(f"{self.name}: expected {self.shape} {self.dtype}, got {got}")


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One compiled graph of a model: one for YOLO, two (encoder, decoder) for SAM."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class PreprocessSpec:
    """From an RGB image to the network's input tensor.

    `tensor = (resized_u8 / 255 - mean) / std`, planar RGB.

    Attributes:
        size_hw: the network's input, `(h, w)` in pixels.
        resize: `letterbox`: keep the aspect ratio, centre, pad (`visionfast.preprocess.reference`).
        interpolation: `bilinear`, without antialias.
        pad_value: grey level 0..255 of the padding, in every channel.
        mean, std: per channel, in units of 1.0 = level 255.
        color: channel order that the network expects.
    """

    size_hw: tuple[int, int]
    resize: Literal["letterbox"] = "letterbox"
    interpolation: Literal["bilinear"] = "bilinear"
    pad_value: int = 114
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    color: Literal["rgb"] = "rgb"


@dataclass(frozen=True, slots=True)
class Letterbox:
    """Where one image lies in the network's input (made by `preprocess.reference.letterbox_geometry`).

    Attributes:
        image_hw: the original image, pixels.
        size_hw: the network's input, pixels.
        resized_hw: the image's size inside it, pixels, at least 1 × 1.
        top, left: the image's corner inside it, pixels.
        gain: original pixels × gain = input pixels.
    """

    image_hw: tuple[int, int]
    size_hw: tuple[int, int]
    resized_hw: tuple[int, int]
    top: int
    left: int
    gain: float


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that running a model's engines needs to know about the model; embedded in `engine.json`.

    Attributes:
        name: the model's name, from the weights' file name.
        family: key in `visionfast.families.FAMILIES`.
        architecture: as its makers call it, e.g. `yolov8s-seg`.
        task: `detect` or `segment`.
        graphs: what is compiled.
        preprocess: what stands in front of the first graph.
        class_names: index = class id.
        strides: of the detection levels, pixels.
        license: of the weights, as far as the checkpoint says, else empty.
    """

    name: str
    family: str
    architecture: str
    task: Task
    graphs: tuple[GraphSpec, ...]
    preprocess: PreprocessSpec
    class_names: tuple[str, ...]
    strides: tuple[int, ...]
    license: str = ""

    @property
    def batch(self) -> int:
        """Images that one call of the first graph takes."""
        return self.graphs[0].inputs[0].shape[0]


@dataclass(frozen=True, slots=True)
class Certificate:
    """How far an engine is from eager FP32 PyTorch on real images (see `visionfast.certify`).

    Attributes:
        status: `passed`, `failed`, or `not yet run on a device` where this machine cannot run the engine.
        reference: what it was compared with.
        tolerances: the bound for each measure.
        measures: the measured figures, over all images.
        images: for each image its file name, sha256 and figures.
        environment: machine and versions.
        created: UTC, ISO 8601.
        kept: module → why it stays FP32, for those that the build found to drift in FP16.
        search: how the build looked for them and what came of it, in words; empty where it had no need to.
    """

    status: Literal["passed", "failed", "not yet run on a device"]
    reference: str = ""
    tolerances: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)
    images: tuple[Mapping[str, Any], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    created: str = ""
    kept: Mapping[str, str] = field(default_factory=dict)
    search: str = ""


@dataclass(frozen=True, slots=True)
class EngineManifest:
    """`engine.json`: what an engine is, what it was made from, and its certificate.

    Attributes:
        spec: the model; its graphs' tensors are those of the compiled engine.
        backend: key in `visionfast.backends.BACKENDS`.
        precision: of the graph.
        device: what it was compiled for: `cpu`, `sm89`, `cuda` for any CUDA device.
        runtime_version: of the package that compiled it.
        files: graph name → file name beside engine.json.
        sha256: file name → hash, for every file.
        onnx_sha256: graph name → hash of the ONNX that was compiled.
        weights_sha256: of the checkpoint.
        keep_fp32: modules that an FP16 or BF16 graph keeps in FP32.
        certificate: the proof, or the word that there is none yet.
        created: UTC, ISO 8601.
        visionfast_version: that built it.
        platform: that it was built on, `linux-x86_64`; empty in manifests from before it was recorded.
        layers: how many of the compiled layers give each dtype, where the compiler says so.
    """

    spec: ModelSpec
    backend: str
    precision: Precision
    device: str
    runtime_version: str
    files: Mapping[str, str]
    sha256: Mapping[str, str]
    onnx_sha256: Mapping[str, str]
    weights_sha256: str
    keep_fp32: tuple[str, ...]
    certificate: Certificate
    created: str
    visionfast_version: str
    platform: str = ""
    layers: Mapping[str, int] = field(default_factory=dict)


@runtime_checkable
class Runner(Protocol):
    """One loaded graph. Not for several threads at once; a context manager."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    def infer(self, feeds: Mapping[str, npt.NDArray[Any]], *, copy: bool = True) -> dict[str, npt.NDArray[Any]]:
        """One synchronous run.

        Args:
            feeds: every input by name; names, shapes and dtypes are checked first (`ShapeError`).
            copy: `False` hands out the runner's own buffers, which the next call overwrites: for a caller
                that is done with them by then.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Runner: ...

    def __exit__(self, *exc: object) -> None: ...
