"""Does an embedder's engine still agree with eager FP32 PyTorch, on real images: every vector, and what is near what?

Both get the same pixels through the same preprocessing; only what computes in between differs. An image is looked at
whole; where there are few of them, their parts are looked at too, as images of their own: an order of neighbours says
something where there are some.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.agreement import EMBED_TOLERANCES, combined, compare_embeddings, compare_neighbours, verdict
from visionfast.backends.torch import TorchRunner
from visionfast.errors import ImageError
from visionfast.families import LoadedModel
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.limits import DecodeLimits
from visionfast.sessions.embed_host import HostEmbedSession
from visionfast.sessions.embeddings import EmbedSession, Prepared
from visionfast.types import Certificate, ModelSpec, Precision

__all__ = ["GALLERY", "VIEWS", "certify_embeddings", "eager_embed_session", "run_embeddings", "view"]

VIEWS: dict[str, tuple[float, float, float, float]] = {
    "whole": (0.0, 0.0, 1.0, 1.0),
    "top left": (0.0, 0.0, 0.5, 0.5),
    "bottom right": (0.5, 0.5, 1.0, 1.0),
    "top right": (0.5, 0.0, 1.0, 0.5),
    "bottom left": (0.0, 0.5, 0.5, 1.0),
    "middle": (0.25, 0.25, 0.75, 0.75),
}
"""Left, top, right and bottom, in parts of the picture's width and height."""

GALLERY = 12
"""Views that are enough for an order of neighbours. One of each image, then, where it takes more, another of each."""


def certify_embeddings(
    model: LoadedModel, candidate: EmbedSession, images: Sequence[Path], *, precision: Precision
) -> Certificate:
    """Compares an engine with the eager module, view by view, and the neighbours of each among all.

    Every place of the engine's batch is looked at; the eager module is given one view at a time.

    Args:
        model: the eager FP32 module that the engine was made from.
        candidate: the engine as it is served; it is not closed.
        images: real ones; those that cannot be decoded are named in the certificate and left out.
        precision: picks the tolerances.

    Raises:
        CertificateError: no image could be used.
        BackendError: the runtime failed.
    """
    tolerances = EMBED_TOLERANCES[precision]
    reference = eager_embed_session(model)
    looked_at = [_Image(path) for path in images]
    gallery: list[tuple[_Image, npt.NDArray[np.float32], npt.NDArray[np.float32]]] = []
    for chunk in _chunks(_views(looked_at, candidate), candidate.batch):
        expected = [reference.embed([reference.prepare(v.pixels, name=v.name)], patches=True)[0] for v in chunk]
        ready = [v.prepared for v in chunk]
        # One that is not full is filled up with its own, so that no place in it goes without.
        places = [place % len(chunk) for place in range(candidate.batch)]
        ready += [candidate.prepare(chunk[i].pixels, name=chunk[i].name) for i in places[len(chunk) :]]
        got = candidate.embed(ready, patches=True)
        for i, vectors in zip(places, got, strict=True):
            chunk[i].image.measured.append(compare_embeddings(expected[i], vectors))
        gallery += [(v.image, a.cls, b.cls) for v, a, b in zip(chunk, expected, got, strict=False)]
    if gallery:
        of, a, b = zip(*gallery, strict=True)
        neighbours = compare_neighbours(np.stack(a), np.stack(b), slack=tolerances["max_similarity_difference"])
        for image, measures in zip(of, neighbours, strict=True):
            image.measured.append(measures | {"views": 1.0})
    return verdict(
        [image.measures() for image in looked_at if image.measured],
        [image.entry() for image in looked_at],
        tolerances=tolerances,
        reference=f"eager FP32 PyTorch, {len(gallery)} views",
    )


def eager_embed_session(model: LoadedModel) -> HostEmbedSession:
    """The eager module behind the same interface as an engine, for one image a call."""
    (graph,) = model.spec.graphs
    tensors = (
        tuple(dataclasses.replace(tensor, shape=(1, *tensor.shape[1:])) for tensor in tensors)
        for tensors in (graph.inputs, graph.outputs)
    )
    inputs, outputs = tensors
    single = dataclasses.replace(graph, inputs=inputs, outputs=outputs)
    spec: ModelSpec = dataclasses.replace(model.spec, graphs=(single,))
    return HostEmbedSession(spec, [TorchRunner(model.modules[graph.name], single)], limits=DecodeLimits())


def run_embeddings(model: LoadedModel, images: Sequence[Path]) -> None:
    """Runs the eager module on whole images, for those that watch it.

    Raises:
        ImageError: one cannot be decoded.
    """
    session = eager_embed_session(model)
    for path in images:
        session.embed([session.prepare(decode_image(path), name=path.name)], patches=True)


def view(pixels: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.uint8]:
    """(H, W, 3) → one of `VIEWS` of it, of at least a pixel."""
    height, width = pixels.shape[:2]
    left, top, right, bottom = VIEWS[name]
    rows = slice(math.floor(top * height), math.ceil(bottom * height))
    columns = slice(math.floor(left * width), math.ceil(right * width))
    return np.ascontiguousarray(pixels[rows, columns])


@dataclass(slots=True, eq=False)
class _Image:
    path: Path
    error: str = ""
    measured: list[dict[str, float]] = field(default_factory=list)

    def measures(self) -> dict[str, float]:
        """The worst over its views, as `combined` has it."""
        return {name: value for name, value in combined(self.measured).items() if name != "images"}

    def entry(self) -> dict[str, Any]:
        if self.error:
            return {"file": self.path.name, "error": self.error}
        sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
        return {"file": self.path.name, "sha256": sha256, **self.measures()}


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """A part of an image, and the same as the engine takes it."""

    image: _Image
    pixels: npt.NDArray[np.uint8]
    prepared: Prepared

    @property
    def name(self) -> str:
        return self.image.path.name


def _views(images: Sequence[_Image], session: EmbedSession) -> Iterator[_View]:
    """The whole of every image that can be used, then one part of each after the other until there are enough."""
    count = 0
    for name in VIEWS:
        if count >= GALLERY:
            return
        for image in images:
            if image.error:
                continue
            try:
                pixels = view(decode_image(image.path), name)
                prepared = session.prepare(pixels, name=image.path.name)
            except ImageError as error:
                if name == "whole":
                    image.error = error.reason
                continue
            count += 1
            yield _View(image, pixels, prepared)


def _chunks(views: Iterator[_View], size: int) -> Iterator[list[_View]]:
    while chunk := list(islice(views, size)):
        yield chunk
