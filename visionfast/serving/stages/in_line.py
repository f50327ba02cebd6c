"""Puts a stage behind a line of its own (`serving.waiting`): the server hands requests on as they come, and does not
wait for their answers.

The Python backend calls `execute` and takes `None` for a request whose answer will be sent later, by the request's
response sender; the model is then free for the next one. So the line, and not the server's batcher, decides what is
answered next. A stage's `execute` stays what it is: requests in, responses out; one thread calls it. A stage may have
several lines, so that what is quick need not wait for what takes long: each has a thread then. Or its only line has
several workers, each of which answers requests beside the others.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import triton_python_backend_utils as pb_utils

from visionfast import machine
from visionfast.errors import OptionError, VisionfastError
from visionfast.serving.boards import Boards
from visionfast.serving.metadata import manifest_of
from visionfast.serving.scheduling import QueueLimits
from visionfast.serving.stages.metrics import StageMetrics, kind_of
from visionfast.serving.stages.requests import array_of, guarded, refused, response_of
from visionfast.serving.waiting import LEVELS, Line, Place, Turn, late_error

__all__ = ["DEADLINE", "in_line"]

DEADLINE = "deadline_ns"
"""The tensor by which a step of an ensemble tells the next one when an answer is of no use any more: (B, 1) int64, of
`time.monotonic_ns`, which all processes of a machine share."""


class StageModel(Protocol):
    """What the server's Python backend looks for in a model.

    One that has several lines has their number as `lines`, and `line_of(request)`, which is asked when a request comes
    and may leave itself a `note` on it, and a `deadline_ns` in the place of the one that follows from the deployment's
    limits. One that has several workers has their number as `workers` once it is initialised, and
    `beside(worker, requests)`, which is as `execute`, and is called by each worker for itself while no `execute` runs;
    what it gives is sent before the same worker asks again.
    """

    def initialize(self, args: Mapping[str, str]) -> None: ...

    def execute(self, requests: Sequence[Any]) -> list[Any]: ...

    def finalize(self) -> None: ...


class _Waiting:
    """A request in the line, as a stage sees it: the server's own, and who takes its answer."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.sender = request.get_response_sender()
        self.came_ns = time.monotonic_ns()
        self.note: Any = None  # the stage's own
        self.deadline_ns = 0  # on the clock of `came_ns`; 0: as the deployment's limits say

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)

    def send(self, response: Any) -> None:
        self.sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _end_with_server() -> None:
    """Ends this process when the server is gone, however it went.

    NVIDIA's stub (pytriton 0.7.0) looks after that itself, but with an answer or a figure on its way to the server it
    waits for itself, for ever. (PR_SET_PDEATHSIG would be of the server's thread that loads models, which ends.)
    """
    server = os.pidfd_open(os.getppid())

    def wait() -> None:
        poll = select.poll()
        poll.register(server, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=wait, name="server's end", daemon=True).start()


