"""What a stage tells the server's metrics: how long each stage took for each image, and what could not be answered.

The server keeps the figures and shows them in Prometheus's form at its third port; each figure that a stage tells is a
message to it. Measured with pytriton 0.7.0 (Triton 2.51) on 2 cores: 10 µs a message where nothing else runs, 36 µs
beside requests, and milliseconds where another thread holds Python's lock, because each message lets go of the lock and
has to get it back. Two threads that told one figure at the same time ended the process (`lock_exception`). So one
thread of the process tells them all, after the answer, and the requests wait for none.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from queue import Queue
from typing import Any

import triton_python_backend_utils as pb_utils

from visionfast.errors import (
    DeadlineError,
    ImageError,
    ImageFormatError,
    ImageNotFoundError,
    ImageTooLargeError,
    ImageTruncatedError,
    OptionError,
    QueueFullError,
    VisionfastError,
)
from visionfast.serving.wire import STAGES

__all__ = ["BUCKETS", "KINDS", "StageMetrics", "kind_of"]

BUCKETS = (*(float(f"{step}e{power}") for power in range(-4, 1) for step in (1, 1.6, 2.5, 4, 6.3)), 10.0)
"""Upper ends of the histograms' buckets, seconds: five to a decade, from 100 µs to 10 s. What is read out of them is at
most a quarter off a bucket's middle."""

_IMAGE_ERRORS = (ImageError, ImageNotFoundError, ImageFormatError, ImageTruncatedError, ImageTooLargeError)
_REQUEST_ERRORS = {OptionError: "option", QueueFullError: "queue-full", DeadlineError: "deadline"}

KINDS = (*(error.kind for error in _IMAGE_ERRORS), *_REQUEST_ERRORS.values(), "server")
"""What an error may be: of one image as `ImageError.kind`; of a whole request `option`, `queue-full` or `deadline`, or
`server` for all else, a defect."""

_PAUSE_S = 0.1
_MOST = 10_000  # images that wait to be told; then requests wait, too: memory stays what it is


def kind_of(error: VisionfastError) -> str:
    """One of `KINDS`."""
    if isinstance(error, ImageError):
        return error.kind
    return next((kind for known, kind in _REQUEST_ERRORS.items() if isinstance(error, known)), "server")


