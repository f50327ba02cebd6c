"""A prompt segmenter's whole pipeline in one process: an image and clicks on it in, masks out.

An image is encoded once, and kept for the clicks that follow. Requests wait in three lines, each with a thread, so that
what takes a few milliseconds does not wait for what takes a second, or minutes: clicks on images that are kept; images
that have to be encoded; and everything mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.embedding import image_key
from visionfast.embedding_cache import EmbeddingCache
from visionfast.errors import DeadlineError, ImageError, ImageNotKeptError, VisionfastError
from visionfast.prompt_segmenter import PromptSegmenter
from visionfast.results import Masks
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import Deployed, array_of, guarded, images_of, refused, response_of
from visionfast.serving.stages.steps import SAMPLE
from visionfast.serving.wire import stages_of
from visionfast.serving.wire.masks import pack_masks
from visionfast.serving.wire.prompts import unpack_mask_input, unpack_prompts

__all__ = ["TritonPythonModel"]

_CLICKS, _IMAGES, _EVERYTHING = range(3)

_MOST_NS = 600 * 10**9
"""For everything in an image, where its client gives no time."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, as it was read when it came.

    Attributes:
        images: what was sent.
        keys: of the images; `None` for one that cannot be used, and in everything mode.
        hash_ns: that the keys took, for each image.
        options: what holds for the request.
        mask_input: (B, n) f32.
    """

    images: list[bytes | ImageError]
    keys: list[str | None]
    hash_ns: int
    options: Mapping[str, Any]
    mask_input: npt.NDArray[np.float32]


class TritonPythonModel:
    """What `in_line` puts lines in front of."""

    lines = 3

    def initialize(self, args: Mapping[str, str]) -> None:
        deployed = Deployed.of(args)
        options = dict(deployed.options)
        cache = EmbeddingCache(options.pop("image_cache_mb") << 20)
        self._deployed = replace(deployed, options=options)
        self._segmenter = PromptSegmenter.from_folder(
            deployed.folder, deployed.manifest, threads=deployed.threads, limits=deployed.limits, cache=cache
        )
        self._segmenter.segment(SAMPLE, points=[(0, 0, 1)])
        self._segmenter.segment(SAMPLE, boxes=(0, 0, 1, 1))  # another number of points
        cache.clear()
        self._metrics = StageMetrics.of(args, stages=stages_of("prompt-segment"))

    def line_of(self, request: Any) -> int:
        """Reads a request. Raises what is wrong with it."""
        asked = request.note = self._read(request)
        if "everything" in asked.options:
            # The deployment's limits are for what takes milliseconds; this one waits as long as its client does.
            request.deadline_ns = request.came_ns + (request.timeout() * 1000 or _MOST_NS)  # 0: nobody has said
            return _EVERYTHING
        return _CLICKS if all(key is None or self._segmenter.keeps(key) for key in asked.keys) else _IMAGES

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        self._metrics.close()
        self._segmenter.close()

    def _read(self, request: Any) -> _Asked:
        options = self._deployed.options_of(request)
        images = images_of(request)
        masks = array_of(request, "mask_input").copy()
        started = time.perf_counter_ns()
        if "image_key" in options:
            keys: list[str | None] = [options["image_key"]] * len(images)
        elif "everything" in options:
            keys = [None] * len(images)
        else:
            keys = [None if isinstance(image, ImageError) else self._key(image) for image in images]
        return _Asked(images, keys, (time.perf_counter_ns() - started) // len(images), options, masks)

    def _key(self, image: bytes) -> str | None:
        try:
            return image_key(image, limits=self._deployed.limits).key
        except ImageError:  # too many bytes; said when its turn comes
            return None

    def _respond(self, request: Any) -> Any:
        arrays = guarded(self._arrays, request)
        if not isinstance(arrays, VisionfastError):
            return response_of(arrays)
        if not isinstance(arrays, ImageNotKeptError):  # which is no fault: the image comes next
            self._metrics.count(kind_of(arrays))
        return refused(arrays)

    def _arrays(self, request: Any) -> dict[str, npt.NDArray[Any]]:
        asked: _Asked = request.note
        answers: list[Masks | ImageError] = []
        for slot in range(len(asked.images)):
            try:
                found = self._masks(asked, slot, request)
            except ImageError as error:
                self._metrics.count(kind_of(error))
                answers.append(error.with_traceback(None))  # see `guarded`
            else:
                self._metrics.observe(found.stage_ns)
                answers.append(found)
        return pack_masks(answers)

    def _masks(self, asked: _Asked, slot: int, request: Any) -> Masks:
        image, key, options = asked.images[slot], asked.keys[slot], asked.options
        if isinstance(image, ImageError):
            raise image
        if "everything" in options:
            return self._segmenter.everything(image, progress=_patience(request), **options["everything"])
        prompts = {**unpack_prompts(options), "mask_input": unpack_mask_input(options, asked.mask_input[slot])}
        if key is not None and (kept := self._segmenter.kept(key)) is not None:
            found = self._segmenter.segment(kept, **prompts)
            before = {} if "image_key" in options else {"hash": asked.hash_ns}
            return replace(found, stage_ns=before | dict(found.stage_ns))
        if "image_key" in options:
            raise ImageNotKeptError("image_key: this image is not kept here, or not any more; send the image itself")
        return self._segmenter.segment(image, **prompts)


def _patience(request: Any) -> Callable[[int, int], None]:
    """A look, between the points, at whether somebody still waits. Raises `DeadlineError` if not."""
    given_ms = (request.deadline_ns - request.came_ns) / 1e6

    def look(done: int, total: int) -> None:
        if request.sender.is_cancelled():
            raise DeadlineError("the client has cancelled its request")
        if time.monotonic_ns() > request.deadline_ns:
            raise DeadlineError(f"the request's {given_ms:.0f} ms were over at {done} of {total} points")

    return look
