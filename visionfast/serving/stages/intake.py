"""The first step of an ensemble on a GPU: clients' bytes → what DALI may be given, and what is wrong with the rest."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, VisionfastError
from visionfast.preprocess.dali_feed import PLACEHOLDER, DaliFeed, feed_of, packed, ticket_of
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import Deployed, guarded, images_of, refused, response_of
from visionfast.serving.stages.steps import SAMPLE
from visionfast.serving.wire import pack_problems

__all__ = ["TritonPythonModel"]

_SERIALS = 2**31


class TritonPythonModel:
    """What the server's Python backend looks for."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._deployed = Deployed.of(args)
        self._spec = self._deployed.manifest.spec.preprocess
        self._pool = ThreadPoolExecutor(self._deployed.threads)
        # Several processes of this step count at once: each begins somewhere else.
        self._serials = itertools.count(secrets.randbelow(_SERIALS))
        self._metrics = StageMetrics.of(args, stages=())
        self._admit(SAMPLE)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        read = [guarded(self._read, request) for request in requests]
        # Decoders leave Python's lock to others: as many images at once as there are processors.
        images = [image for some in read if not isinstance(some, VisionfastError) for image in some]
        fed = self._pool.map(lambda image: guarded(self._admit, image), images)
        return [
            self._refuse(some) if isinstance(some, VisionfastError) else self._respond([next(fed) for _ in some])
            for some in read
        ]

    def finalize(self) -> None:
        self._pool.shutdown()
        self._metrics.close()

    def _read(self, request: Any) -> list[bytes | ImageError]:
        self._deployed.options_of(request)  # a wrong one is refused before anything is computed for it
        return images_of(request)

    def _admit(self, image: bytes | ImageError) -> tuple[DaliFeed, int]:
        """And nanoseconds. Raises `ImageError`."""
        if isinstance(image, ImageError):
            raise image
        started = perf_counter_ns()
        feed = feed_of(image, self._spec, limits=self._deployed.limits, name="bytes")
        return feed, perf_counter_ns() - started

    def _respond(self, fed: Sequence[tuple[DaliFeed, int] | VisionfastError]) -> Any:
        problems: list[ImageError | None] = [None] * len(fed)
        feeds = [PLACEHOLDER] * len(fed)
        intake_ns = np.full((len(fed), 1), -1, np.int64)
        for i, one in enumerate(fed):
            if isinstance(one, ImageError):
                problems[i] = one
                self._metrics.count(one.kind)
            elif isinstance(one, VisionfastError):
                return self._refuse(one)
            else:
                feeds[i], intake_ns[i] = one
        tickets = np.stack([ticket_of(feed, next(self._serials) % _SERIALS) for feed in feeds])
        arrays: dict[str, npt.NDArray[Any]] = {
            "encoded": packed(feeds, tickets),
            "ticket": tickets,
            "image_hw": np.array([feed.image_hw for feed in feeds], np.int32),
            "problem": pack_problems(problems),
            "intake_ns": intake_ns,
        }
        return response_of(arrays)

    def _refuse(self, error: VisionfastError) -> Any:
        self._metrics.count(kind_of(error))
        return refused(error)
