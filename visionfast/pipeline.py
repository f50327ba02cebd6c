"""The hub where the stages meet: image → decode → letterbox → engine → boxes, NMS, masks → `Detections`."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from visionfast import artifacts
from visionfast.backends import get_backend
from visionfast.errors import BackendError, ImageError, OptionError
from visionfast.postprocess.detections import check_options, postprocess
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.preprocess.decode import DecodeLimits, decode_image
from visionfast.types import Detections, EngineManifest, Letterbox, ModelSpec, Runner

__all__ = ["Detector", "ImageSource", "Segmenter", "open_engine"]

_Self = TypeVar("_Self", bound="Detector")
# A path, an encoded image, or a uint8 RGB array.
ImageSource: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | npt.NDArray[np.uint8]"


class Detector:
    """Finds objects. One engine, its buffers and its settings; a context manager; not for several threads at once.

    Args:
        spec: of the model.
        runner: of its graph; closed with the detector.
        conf: objects above this confidence, 0..1.
        iou: of two boxes of one class that overlap more than this, 0..1, the less confident one goes.
        max_det: objects an image at most.
        classes: only these, by name or id; `None`: all.
        class_agnostic: boxes of different classes suppress one another too.
        limits: what an image may claim.

    Raises:
        OptionError: an option is out of its range, or a class is unknown.
    """

    task = "detect"

    def __init__(
        self,
        spec: ModelSpec,
        runner: Runner,
        *,
        conf: float = 0.25,
        iou: float = 0.7,
        max_det: int = 300,
        classes: Sequence[int | str] | None = None,
        class_agnostic: bool = False,
        limits: DecodeLimits | None = None,
    ) -> None:
        if spec.task != self.task:
            other = Segmenter if spec.task == "segment" else Detector
            raise OptionError(f"{spec.name}: a model for {spec.task}; open it with {other.__name__}")
        self.spec = spec
        self.manifest: EngineManifest | None = None
        self._options: dict[str, Any] = {
            "num_classes": len(spec.class_names),
            "conf": conf,
            "iou": iou,
            "max_det": max_det,
            "classes": None if classes is None else [_class_id(c, spec.class_names) for c in classes],
        }
        check_options(**self._options)
        self._options["class_agnostic"] = class_agnostic
        self._runner = runner
        self._limits = limits or DecodeLimits()
        self._preprocessor = CpuPreprocessor(spec.preprocess)
        self._input = runner.inputs[0]
        h, w = spec.preprocess.size_hw
        self._canvas = np.full((self._input.shape[0], h, w, 3), spec.preprocess.pad_value, np.uint8)
        # An engine with normalisation inside reads the canvas itself.
        self._tensor: npt.NDArray[Any] = (
            self._canvas if self._input.layout == "NHWC" else np.zeros(self._input.shape, self._input.dtype)
        )
        self._closed = False

    @classmethod
    def open(cls: type[_Self], engine: str | os.PathLike[str], *, threads: int | None = None, **options: Any) -> _Self:
        """Opens an engine's folder.

        Args:
            engine: its path, or the name of a model that has one engine under engines/.
            threads: processors to compute on; default: all that this process may use.
            options: as for the class.

        Raises:
            ArtifactError, ManifestError: there is no such engine, or it is damaged.
            BackendError: this machine cannot run it.
            OptionError: an option does not exist or is out of its range.
        """
        folder = artifacts.find_engine(engine, usable=_runs_here)
        manifest = artifacts.read_manifest(folder)
        return cls._from_folder(folder, manifest, threads, options)

    @classmethod
    def _from_folder(
        cls: type[_Self], folder: Path, manifest: EngineManifest, threads: int | None, options: dict[str, Any]
    ) -> _Self:
        if threads is not None and threads < 1:
            raise OptionError(f"threads: expected at least 1, got {threads}")
        if unknown := sorted(set(options) - set(known := _option_names(cls))):
            raise OptionError(f"option {unknown[0]!r}: expected one of {', '.join(known)}")
        runner = get_backend(manifest.backend).load(folder, manifest, manifest.spec.graphs[0], threads=threads)
        try:
            detector = cls(manifest.spec, runner, **options)
        except BaseException:
            runner.close()
            raise
        detector.manifest = manifest
        return detector

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.spec.class_names

    @overload
    def __call__(
        self, images: ImageSource | Sequence[ImageSource], *, on_error: Literal["raise"] = ...
    ) -> list[Detections]: ...

    @overload
    def __call__(
        self, images: ImageSource | Sequence[ImageSource], *, on_error: Literal["return"]
    ) -> list[Detections | ImageError]: ...

    def __call__(
        self, images: ImageSource | Sequence[ImageSource], *, on_error: Literal["raise", "return"] = "raise"
    ) -> Any:
        """Answers every image, in order.

        Args:
            images: paths, encoded bytes, or (H, W, 3) u8 RGB arrays (also (H, W), (H, W, 1), RGBA); one of them
                by itself counts as a list of one.
            on_error: `raise` the first image's error, or `return` it in that image's place: one bad image never
                harms the others.

        Raises:
            ImageError: with `on_error="raise"`.
        """
        if on_error not in ("raise", "return"):
            raise OptionError(f"on_error: expected 'raise' or 'return', got {on_error!r}")
        if self._closed:
            raise OptionError(f"{self.spec.name}: this {type(self).__name__} is closed; open the engine again")
        if isinstance(images, (str, os.PathLike, bytes, bytearray, memoryview, np.ndarray)):
            images = [images]
        answers: list[Detections | ImageError] = []
        for first in range(0, len(images), self._input.shape[0]):
            answers += self._batch(images[first : first + self._input.shape[0]], first, on_error == "raise")
        return answers

    def close(self) -> None:
        """Frees the engine. Closing twice is harmless."""
        self._closed = True
        self._runner.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _batch(self, images: Sequence[ImageSource], first: int, raises: bool) -> list[Detections | ImageError]:
        """At most one engine call's worth of images: preprocess, infer, postprocess."""
        answers: list[Detections | ImageError | None] = [None] * len(images)
        placed: dict[int, tuple[Letterbox, dict[str, int]]] = {}
        for slot, source in enumerate(images):
            try:
                placed[slot] = self._place(source, slot, first + slot)
            except ImageError as error:
                if raises:
                    raise
                answers[slot] = error
        if placed:
            outputs, engine_ns = self._infer(len(placed))
            for slot, (letterbox, stage_ns) in placed.items():
                answers[slot] = self._answer(outputs, slot, letterbox, stage_ns | {"engine": engine_ns})
        return [answer for answer in answers if answer is not None]

    def _place(self, source: ImageSource, slot: int, index: int) -> tuple[Letterbox, dict[str, int]]:
        started = perf_counter_ns()
        name = None if isinstance(source, (str, os.PathLike)) else f"image {index}"
        pixels = decode_image(source, limits=self._limits, name=name)
        decoded = perf_counter_ns()
        letterbox = self._preprocessor.write(pixels, self._canvas[slot])
        return letterbox, {"decode": decoded - started, "preprocess": perf_counter_ns() - decoded}

    def _infer(self, count: int) -> tuple[dict[str, npt.NDArray[Any]], int]:
        """The engine on all slots; a slot without an image computes what is there and is not looked at."""
        started = perf_counter_ns()
        if self._tensor is not self._canvas:
            self._preprocessor.normalise(self._canvas, self._tensor)
        # The answers are made from copies before the next call can overwrite these buffers.
        outputs = self._runner.infer({self._input.name: self._tensor}, copy=False)
        return outputs, (perf_counter_ns() - started) // count

    def _answer(
        self, outputs: dict[str, npt.NDArray[Any]], slot: int, letterbox: Letterbox, stage_ns: dict[str, int]
    ) -> Detections:
        started = perf_counter_ns()
        prototypes = outputs.get("prototypes")
        found = postprocess(
            outputs["predictions"][slot],
            letterbox,
            prototypes=None if prototypes is None else prototypes[slot],
            **self._options,
        )
        return replace(found, stage_ns=stage_ns | {"postprocess": perf_counter_ns() - started})


