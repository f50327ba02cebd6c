"""Deadlines, priorities and full queues on the real server, in both layouts, with an engine that is made slow."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import visionfast as vf
from visionfast.errors import DeadlineError, OptionError, QueueFullError, VisionfastError
from visionfast.serving.scheduling import QueueLimits, Scheduling
from visionfast.serving.server import Server
from visionfast.serving.wire import fault_of, inputs_of, pack_image

library = pytest.importorskip("tritonclient.grpc", reason="the server is asked with tritonclient: visionfast[triton]")

LAYOUTS = ("fused", "ensemble")
SLOW_S = 0.25
SLOW = """\
import json, time
from pathlib import Path
from visionfast.serving.stages.in_line import in_line
from visionfast.serving.stages.{role} import TritonPythonModel as Stage

BEGUN = Path({begun!r})

class Slow(Stage):
    \"\"\"Notes when it begins with which requests; takes {slow_s} s more for every image. Of its answer to the request
    `unsendable` the server takes nothing.\"\"\"

    def execute(self, requests):
        for request in requests:
            with BEGUN.open("a") as file:
                file.write(json.dumps([request.request_id(), time.monotonic_ns()]) + "\\n")
            time.sleep({slow_s})
        answers = super().execute(requests)
        return [object() if r.request_id() == "unsendable" else a for r, a in zip(requests, answers, strict=True)]

TritonPythonModel = in_line(Slow)
"""


@dataclass
class Slow:
    """A served pipeline whose engine takes `SLOW_S` for an image."""

    name: str
    grpc_url: str
    http_url: str
    begun: Path

    def begun_ns(self) -> list[int]:
        """When the engine began with each image since it was last asked."""
        lines = self.begun.read_text().splitlines() if self.begun.exists() else []
        self.begun.unlink(missing_ok=True)
        return [int(line.rstrip("]").rpartition(",")[2]) for line in lines]


@dataclass
class Crowd:
    """Clients that each ask once, and what came of it."""

    url: str
    name: str
    image: bytes
    answers: dict[str, Any] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def ask(self, who: str, client: vf.Client, **options: Any) -> None:
        def run() -> None:
            began = time.monotonic()
            try:
                self.answers[who] = client(self.image, **options)[0]
            except VisionfastError as error:
                self.answers[who] = error
            self.spent_s[who] = time.monotonic() - began
            self.ended.append(who)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads)


def inputs_with(image: bytes) -> list[Any]:
    """A request of NVIDIA's own client."""
    arrays, inputs = pack_image(image), []
    for tensor in inputs_of("detect"):
        inputs.append(library.InferInput(tensor.name, arrays[tensor.name].shape, tensor.datatype))
        inputs[-1].set_data_from_numpy(arrays[tensor.name])
    return inputs


@pytest.fixture(scope="module")
def slow(
    built_engine: Callable[..., Path],
    seeded_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Slow]]:
    from visionfast.serving.repository import deploy

    home = tmp_path_factory.mktemp("slow")
    limits = QueueLimits(requests=6, timeout_ms=20_000)
    scheduling = Scheduling(max_batch=1, online=limits, offline=limits)
    pipelines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISIONFAST_HOME", str(home))
        for layout in LAYOUTS:
            engine = built_engine(seeded_checkpoint("detect"))
            folder = deploy(engine, name=layout, layout=layout, scheduling=scheduling, uncertified=True)  # type: ignore[arg-type]
            role = "fused" if layout == "fused" else "engine"
            model = folder / (layout if layout == "fused" else f"{layout}_engine") / "1" / "model.py"
            model.write_text(SLOW.format(role=role, begun=str(home / layout), slow_s=SLOW_S))
            pipelines.append(folder)
    # What could not be sent is in flight for ever.
    with Server(pipelines, http=0, grpc=0, metrics=0, exit_timeout_s=1) as server:
        found = {name: Slow(name, server.grpc_url, server.http_url, home / name) for name in LAYOUTS}
        for one in found.values():
            one.begun_ns()
        yield found.__getitem__


