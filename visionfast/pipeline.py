"""The hub where the stages meet: image → decode → letterbox → engine → boxes, NMS, masks → `Detections`."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy.typing as npt

from visionfast import artifacts
from visionfast.backends import DeviceEngine
from visionfast.errors import ImageError, OptionError
from visionfast.loading import check_outputs, load_graphs, runs_here
from visionfast.postprocess.detections import check_options
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.sessions import ImageSource
from visionfast.sessions.opening import open_session
from visionfast.types import EngineManifest, ModelSpec, Runner, Task

if TYPE_CHECKING:
    from visionfast.embedder import Embedder
    from visionfast.prompt_segmenter import PromptSegmenter

__all__ = ["Detector", "ImageSource", "Segmenter", "check_outputs", "class_id_of", "open_engine", "runs_here"]

_Self = TypeVar("_Self", bound="Detector")


class Detector:
    """Finds objects. One engine, its buffers and its settings; a context manager; not for several threads at once.

    Args:
        spec: of the model.
        engine: a runner of its graph on the host, or an engine on a GPU; closed with the detector.
        conf: objects above this confidence, 0..1.
        iou: of two boxes of one class that overlap more than this, 0..1, the less confident one goes.
        max_det: objects an image at most.
        classes: only these, by name or id; `None`: all.
        class_agnostic: boxes of different classes suppress one another too.
        limits: what an image may claim.
        graph: on a GPU, replay one CUDA graph (`True`) or launch each part (`False`); `None`: where it can be. The
            answers are the same.
        decoder: on a GPU, who decodes encoded images: `dali` on the GPU (and the CPU what DALI does not do as well),
            or `cpu`; `None`: DALI where it is installed.
        check_scans: with DALI, let the CPU look for damage inside a JPEG, which DALI does not mention, while the GPU
            works. Half a decode on the CPU; without it, a damaged JPEG that has its end is answered as it looks.

    Raises:
        OptionError: an option is out of its range, or a class is unknown.
        BackendError: the runtime failed.
    """

    task = "detect"

    def __init__(
        self,
        spec: ModelSpec,
        engine: Runner | DeviceEngine,
        *,
        conf: float = 0.25,
        iou: float = 0.7,
        max_det: int = 300,
        classes: Sequence[int | str] | None = None,
        class_agnostic: bool = False,
        limits: DecodeLimits | None = None,
        graph: bool | None = None,
        decoder: Literal["dali", "cpu"] | None = None,
        check_scans: bool = True,
    ) -> None:
        _check_task(spec, self.task)
        self.spec = spec
        self.manifest: EngineManifest | None = None
        self._options: dict[str, Any] = {
            "num_classes": len(spec.class_names),
            "conf": conf,
            "iou": iou,
            "max_det": max_det,
            "classes": None if classes is None else [class_id_of(c, spec.class_names) for c in classes],
        }
        check_options(**self._options)
        self._options["class_agnostic"] = class_agnostic
        self._session = open_session(
            spec,
            engine,
            self._options,
            limits or DecodeLimits(),
            graph=graph,
            decoder=decoder,
            check_scans=check_scans,
        )
        self._closed = False

    @classmethod
    def open(
        cls: type[_Self],
        engine: str | os.PathLike[str],
        *,
        threads: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> _Self:
        """Opens an engine's folder.

        Args:
            engine: its path, or the name of a model that has one engine under engines/.
            threads: processors to compute on; default: all that this process may use.
            device: `cpu`, `cuda` or `cuda:1`; default: what the engine was built for, the first of its kind.
            options: as for the class.

        Raises:
            ArtifactError, ManifestError: there is no such engine, or it is damaged.
            BackendError: this machine cannot run it.
            OptionError: an option does not exist or is out of its range.
        """
        folder = artifacts.find_engine(engine, usable=runs_here)
        manifest = artifacts.read_manifest(folder)
        return cls._from_folder(folder, manifest, threads, device, options)

    @classmethod
    def _from_folder(
        cls: type[_Self],
        folder: Path,
        manifest: EngineManifest,
        threads: int | None,
        device: str | None,
        options: dict[str, Any],
    ) -> _Self:
        _check_names(options, _option_names(cls))
        _check_task(manifest.spec, cls.task)
        check_outputs(folder, manifest)
        (engine,) = load_graphs(folder, manifest, threads=threads, device=device)
        try:
            detector = cls(manifest.spec, engine, **options)
        except BaseException:
            engine.close()
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
            images: paths, encoded bytes, (H, W, 3) u8 RGB arrays (also (H, W), (H, W, 1), RGBA), or frames of video
                (`Nv12Frame`); for an engine on a GPU also (H, W, 3) u8 RGB tensors on that GPU, which the caller leaves
                alone until the call returns. One of them by itself counts as a list of one.
            on_error: `raise` the first image's error, or `return` it in that image's place: one bad image never
                harms the others.

        Raises:
            ImageError: with `on_error="raise"`.
        """
        if on_error not in ("raise", "return"):
            raise OptionError(f"on_error: expected 'raise' or 'return', got {on_error!r}")
        if self._closed:
            raise OptionError(f"{self.spec.name}: this {type(self).__name__} is closed; open the engine again")
        if not isinstance(images, Sequence) or isinstance(images, (str, bytes, bytearray, memoryview)):
            images = [images]
        answers: list[Detections | ImageError] = []
        for first in range(0, len(images), batch := self._session.batch):
            some = images[first : first + batch]
            answers += self._session.answer(some, first=first, raises=on_error == "raise")
        return answers

    def raw(self) -> dict[str, npt.NDArray[Any]]:
        """What the engine gave for the last batch, copied: its outputs by name, all slots of the batch."""
        return self._session.raw()

    def close(self) -> None:
        """Frees the engine. Closing twice is harmless."""
        self._closed = True
        self._session.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Segmenter(Detector):
    """Finds objects and their masks; otherwise as `Detector`."""

    task = "segment"