class Segmenter(Detector):
    """Finds objects and their masks; otherwise as `Detector`."""

    task = "segment"


def open_engine(engine: str | os.PathLike[str], *, threads: int | None = None, **options: Any) -> Detector:
    """Opens an engine as what its task needs, `Detector` or `Segmenter`; arguments and errors as `Detector.open`."""
    folder = artifacts.find_engine(engine, usable=_runs_here)
    manifest = artifacts.read_manifest(folder)
    opened = Segmenter if manifest.spec.task == "segment" else Detector
    return opened._from_folder(folder, manifest, threads, options)


def _runs_here(manifest: EngineManifest) -> bool:
    try:
        get_backend(manifest.backend).check_runnable(manifest)
    except (BackendError, OptionError):
        return False
    return True


def _option_names(opened: type[Detector]) -> list[str]:
    """What the class takes by keyword, beside the model and its runner."""
    return [p.name for p in inspect.signature(opened).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _class_id(named: int | str, class_names: tuple[str, ...]) -> int:
    if isinstance(named, str):
        with contextlib.suppress(ValueError):
            return class_names.index(named)
        if not named.isdecimal():
            shown = ", ".join(class_names[:12]) + (", …" if len(class_names) > 12 else "")
            raise OptionError(f"classes: no class {named!r}; there are {shown}")
    return int(named)