class StageMetrics:
    """The figures of one model in this process; threads may share it.

    `visionfast_stage_duration_seconds` (a histogram for each `stage`), `visionfast_images_total`,
    `visionfast_errors_total` (for each `kind`), `visionfast_queue_duration_seconds` (a histogram) and
    `visionfast_waiting_requests`, each with the `model` that clients ask for and its `version`; the last two also with
    the `step`. Several processes of one model add to the same figures. Where the server has its metrics off, nothing is
    told.
    """

    def __init__(self, model: str, version: str, *, stages: Sequence[str] = (), step: str | None = None) -> None:
        self._labels = {"model": model, "version": version}
        self._teller = _TELLER
        self._of_stage: dict[str, Any] = {}
        self._of_kind: dict[str, Any] = {}
        self._is_open = False
        try:
            self._open(stages, step)
        except pb_utils.TritonModelException as error:
            print(f"metrics: the server takes none ({' '.join(str(error).split())})", flush=True)
            return
        self._is_open = True
        self._teller.enter()

    @classmethod
    def of(cls, args: Mapping[str, str], *, stages: Sequence[str] = STAGES) -> StageMetrics:
        """Of what computes.

        Args:
            args: what the server gives to `initialize`.
            stages: that will be observed; a histogram that is there before its first image has a rate from then on.
        """
        return cls(_pipeline(args), args["model_version"], stages=stages)

    @classmethod
    def of_line(cls, args: Mapping[str, str]) -> StageMetrics:
        """Of the line in front of it."""
        model = _pipeline(args)
        step = args["model_name"].removeprefix(model).lstrip("_")
        return cls(model, args["model_version"], step=step or "whole")

    def observe(self, stage_ns: Mapping[str, int]) -> None:
        """An image was answered; the nanoseconds that each stage took for it."""
        self._tell(lambda: self._tell_image(stage_ns))

    def count(self, kind: str) -> None:
        """An image, or a whole request, could not be answered; see `KINDS`."""
        self._tell(lambda: self._tell_error(kind))

    def join(self) -> None:
        """A request waits in the line from now on."""
        self._tell(lambda: self._waiting.increment(1))

    def leave(self, waited_ns: int | None) -> None:
        """It does not wait any more: its turn has come, or its time is over; `None`: it was refused at once."""
        self._tell(lambda: self._tell_wait(waited_ns))

    def close(self) -> None:
        """Tells what waits. Nothing is told after it."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            self._teller.leave()
            # A figure that lives until the interpreter ends tells the server of its end then, by a channel that is
            # closed: the process would end by SIGSEGV (pytriton 0.7.0).
            self._of_stage.clear()
            self._of_kind.clear()
            for figure in ("_answered", "_queued", "_waiting", "_images", "_durations", "_queue", "_line", "_errors"):
                self.__dict__.pop(figure, None)

    def _tell(self, message: Callable[[], None]) -> None:
        if self._is_open:
            self._teller.tell(message)

    def _open(self, stages: Sequence[str], step: str | None) -> None:
        family = pb_utils.MetricFamily
        self._errors = family(
            name="visionfast_errors_total",
            description="Images, and whole requests, that could not be answered, by what was wrong",
            kind=family.COUNTER,
        )
        for kind in KINDS:
            self._error(kind)
        if step is not None:
            labels = {**self._labels, "step": step}
            self._queue = family(
                name="visionfast_queue_duration_seconds",
                description="Time that a request waited for its turn at a step",
                kind=family.HISTOGRAM,
            )
            self._queued = self._queue.Metric(labels=labels, buckets=list(BUCKETS))
            self._line = family(
                name="visionfast_waiting_requests",
                description="Requests that wait for their turn at a step now",
                kind=family.GAUGE,
            )
            self._waiting = self._line.Metric(labels=labels)
        if stages:
            self._durations = family(
                name="visionfast_stage_duration_seconds",
                description="Time that a stage took for an image; of a batch, each image's share",
                kind=family.HISTOGRAM,
            )
            self._images = family(
                name="visionfast_images_total",
                description="Images answered, without those that the response cache answered",
                kind=family.COUNTER,
            )
            self._answered = self._images.Metric(labels=dict(self._labels))
            for stage in stages:
                self._duration(stage)

    def _duration(self, stage: str) -> Any:
        if stage not in self._of_stage:
            labels = {**self._labels, "stage": stage}
            self._of_stage[stage] = self._durations.Metric(labels=labels, buckets=list(BUCKETS))
        return self._of_stage[stage]

    def _error(self, kind: str) -> Any:
        if kind not in self._of_kind:
            self._of_kind[kind] = self._errors.Metric(labels={**self._labels, "kind": kind})
        return self._of_kind[kind]

    # What follows runs in the teller's thread.

    def _tell_image(self, stage_ns: Mapping[str, int]) -> None:
        for stage, ns in stage_ns.items():
            self._duration(stage).observe(ns / 1e9)
        self._answered.increment(1)

    def _tell_error(self, kind: str) -> None:
        self._error(kind).increment(1)

    def _tell_wait(self, waited_ns: int | None) -> None:
        self._waiting.increment(-1)
        if waited_ns is not None:
            self._queued.observe(waited_ns / 1e9)


def _pipeline(args: Mapping[str, str]) -> str:
    """The name that clients ask for; a step's model is named for it and the step."""
    parameters = json.loads(args["model_config"])["parameters"]
    name: str = parameters.get("pipeline", {}).get("string_value", args["model_name"])
    return name


class _Teller:
    """The one thread of this process that talks to the server's metrics, as long as anybody has figures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._messages: Queue[Callable[[], None] | None] = Queue(_MOST)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._thread is None:
                self._ending.clear()
                self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
                self._thread.start()

    def tell(self, message: Callable[[], None]) -> None:
        self._messages.put(message)

    def leave(self) -> None:
        """Returns when all that was told is at the server, if nobody else has figures."""
        with self._lock:
            self._users -= 1
            if not self._users and self._thread is not None:
                self._ending.set()
                self._messages.put(None)
                self._thread.join()
                self._thread = None

    def _run(self) -> None:
        ended = complained = False
        while not ended:
            messages = [self._messages.get()]
            # Not while the answer is being made; and those that come meanwhile are told in one go.
            self._ending.wait(_PAUSE_S)
            while not self._messages.empty():
                messages.append(self._messages.get())
            for message in messages:
                if message is None:
                    ended = True
                    continue
                try:
                    message()
                except Exception:
                    if not complained:  # figures are never worth a request
                        traceback.print_exc()
                    complained = True


_TELLER = _Teller()