def open_engine(
    engine: str | os.PathLike[str], *, threads: int | None = None, device: str | None = None, **options: Any
) -> Detector | PromptSegmenter | Embedder:
    """Opens an engine as what its task needs: `Detector`, `Segmenter`, `PromptSegmenter` or `Embedder`.

    Arguments and errors as for the `open` of each.
    """
    folder = artifacts.find_engine(engine, usable=runs_here)
    manifest = artifacts.read_manifest(folder)
    if manifest.spec.task == "prompt-segment":
        from visionfast.prompt_segmenter import PromptSegmenter

        return PromptSegmenter.open(folder, threads=threads, device=device, **options)
    if manifest.spec.task == "embed":
        from visionfast.embedder import Embedder

        _check_names(options, ("limits", "streams"))
        return Embedder.open(folder, threads=threads, device=device, **options)
    opened = Segmenter if manifest.spec.task == "segment" else Detector
    return opened._from_folder(folder, manifest, threads, device, options)


def _check_task(spec: ModelSpec, task: str) -> None:
    if spec.task != task:
        raise OptionError(f"{spec.name}: a model for {spec.task}; open it with {_OPENED_BY[spec.task]}")


_OPENED_BY: dict[Task, str] = {
    "detect": "Detector",
    "segment": "Segmenter",
    "prompt-segment": "PromptSegmenter",
    "embed": "Embedder",
}


def _check_names(options: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := sorted(set(options) - set(known)):
        raise OptionError(f"option {unknown[0]!r}: expected one of {', '.join(known)}")


def _option_names(opened: type[Detector]) -> list[str]:
    """What the class takes by keyword, beside the model and its engine."""
    return [p.name for p in inspect.signature(opened).parameters.values() if p.kind is p.KEYWORD_ONLY]


def class_id_of(named: int | str, class_names: tuple[str, ...]) -> int:
    """A class by its name or id. Raises `OptionError` for a name that is none; an id is not looked at."""
    if isinstance(named, str):
        with contextlib.suppress(ValueError):
            return class_names.index(named)
        if not named.isdecimal():
            shown = ", ".join(class_names[:12]) + (", …" if len(class_names) > 12 else "")
            raise OptionError(f"classes: no class {named!r}; there are {shown}")
    return int(named)
