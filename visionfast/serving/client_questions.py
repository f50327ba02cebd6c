"""What a call asks of each image, by the model's task: what goes out with the image, and how the answer is read."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from visionfast.errors import ImageError, OptionError, ServerError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Detections, Masks
from visionfast.serving.client_request import PromptOptions, Request, Terms, encoded_image, shown_name
from visionfast.serving.wire import inputs_of, outputs_of, pack_image, pack_options, unpack_answers
from visionfast.serving.wire.masks import unpack_masks
from visionfast.serving.wire.prompts import NO_MASK, pack_prompts
from visionfast.serving.wire.vectors import unpack_vectors
from visionfast.sessions import ImageSource
from visionfast.sessions.embeddings import Embedded
from visionfast.types import ModelSpec, Task

__all__ = ["Question", "SentImages", "about_everything", "about_objects", "about_prompts", "about_vectors"]

_Answer = TypeVar("_Answer", covariant=True)
_Arrays = Mapping[str, npt.NDArray[Any]]

_CALLS: Mapping[Task, str] = {
    "detect": "client(images)",
    "segment": "client(images)",
    "embed": "client.embed(images)",
    "prompt-segment": "client.segment(image, points=[(x, y, 1)])",
}


@dataclass(frozen=True, slots=True)
class Question(Generic[_Answer]):
    """What is asked of each image of a call.

    Attributes:
        spec: of the model.
        terms: of the call.
        read: the server's arrays → the answers for the images of one request.
        wanted: optional tensors of the answer that are needed; `None`: all of the answer.
        more: inputs beside the image.
    """

    spec: ModelSpec
    terms: Terms
    read: Callable[[_Arrays], Sequence[_Answer | ImageError]]
    wanted: tuple[str, ...] | None = ()
    more: _Arrays = field(default_factory=dict)

    def request(self, source: ImageSource, index: int | None, limits: DecodeLimits) -> Request:
        """The request for the image `index` of a call, `None` if it has only one.

        Args:
            source: the image.
            index: of it.
            limits: the model's; what the server would refuse is not sent.

        Raises:
            ImageError: as `encoded_image`; it is named as in process.
        """
        return self.carrying(encoded_image(source, index, limits=limits), shown_name(source, index))

    def carrying(self, encoded: bytes, name: str) -> Request:
        """The request for an image that is encoded already; `name` is for its errors."""
        try:
            return self._carrying(pack_image(encoded, self.terms.options))
        except ImageError as error:
            raise type(error)(name, error.reason) from None

    def by_key(self, key: str) -> Request:
        """The request for an image that the server may have: its key stands for it."""
        options = pack_options(**self.terms.given, image_key=key)
        arrays = pack_image(b"", options)
        return self._carrying({**arrays, "image": np.zeros((1, 1), np.uint8)})

    def _carrying(self, arrays: _Arrays) -> Request:
        task = self.spec.task
        outputs = [tensor.name for tensor in outputs_of(task) if not tensor.optional]
        return Request(
            {**arrays, **self.more},
            self.terms,
            inputs_of(task),
            None if self.wanted is None else (*outputs, *self.wanted),
        )

    def until(self, ends: float) -> Question[_Answer]:
        """The same, with no more patience than is left.

        Args:
            ends: the end of it, of `time.monotonic`.
        """
        left_s = min(self.terms.patience_s, max(1e-3, ends - time.monotonic()))
        return replace(self, terms=replace(self.terms, patience_s=left_s))

    def answer(self, arrays: _Arrays, source: ImageSource, index: int | None) -> _Answer | ImageError:
        """The answer out of the server's arrays; what is wrong with the image bears its name here, not the server's.

        Raises:
            ServerError: the arrays are not a visionfast model's.
        """
        answers = self.read(arrays)
        if len(answers) != 1:
            raise ServerError(f"expected the answer for one image, got {len(answers)}; is it a model of visionfast's?")
        (answer,) = answers
        return type(answer)(shown_name(source, index), answer.reason) if isinstance(answer, ImageError) else answer

    def only(self, arrays: _Arrays, source: ImageSource) -> _Answer:
        """The answer for the only image of a call. Raises that image's error, too."""
        answer = self.answer(arrays, source, None)
        if isinstance(answer, ImageError):
            raise answer
        return answer


