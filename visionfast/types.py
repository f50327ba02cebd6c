"""Specs: frozen dataclasses with shapes and units in the fields' docs. Results are in `visionfast.results`.

Nothing here imports a runtime; `numpy` is the only dependency. `H, W` are pixels of the original image after
its EXIF orientation was applied, `h, w` pixels of the network's input, `N` objects or images, `A` anchors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    "PromptSpec",
    "PromptTensors",
    "Resize",
    "Runner",
    "Task",
    "TensorSpec",
]

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
Task: TypeAlias = Literal["detect", "segment", "prompt-segment", "embed"]
Resize: TypeAlias = Literal["letterbox", "longest-side", "stretch", "centre-crop"]
Precision: TypeAlias = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a graph.

    Attributes:
        name: as in the graph.
        shape: the batch first. A dimension that `axes` names is the most that it can be.
        dtype: NumPy's name: `float32`, `float16`, `uint8`.
        layout: `NCHW` or `NHWC` for images, else empty. A `uint8` `NHWC` image input means that
            normalisation is inside the engine.
        axes: a name for each dimension that varies from call to call, from 1 up to its size in `shape`, and an empty
            one for those that are fixed; of one name, all have one size. Empty where all are fixed, as in every graph
            but a prompt decoder.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = ""
    axes: tuple[str, ...] = ()

    def check(self, array: npt.NDArray[Any]) -> None:
        """Raises `ShapeError` unless `array` has this dtype, and a shape that this one allows."""
        if array.dtype.name != self.dtype or not self.allows(array.shape):
            got = f"{tuple(array.shape)} {array.dtype.name}"
            raise ShapeError(f"{self.name}: expected {self.shown} {self.dtype}, got {got}")

    def allows(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor may have this shape."""
        if not self.axes:
            return shape == self.shape
        return len(shape) == len(self.shape) and all(
            (1 <= size <= most) if axis else size == most
            for size, most, axis in zip(shape, self.shape, self.axes, strict=True)
        )

    @property
    def shown(self) -> str:
        """The shape for messages: `(64, 4, 256, 256)`, or `(prompts 1..64, 4, 256, 256)`."""
        axes = self.axes or ("",) * len(self.shape)
        sizes = [f"{axis} 1..{most}" if axis else str(most) for most, axis in zip(self.shape, axes, strict=True)]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape where the axes have these sizes: axis name → size."""
        if not self.axes:
            return self.shape
        return tuple(sizes[axis] if axis else most for most, axis in zip(self.shape, self.axes, strict=True))


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One compiled graph of a model: one for YOLO, two (encoder, decoder) for SAM.

    Attributes:
        name: of the graph.
        inputs, outputs: its tensors, in order.
        usual: axis name → the size that a compiler should be fastest at; every axis that the tensors name is in it.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    usual: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreprocessSpec:
    """From an RGB image to the network's input tensor.

    `tensor = (resized / 255 - mean) / std`, planar RGB.

    Attributes:
        size_hw: the network's input, `(h, w)` in pixels.
        resize: how an image is brought to it.
            `letterbox`: keep the aspect ratio, centre, pad (YOLO; `visionfast.preprocess.reference`).
            `longest-side`: keep the aspect ratio, top left, pad below or to the right (SAM;
            `visionfast.preprocess.antialias`); the resized image is rounded to 8 bits.
            `stretch`: to the whole input, whatever the aspect ratio (SAM 2, DINO on request; the same module); nothing
            is rounded with `bilinear-antialias`, to 8 bits with `bicubic-antialias`.
            `centre-crop`: keep the aspect ratio, just cover `cover_hw`, take the middle (DINO; the same module); the
            resized image is rounded to 8 bits.
        interpolation: `bilinear`, without antialias; or, as Pillow has them, `bilinear-antialias`, a triangle filter
            as wide as the reduction, and `bicubic-antialias`, Keys' cubic (a = -0.5) as wide.
        pad_value: grey level 0..255 of the padding, in every channel; `None`: 0 after normalisation. Of no effect
            where nothing is padded.
        mean, std: per channel, in units of 1.0 = level 255.
        color: channel order that the network expects.
        cover_hw: for `centre-crop`, pixels, at least `size_hw`; else `None`.
    """

    size_hw: tuple[int, int]
    resize: Resize = "letterbox"
    interpolation: Literal["bilinear", "bilinear-antialias", "bicubic-antialias"] = "bilinear"
    pad_value: int | None = 114
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    color: Literal["rgb"] = "rgb"
    cover_hw: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Letterbox:
    """Where one image lies in the network's input, by whichever of `PreprocessSpec.resize`.

    Made by `preprocess.reference.letterbox_geometry` and `preprocess.antialias.geometry`.

    Attributes:
        image_hw: the original image, pixels.
        size_hw: the network's input, pixels.
        resized_hw: the image's size at the network's scale, pixels, at least 1 × 1.
        top, left: the image's corner inside it, pixels; negative where the input is a window of the image.
        gain: original pixels × gain = input pixels; for `stretch`, where each side has its own, the smaller one.
    """

    image_hw: tuple[int, int]
    size_hw: tuple[int, int]
    resized_hw: tuple[int, int]
    top: int
    left: int
    gain: float


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """How clicks and boxes become a prompt decoder's inputs, and which of its masks are the answer.

    The decoder takes, for each of P prompts, N points in pixels of the network's input and as many labels: 1 a point
    on the object, 0 one beside it, 2 and 3 a box's top left and bottom right corner, -1 padding at (0, 0). It gives
    four masks a prompt with their predicted IoU: the first for a prompt that is clear, the others for one that is not.

    Attributes:
        box_first: a box's corners stand before the points (SAM 2), or behind them (SAM).
        pad_with_box: one padding point comes last always (SAM 2), or only where there is no box (SAM). No more
            padding than this: it changes the masks.
        stability: `(delta, least)`: where a single mask is asked for and the first one's stability at ±delta is
            below `least`, the best of the others stands in for it (SAM 2); `None`: the first one always (SAM).
        logit_limit: mask logits are given back within ± this (SAM 2); `None`: as they are.
        score_threshold, stability_threshold: of the published automatic generator, what a mask has to reach.
    """

    box_first: bool
    pad_with_box: bool
    stability: tuple[float, float] | None = None
    logit_limit: float | None = None
    score_threshold: float = 0.88
    stability_threshold: float = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class PromptTensors:
    """Prompts as the decoder takes them (`visionfast.preprocess.prompts` makes them).

    Attributes:
        points: (P, N, 2) float32, x and y in pixels of the network's input.
        labels: (P, N) float32: 1 on the object, 0 beside it, 2 and 3 a box's corners, -1 padding.
        mask_input: (P, 1, 256, 256) float32 mask logits of an earlier answer, or `None`.
    """

    points: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    mask_input: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.points)

    def chunks(self, size: int) -> Iterator[tuple[int, PromptTensors]]:
        """At most `size` prompts at a time, each time with the number of the first."""
        for first in range(0, len(self), size):
            some = np.s_[first : first + size]
            mask = None if self.mask_input is None else self.mask_input[some]
            yield first, PromptTensors(self.points[some], self.labels[some], mask)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that running a model's engines needs to know about the model; embedded in `engine.json`.

    Attributes:
        name: the model's name, from the weights' file name.
        family: key in `visionfast.families.FAMILIES`.
        architecture: as its makers call it, e.g. `yolov8s-seg`.
        task: `detect`, `segment`, `prompt-segment`: masks for clicks and boxes, or `embed`: a vector for each image
            and for each of its patches.
        graphs: what is compiled; for `prompt-segment` the `encoder` and the `decoder`.
        preprocess: what stands in front of the first graph.
        class_names: index = class id; none for `prompt-segment` and `embed`.
        strides: of the detection levels, pixels; none for `prompt-segment` and `embed`.
        license: of the weights, as far as the checkpoint says, else empty.
        prompts: for `prompt-segment`, else `None`.
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
    prompts: PromptSpec | None = None

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
        keep_fp32: modules that an FP16 or BF16 graph keeps in FP32; of several graphs, each with its graph's name
            before its path.
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
