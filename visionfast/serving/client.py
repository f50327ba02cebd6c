"""Asks a served model: the same call and the same answers as the pipeline has in process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, overload

from visionfast.embedding import image_key
from visionfast.errors import ImageError, ImageNotKeptError, ServerError
from visionfast.results import Detections, Embeddings, Masks
from visionfast.serving.client_asking import Asking
from visionfast.serving.client_questions import about_everything, about_objects, about_prompts, about_vectors
from visionfast.serving.client_request import (
    Answer,
    Options,
    Priority,
    PromptOptions,
    encoded_image,
    just_large_enough,
    shown_name,
)
from visionfast.serving.tracing import Traced
from visionfast.sessions import ImageSource
from visionfast.sessions.embeddings import Embedded, gathered

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.10 has none at run time

__all__ = ["Client"]


class Client(Asking):
    """One model on one server. A context manager; threads may share it, processes may not: open one after a fork.

    Every image is a request of its own, so that the server can put together the images of all its clients; the images
    of one call are sent several at a time.

        with Client("localhost:8001", "yolov8s") as client:
            detections = client(["bus.jpg"])[0]

    A model of another task is asked with `embed`, or with `segment` and `everything`, as in process.

    Args:
        url: `localhost:8001` or `grpc://localhost:8001`, or `http://localhost:8000`.
        model: its name on the server.
        protocol: `grpc` or `http`, for a URL without a scheme; default: gRPC.
        timeout: seconds that one image's request may take at most, and each question about the model.
        concurrency: images that are under way at the same time at most, of all calls together.
        shared_memory: images reach the server through it, not through the connection; for one on this machine that was
            started with `--shared-memory`.

    Raises:
        OptionError: the URL is none, or a setting is out of its range.
        BackendUnavailableError: NVIDIA's client package is not installed.
        ServerError: no server answers there, it does not know the model, or the model is none of visionfast's.
        DeadlineError: it does not answer in time.
    """

    @overload
    def __call__(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        on_error: Literal["raise"] = ...,
        **options: Unpack[Options],
    ) -> list[Detections]: ...

    @overload
    def __call__(
        self, images: ImageSource | Sequence[ImageSource], *, on_error: Literal["return"], **options: Unpack[Options]
    ) -> list[Answer]: ...

    def __call__(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[Options],
    ) -> Any:
        """Answers every image, in order.

        Args:
            images: paths, encoded bytes, (H, W, 3) u8 RGB arrays (also (H, W), (H, W, 1), RGBA), or frames of video
                (`Nv12Frame`). Files and bytes are sent as they are, pixels as a PPM, which loses nothing and is as
                large as they are. One of them by itself counts as a list of one.
            on_error: `raise` the first image's error, or `return` it in that image's place: one bad image never
                harms the others. That a request was refused (`QueueFullError`) or answered too late (`DeadlineError`)
                is its image's error, too; that the server is not there is the whole call's.
            options: `conf`, `iou`, `max_det`, `classes`, `class_agnostic`: as for `Detector`; by default what the
                model was deployed with.
                `priority`: `"online"`, the default, or `"offline"`, which is answered after it.
                `deadline_ms`: milliseconds, from when an image is sent, after which its answer is of no use; the
                server does not begin with it any more then. By default the client's `timeout`.

        Raises:
            ImageError: with `on_error="raise"`.
            OptionError: an option is out of its range or does not exist, or the client is closed.
            QueueFullError, DeadlineError: with `on_error="raise"`.
            ServerError: the server is not there, or does not answer as a visionfast model does.
        """
        return list(self.stream(images, on_error=on_error, **options))

    def stream(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[Options],
    ) -> Iterator[Answer]:
        """As a call, but each answer as soon as it and those before it are there.

        Images are read as they are sent, and no more are under way than the client's `concurrency` allows for.
        """
        return self._answers(images, about_objects(self.spec, options, on_error=on_error, timeout=self._timeout))

    def traced(self, image: ImageSource, **options: Unpack[Options]) -> Traced[Detections]:
        """One image's answer, and where its time went: `visionfast client --trace` shows it.

        It asks the server three questions more, so it is for looking, not for work. The server's sums tell one
        request's queue from another's only while nobody else asks the model; `Trace.note` says if somebody did.

        Args:
            image: as one of a call.
            options: as for a call.

        Raises:
            ImageError, OptionError, QueueFullError, DeadlineError, ServerError: as for a call.
        """
        return self._traced(image, about_objects(self.spec, options, on_error="raise", timeout=self._timeout))

    # ---- embedders ------------------------------------------------------------------------------------------------

    def embed(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        patches: bool = True,
        normalise: bool | None = None,
        on_error: Literal["raise", "return"] = "raise",
        priority: Priority = "online",
        deadline_ms: float | None = None,
    ) -> Embeddings:
        """The vectors of some images, in order: as `Embedder` gives them.

        Args:
            images: as for a call.
            patches: give the patches' vectors too; those that nobody asks for are not sent.
            normalise: scale every vector to a length of 1; default: what the model was deployed with.
            on_error: as for a call; `return` it in `Embeddings.errors`.
            priority, deadline_ms: as for a call.

        Raises:
            OptionError: the model is no embedder; and all else as for a call.
        """
        answers = self.embed_stream(
            images,
            patches=patches,
            normalise=normalise,
            on_error=on_error,
            priority=priority,
            deadline_ms=deadline_ms,
        )
        return gathered(list(answers), self.spec, patches=patches)

    def embed_stream(
        self,
        images: ImageSource | Sequence[ImageSource],
        *,
        patches: bool = False,
        normalise: bool | None = None,
        on_error: Literal["raise", "return"] = "raise",
        priority: Priority = "online",
        deadline_ms: float | None = None,
    ) -> Iterator[Embedded | ImageError | ServerError]:
        """As `embed`, but each image's vectors as soon as they and those before them are there."""
        options = {"normalise": normalise, "priority": priority, "deadline_ms": deadline_ms}
        question = about_vectors(self.spec, options, patches=patches, on_error=on_error, timeout=self._timeout)
        return self._answers(images, question)

    def traced_embed(
        self,
        image: ImageSource,
        *,
        patches: bool = True,
        normalise: bool | None = None,
        priority: Priority = "online",
        deadline_ms: float | None = None,
    ) -> Traced[Embedded]:
        """One image's vectors, and where its time went; as `traced` and `embed`."""
        options = {"normalise": normalise, "priority": priority, "deadline_ms": deadline_ms}
        question = about_vectors(self.spec, options, patches=patches, on_error="raise", timeout=self._timeout)
        return self._traced(image, question)

    # ---- prompt segmenters ----------------------------------------------------------------------------------------

    def segment(self, image: ImageSource, **prompts: Unpack[PromptOptions]) -> Masks:
        """The masks for clicks and boxes on one image: as `PromptSegmenter.segment` gives them.

        The server keeps encoded images, so what follows the first call on an image is quick, and the image itself is
        sent again only where the server does not have it any more.

        Args:
            image: as one of a call.
            prompts: `points`, `boxes`, `mask_input` and `logits` as for `PromptSegmenter.segment`; `multimask`, by
                default what the model was deployed with; `priority` and `deadline_ms` as for a call.

        Raises:
            OptionError: the model is no prompt segmenter, a prompt does not fit the image, or an option does not exist.
            ImageError, QueueFullError, DeadlineError, ServerError: as for a call.
        """
        question = about_prompts(self.spec, prompts, timeout=self._timeout)
        encoded = encoded_image(image, limits=self._limits)
        started = perf_counter_ns()
        key = image_key(encoded, limits=just_large_enough(encoded)).key
        hash_ns = perf_counter_ns() - started
        if key in self._sent:
            ends = monotonic() + question.terms.patience_s
            with contextlib.suppress(ImageNotKeptError):
                masks = self._one(question.by_key(key), image, question)
                return replace(masks, stage_ns={"hash": hash_ns} | dict(masks.stage_ns))
            question = question.until(ends)
        masks = self._one(question.carrying(encoded, shown_name(image, None)), image, question)
        self._sent.add(key)
        return masks

    def everything(
        self,
        image: ImageSource,
        *,
        priority: Priority = "online",
        deadline_ms: float | None = None,
        **options: Any,
    ) -> Masks:
        """The masks of everything in an image: as `PromptSegmenter.everything` gives them.

        It may take minutes on a CPU, for a thousand points by default: open the client with a `timeout` that allows for
        it. When the time is over, the server stops.

        Args:
            image: as one of a call.
            priority, deadline_ms: as for a call.
            options: as for `PromptSegmenter.everything`.

        Raises:
            OptionError: the model is no prompt segmenter, or an option does not exist or is out of its range.
            ImageError, QueueFullError, DeadlineError, ServerError: as for a call.
        """
        terms = {"priority": priority, "deadline_ms": deadline_ms}
        question = about_everything(self.spec, terms, everything=options, timeout=self._timeout)
        return self._one(question.request(image, None, self._limits), image, question)

    def traced_segment(self, image: ImageSource, **prompts: Unpack[PromptOptions]) -> Traced[Masks]:
        """The masks for some prompts, and where their time went; as `traced` and `segment`.

        The image is sent every time; where the server has it encoded already, the trace has no `encoder`.
        """
        question = about_prompts(self.spec, prompts, timeout=self._timeout)
        return self._traced(image, question)

    def traced_everything(
        self,
        image: ImageSource,
        *,
        priority: Priority = "online",
        deadline_ms: float | None = None,
        **options: Any,
    ) -> Traced[Masks]:
        """The masks of everything in an image, and where their time went; as `traced` and `everything`."""
        terms = {"priority": priority, "deadline_ms": deadline_ms}
        question = about_everything(self.spec, terms, everything=options, timeout=self._timeout)
        return self._traced(image, question)