def in_line(stage: type[StageModel]) -> type[StageModel]:
    """The stage, with a line in front of it."""

    class TritonPythonModel:
        def initialize(self, args: Mapping[str, str]) -> None:
            _end_with_server()
            config = json.loads(args["model_config"])
            parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
            told, spec = json.loads(parameters["line"]), manifest_of(parameters).spec
            self._takes_deadline, self._gives_deadline = (
                any(tensor["name"] == DEADLINE for tensor in config[side]) for side in ("input", "output")
            )
            prompts = spec.task == "prompt-segment"
            self._metrics = StageMetrics.of_line(args)
            self._boards = Boards(parameters.get("pipeline", args["model_name"]), args["model_name"], Path.cwd())
            if self._takes_deadline:
                self._boards.open()
            self._stage = stage()
            self._stage.initialize(args)
            workers = getattr(self._stage, "workers", None)
            # More than can be computed at once would have the first one wait for the last.
            together = machine.usable_cpus() * spec.batch if workers is None else spec.batch
            self._lines: list[Line[_Waiting]] = [
                Line(
                    [QueueLimits(**told[level]) for level in LEVELS],
                    images=1 if prompts else min(config["max_batch_size"], together),
                    delay_ns=0 if prompts else told["delay_us"] * 1000,
                    # Some clicks ask for one mask, and some for a hundred: no mean says when the next is answered.
                    even=not prompts,
                    workers=workers or 1,
                )
                for _ in range(getattr(stage, "lines", 1))
            ]
            self._workers = [
                threading.Thread(target=self._work, args=(line, worker), name=f"worker {i}.{worker}")
                for i, line in enumerate(self._lines)
                for worker in range(workers or 1)
            ]
            if prompts:  # one may take minutes, and its worker tells nobody anything meanwhile
                self._workers += [
                    threading.Thread(target=self._watch, args=(line,), name=f"late {i}")
                    for i, line in enumerate(self._lines)
                ]
            for thread in self._workers:
                thread.start()

        def execute(self, requests: Sequence[Any]) -> list[None]:
            for request in requests:
                waiting = _Waiting(request)
                self._metrics.join()
                if isinstance(error := guarded(self._join, waiting), VisionfastError):
                    self._metrics.leave(None)
                    self._metrics.count(kind_of(error))
                    guarded(waiting.send, refused(error))
            self._tell()
            return [None] * len(requests)

        def finalize(self) -> None:
            for line in self._lines:
                line.close()
            for thread in self._workers:
                thread.join()
            self._stage.finalize()
            self._metrics.close()

        def _join(self, waiting: _Waiting) -> None:
            parameters = json.loads(waiting.parameters() or "{}")
            if not isinstance(offline := parameters.get("offline", False), bool):
                raise OptionError(f"offline: expected true or false as a parameter, got {offline!r}")
            line_of: Callable[[Any], int] = getattr(self._stage, "line_of", lambda request: 0)
            line = self._lines[line_of(waiting)]
            deadline_ns = int(array_of(waiting, DEADLINE).max()) if self._takes_deadline else waiting.deadline_ns
            line.join(
                waiting,
                images=len(np.from_dlpack(waiting.inputs()[0])),
                level=int(offline),
                timeout_ns=waiting.timeout() * 1000,
                deadline_ns=deadline_ns,
                behind_ns=self._boards.wait_ns(int(offline), time.monotonic_ns()) if self._gives_deadline else 0,
            )

        def _tell(self) -> None:
            if self._takes_deadline:
                self._boards.write(*self._lines[0].waits_ns())

        def _work(self, line: Line[_Waiting], worker: int) -> None:
            while (turn := line.turn()) is not None:
                # Where an answer cannot be sent (no room in /dev/shm, say), its sender takes nothing in its place, and
                # the client's own time ends it (Triton 2.51). The others are answered: this is their only thread.
                guarded(self._answer, turn, worker)
                line.done(turn)
                self._tell()

        def _watch(self, line: Line[_Waiting]) -> None:
            while (late := line.late()) is not None:
                guarded(self._refuse, late, time.monotonic_ns())
                del late  # or their images would be held until somebody else is late

        def _refuse(self, late: Sequence[Place[_Waiting]], now_ns: int) -> None:
            for place in late:
                self._metrics.leave(now_ns - place.received_ns)
                self._metrics.count("deadline")
                self._send(place, refused(late_error(place, now_ns)))

        def _answer(self, turn: Turn[_Waiting], worker: int) -> None:
            self._refuse(turn.late, turn.begun_ns)
            if not turn.batch:
                return
            for place in turn.batch:
                self._metrics.leave(turn.begun_ns - place.received_ns)
            items = [place.item for place in turn.batch]
            if turn.beside:
                beside: Callable[[int, Sequence[Any]], list[Any]] = self._stage.beside  # type: ignore[attr-defined]
                answers = guarded(beside, worker, items)
            else:
                answers = guarded(self._stage.execute, items)
            if isinstance(answers, VisionfastError):
                for _ in turn.batch:
                    self._metrics.count(kind_of(answers))
                answers = [refused(answers)] * len(turn.batch)
            for place, answer in zip(turn.batch, answers, strict=True):
                self._send(place, answer)

        def _send(self, place: Place[_Waiting], answer: Any) -> None:
            def send() -> None:
                place.item.send(self._with_deadline(answer, place) if self._gives_deadline else answer)

            if isinstance(error := guarded(send), VisionfastError):
                self._metrics.count(kind_of(error))

        def _with_deadline(self, answer: Any, place: Place[_Waiting]) -> Any:
            if answer.has_error():
                return answer
            told = response_of({DEADLINE: np.full((place.images, 1), place.deadline_ns, np.int64)})
            return pb_utils.InferenceResponse([*answer.output_tensors(), *told.output_tensors()])

    return TritonPythonModel