@pytest.fixture(scope="module")
def image(reduced_photographs: Callable[[int], list[Path]]) -> bytes:
    return reduced_photographs(8)[0].read_bytes()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deadline_is_the_requests_and_nothing_is_begun_after_it(
    layout: str, scheme: str, slow: Callable[[str], Slow], image: bytes
) -> None:
    one = slow(layout)
    one.begun_ns()
    url = one.grpc_url if scheme == "grpc" else one.http_url
    deadline_s = 3.5 * SLOW_S
    crowd = Crowd(url, one.name, image)
    with vf.Client(url, one.name, concurrency=16) as client:
        client(image)  # the line has seen how long one takes
        one.begun_ns()
        began_ns = time.monotonic_ns()
        for i in range(6):
            crowd.ask(str(i), client, deadline_ms=deadline_s * 1e3)
        crowd.join()
        begun_ns = one.begun_ns()
    refused = [answer for answer in crowd.answers.values() if isinstance(answer, VisionfastError)]
    assert refused, "1.5 s of work do not fit into 0.9 s"
    assert all(isinstance(answer, (DeadlineError, QueueFullError)) for answer in refused)
    assert len(begun_ns) >= len(crowd.answers) - len(refused)  # whom the server was too slow for was begun, too
    # Nobody's time was over when the engine began; they are sent within half a second, however busy the machine is.
    assert all(at_ns - began_ns < (deadline_s + 0.5) * 1e9 for at_ns in begun_ns)
    assert max(crowd.spent_s.values()) < deadline_s + 5.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_time_spent_in_one_step_is_missing_in_the_next(layout: str, slow: Callable[[str], Slow], image: bytes) -> None:
    """Without a client's patience: what the server itself does with a request's time. By Triton's own limits the third
    would wait for 0.4 s at the engine, however long it had waited before."""
    one = slow(layout)
    one.begun_ns()
    inputs = inputs_with(image)
    errors: list[VisionfastError | None] = []
    with library.InferenceServerClient(one.grpc_url.removeprefix("grpc://")) as client:

        def ask() -> None:
            try:
                client.infer(one.name, inputs, timeout=round(1.6 * SLOW_S * 1e6))
                errors.append(None)
            except library.InferenceServerException as error:
                errors.append(fault_of(str(error)))

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    begun_ns = one.begun_ns()
    assert len(errors) == 5
    assert None in errors
    refused = [error for error in errors if error is not None]
    assert refused
    assert all(isinstance(error, (DeadlineError, QueueFullError)) for error in refused)
    assert len(begun_ns) == 5 - len(refused)  # nothing was computed for them


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_online_is_answered_before_the_offline_that_wait(
    layout: str, scheme: str, slow: Callable[[str], Slow], image: bytes
) -> None:
    one = slow(layout)
    url = one.grpc_url if scheme == "grpc" else one.http_url
    crowd = Crowd(url, one.name, image)
    with vf.Client(url, one.name, concurrency=16) as client:
        for i in range(6):
            crowd.ask(f"offline {i}", client, priority="offline")
        time.sleep(SLOW_S / 2)  # they are there, and one of them is being answered
        crowd.ask("online", client)
        crowd.join()
    assert not [answer for answer in crowd.answers.values() if isinstance(answer, VisionfastError)]
    assert crowd.ended.index("online") <= 2  # one was begun, and another one may have been


