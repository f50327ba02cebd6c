"""The two sides that `verify` compares, engine and PyTorch, and their answers to a data set's images."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from visionfast.errors import ImageError, ImageFormatError
from visionfast.pipeline import Detector, Segmenter
from visionfast.preprocess.decode import read_image_file
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections
from visionfast.types import EngineManifest
from visionfast.verify_dataset import CocoDataset, DatasetImage

__all__ = ["Side", "answered", "eager_side", "naive_side"]


class Side(Protocol):
    """Encoded images in, objects out, an image that cannot be used as its error."""

    def __call__(self, images: Sequence[bytes], *, on_error: Literal["return"]) -> list[Detections | ImageError]: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    image: DatasetImage
    data: bytes


def answered(
    data: CocoDataset,
    sides: tuple[Side, Side],
    batch: int,
    limits: DecodeLimits,
    progress: Callable[[str, int, int | None], None],
) -> Iterator[tuple[DatasetImage, tuple[Detections, Detections] | ImageError]]:
    """Every image with both sides' answers, or with what is wrong with it; in order within a batch of good ones."""
    ours, theirs = sides
    total = len(data.images)
    progress("verifying", 0, total)
    for first in range(0, total, batch):
        loaded = []
        for image in data.images[first : first + batch]:
            try:
                loaded.append(_Loaded(image, read_image_file(data.path(image), limits=limits)))
            except ImageError as error:
                yield image, error
        answers = ours([one.data for one in loaded], on_error="return")
        usable = []
        for one, answer in zip(loaded, answers, strict=True):
            checked = _of_its_size(one.image, answer)
            if isinstance(checked, ImageError):
                yield one.image, checked
            else:
                usable.append((one, checked))
        others = theirs([one.data for one, _ in usable], on_error="return")
        for (one, found), other in zip(usable, others, strict=True):
            expected = _of_its_size(one.image, other)
            yield one.image, expected if isinstance(expected, ImageError) else (found, expected)
        progress("verifying", min(first + batch, total), total)


def _of_its_size(image: DatasetImage, answer: Detections | ImageError) -> Detections | ImageError:
    """An answer in other pixels than the annotations' would be judged for what it is not."""
    if isinstance(answer, ImageError) or image.image_hw in (None, answer.image_hw):
        return answer
    (height, width), (got_height, got_width) = image.image_hw, answer.image_hw
    return ImageFormatError(
        image.file_name, f"expected {height}×{width} pixels as its annotations say, got {got_height}×{got_width}"
    )


@contextlib.contextmanager
def eager_side(
    folder: Path,
    manifest: EngineManifest,
    weights: Path | None,
    trust_checkpoint: bool,
    threads: int | None,
    options: dict[str, Any],
) -> Iterator[Side]:
    """The certificate's reference: the checkpoint's modules in the place of the engine."""
    from visionfast.backends.torch import TorchRunner
    from visionfast.certify import load_reference

    model = load_reference(folder, manifest, model=weights, trust_checkpoint=trust_checkpoint, option="--weights")
    graph = model.spec.graphs[0]
    kind = Segmenter if manifest.spec.task == "segment" else Detector
    runner = TorchRunner(model.modules[graph.name], graph, threads=threads)
    with kind(model.spec, runner, **options) as side:
        yield side


def naive_side(manifest: EngineManifest, weights: Path | None, options: Mapping[str, Any]) -> Side:
    from PIL import Image

    from visionfast.bench.baseline import NaivePyTorch
    from visionfast.certify import weights_of

    found = weights_of(manifest, weights, option="--weights")
    thresholds = {name: options[name] for name in ("conf", "iou", "max_det")}
    naive = NaivePyTorch(found, size_hw=manifest.spec.preprocess.size_hw, **thresholds)

    def answer(images: Sequence[bytes], *, on_error: Literal["return"]) -> list[Detections | ImageError]:
        answers: list[Detections | ImageError] = []
        for data in images:
            try:
                answers.append(naive(data))
            # What Pillow raises for a file that it cannot decode: a broken PNG is a SyntaxError to it. ultralytics
            # puts itself in front of it and asks for a package of its own (8.4).
            except (OSError, ValueError, SyntaxError, ImportError, Image.DecompressionBombError) as error:
                answers.append(ImageFormatError("bytes", f"PIL cannot decode it ({' '.join(str(error).split())})"))
        return answers

    return answer