def about_objects(
    spec: ModelSpec, options: Mapping[str, Any], *, on_error: str, timeout: float
) -> Question[Detections]:
    """A detector's question.

    Raises:
        OptionError: the model is none, or no server could take the options.
    """
    _check_task(spec, "client(images)", "detect", "segment")

    def read(arrays: _Arrays) -> list[Detections | ImageError]:
        answers = unpack_answers(arrays, spec.task)
        for answer in answers:
            if isinstance(answer, Detections):
                _check_classes(answer.class_id, len(spec.class_names))
        return answers

    return Question(spec, Terms.of(on_error, options, timeout), read, wanted=None)


def about_vectors(
    spec: ModelSpec, options: Mapping[str, Any], *, patches: bool, on_error: str, timeout: float
) -> Question[Embedded]:
    """An embedder's question; `options` may be `normalise`, `priority` and `deadline_ms`. Raises as `about_objects`."""
    _check_task(spec, "client.embed", "embed")
    known = ("normalise", "patches", "priority", "deadline_ms")
    terms = Terms.of(on_error, {**options, "patches": patches}, timeout, known)
    wanted = ("patches",) if patches else ()
    return Question(spec, terms, lambda arrays: unpack_vectors(arrays, spec, patches=patches), wanted)


def about_prompts(spec: ModelSpec, prompts: PromptOptions, *, timeout: float) -> Question[Masks]:
    """A prompt segmenter's question. Raises as `about_objects`."""
    _check_task(spec, "client.segment", "prompt-segment")
    if unknown := sorted(set(prompts) - set(PromptOptions.__annotations__)):
        raise OptionError(f"option {unknown[0]!r}: expected one of {', '.join(PromptOptions.__annotations__)}")
    logits = prompts.get("logits", False)
    packed, mask = pack_prompts(
        prompts.get("points"),
        prompts.get("boxes"),
        prompts.get("mask_input"),
        multimask=prompts.get("multimask"),
        logits=logits,
    )
    options = {**packed, "priority": prompts.get("priority"), "deadline_ms": prompts.get("deadline_ms")}
    terms = Terms.of("raise", options, timeout, tuple(options))
    return Question(spec, terms, unpack_masks, ("logits",) if logits else (), {"mask_input": mask})


def about_everything(
    spec: ModelSpec, options: Mapping[str, Any], *, everything: Mapping[str, Any], timeout: float
) -> Question[Masks]:
    """Everything mode's question; `options` may be `priority` and `deadline_ms`. Raises as `about_objects`."""
    _check_task(spec, "client.everything", "prompt-segment")
    terms = Terms.of("raise", {**options, "everything": everything}, timeout, ("everything", "priority", "deadline_ms"))
    return Question(spec, terms, unpack_masks, ("stability", "points"), {"mask_input": NO_MASK})


def _check_task(spec: ModelSpec, asked: str, *tasks: Task) -> None:
    if spec.task not in tasks:
        raise OptionError(f"{asked}: {spec.name} is a model for {spec.task}; {_CALLS[spec.task]} asks it")


def _check_classes(class_id: npt.NDArray[np.int64], classes: int) -> None:
    unknown = class_id[(class_id < 0) | (class_id >= classes)]
    if len(unknown):
        raise ServerError(
            f"class_id: expected 0 to {classes - 1}, got {unknown[0]}; if another model was deployed under this name, "
            "open the client again"
        )


class SentImages:
    """Which images a server was sent and may still have, by their `visionfast.embedding.image_key`; for any number of
    threads."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, None] = OrderedDict()  # the least recently used comes first

    def __contains__(self, key: str) -> bool:
        with self._lock:
            if key not in self._keys:
                return False
            self._keys.move_to_end(key)
            return True

    def add(self, key: str) -> None:
        with self._lock:
            self._keys[key] = None
            self._keys.move_to_end(key)
            if len(self._keys) > self._most:
                self._keys.popitem(last=False)