@pytest.mark.parametrize("scheme", ["grpc", "http"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_queue_refuses_at_once_also_inside_an_ensemble(
    layout: str, scheme: str, slow: Callable[[str], Slow], image: bytes
) -> None:
    one = slow(layout)
    url = one.grpc_url if scheme == "grpc" else one.http_url
    crowd = Crowd(url, one.name, image)
    with vf.Client(url, one.name, concurrency=32) as client:
        for i in range(20):
            crowd.ask(str(i), client, deadline_ms=19_000)
        crowd.join()
    kinds = [type(crowd.answers[who]) for who in crowd.ended]
    assert kinds.count(QueueFullError) + kinds.count(vf.Detections) == 20
    assert kinds.count(QueueFullError) >= 10  # 6 wait, and one or a few got through before
    assert QueueFullError in kinds[:10]  # before those that were let in are answered
    (told,) = {str(answer) for answer in crowd.answers.values() if isinstance(answer, QueueFullError)}
    assert told.endswith(
        f"{one.name}: too many requests wait already, 6 online ones; send fewer at a time, or try later"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_answer_that_cannot_be_sent_harms_no_other(layout: str, slow: Callable[[str], Slow], image: bytes) -> None:
    """As where /dev/shm is full for a moment: the model's only worker must outlive it."""
    one = slow(layout)
    with library.InferenceServerClient(one.grpc_url.removeprefix("grpc://")) as client:
        with pytest.raises(library.InferenceServerException, match="Deadline Exceeded"):
            client.infer(one.name, inputs_with(image), request_id="unsendable", client_timeout=4 * SLOW_S)
        with vf.Client(one.grpc_url, one.name, timeout=10.0) as other:
            assert isinstance(other(image)[0], vf.Detections)


def test_a_parameter_of_the_wrong_kind(slow: Callable[[str], Slow], image: bytes) -> None:
    one = slow("fused")
    inputs = inputs_with(image)
    with (
        library.InferenceServerClient(one.grpc_url.removeprefix("grpc://")) as client,
        pytest.raises(library.InferenceServerException) as caught,
    ):
        client.infer(one.name, inputs, parameters={"offline": "yes"})
    assert isinstance(fault_of(str(caught.value)), OptionError)
    assert "offline: expected true or false as a parameter, got 'yes'" in str(caught.value)


def test_that_one_was_refused_is_not_kept_in_the_cache(
    built_engine: Callable[..., Path],
    seeded_checkpoint: Callable[..., Path],
    engine_home: Path,
    image: bytes,
) -> None:
    from visionfast.serving.repository import deploy

    engine = built_engine(seeded_checkpoint("detect"))
    scheduling = Scheduling(cache=True)
    pipelines = [deploy(engine, name=name, layout=name, scheduling=scheduling, uncertified=True) for name in LAYOUTS]  # type: ignore[arg-type]
    with Server(pipelines, http=0, grpc=0, metrics=0) as server:
        for layout in LAYOUTS:
            for url in (server.grpc_url, server.http_url):
                with vf.Client(url, layout) as client:
                    for _ in range(2):
                        with pytest.raises(DeadlineError):
                            client(image, deadline_ms=0.001)
                        with pytest.raises(OptionError, match="max_det"):
                            client(image, max_det=-1)
                    answers = [client(image)[0] for _ in range(3)]
                    assert len({answer.confidence.tobytes() for answer in answers}) == 1
                    # The same object of the same time: it was kept.
                    assert answers[1].stage_ns == answers[2].stage_ns


def test_short_deadlines_do_not_end_the_server(deployed: Callable[..., Path], image: bytes) -> None:
    """By gRPC's own deadlines it lived for 4 s (Triton 2.51)."""
    with Server([deployed(layout) for layout in LAYOUTS], http=0, grpc=0, metrics=0) as server:
        ends = time.monotonic() + 8.0
        late = []

        def ask(number: int) -> None:
            with vf.Client(server.grpc_url, f"detect-{LAYOUTS[number % 2]}") as client:
                for deadline_ms in itertools.cycle((0.5, 1, 2, 5, 10, 2000)):
                    if time.monotonic() > ends or server.fault():
                        return
                    answer = client(b"no image" * 5000 * number, on_error="return", deadline_ms=deadline_ms)[0]
                    late.append(isinstance(answer, DeadlineError))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert server.fault() is None
        assert 20 < sum(late) < len(late)
