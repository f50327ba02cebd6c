"""kill -9 while clients ask: of a stage in either layout, and of the server itself. `serve` brings all of it back."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving_process import Serving, lives

import visionfast as vf
from visionfast.errors import ServerError, VisionfastError
from visionfast.serving.processes import stages_of
from visionfast.serving.server import Server

pytest.importorskip("tritonclient.grpc", reason="the server is asked with tritonclient: visionfast[triton]")

LAYOUTS = ("fused", "ensemble")
TIMEOUT_S = 20.0


class Asking:
    """Clients of both layouts over both protocols, each of which asks on and on, whatever it is answered."""

    def __init__(self, serving: Serving, image: bytes) -> None:
        told = serving.hear("ready at")[0].split("ready at ")[1]
        http_url, rest = told.split(", ")
        self._urls = {"http": http_url, "grpc": rest.split(" and ")[0]}
        self._image = image
        self._ending = threading.Event()
        self.answered = {(layout, scheme): 0 for layout in LAYOUTS for scheme in self._urls}
        self.errors: list[tuple[tuple[str, str], VisionfastError]] = []
        self.longest_s = 0.0
        self._threads = [threading.Thread(target=self._ask, args=key) for key in self.answered]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"

    def _ask(self, layout: str, scheme: str) -> None:
        with vf.Client(self._urls[scheme], f"detect-{layout}", timeout=TIMEOUT_S) as client:
            while not self._ending.wait(0.02):
                began = time.monotonic()
                try:
                    client(self._image)
                    self.answered[layout, scheme] += 1
                except VisionfastError as error:
                    self.errors.append(((layout, scheme), error))
                    time.sleep(0.1)
                self.longest_s = max(self.longest_s, time.monotonic() - began)

    def all_are_answered(self, within_s: float = 60.0) -> None:
        """From now on, and every one of them."""
        before = dict(self.answered)
        ends = time.monotonic() + within_s
        while any(self.answered[key] < before[key] + 2 for key in before):
            assert time.monotonic() < ends, f"not answered again: {before} → {self.answered}"
            time.sleep(0.05)


@pytest.fixture
def serving(deployed: Callable[..., Path], temporary: Path) -> Iterator[Serving]:
    serving = Serving(deployed("fused"), str(deployed("ensemble")))
    yield serving
    serving.end()


def test_whatever_dies_under_load_clients_get_errors_and_it_comes_back(
    serving: Serving, reduced_photographs: Callable[[int], list[Path]]
) -> None:
    image = reduced_photographs(8)[0].read_bytes()
    with Asking(serving, image) as asking:
        asking.all_are_answered()
        assert not asking.errors
        for times, (victim, shown) in enumerate(
            [
                ("detect-fused_0_0", "stage detect-fused_0_0"),
                ("detect-ensemble_engine_0_0", "stage detect-ensemble_engine_0_0"),
                ("", "the server"),
            ],
            start=1,
        ):
            if not victim:
                time.sleep(10.0)  # by then what was brought back counts as steady, and may die again
            server = serving.server_pid()
            pids = {stage.name: stage.pid for stage in stages_of(server)}
            os.kill(pids[victim] if victim else server, signal.SIGKILL)
            serving.hear(f"{shown} was killed by SIGKILL")
            serving.hear("ready again", times=times)
            asking.all_are_answered()
            assert not lives(server)
            assert not any(lives(pid) for pid in pids.values())
    assert asking.errors
    assert {type(error) for _, error in asking.errors} <= {ServerError} | set(ServerError.__subclasses__())
    assert {key for key, _ in asking.errors} == set(asking.answered)  # every client noticed, and none was left out
    assert asking.longest_s < TIMEOUT_S
    serving.process.send_signal(signal.SIGTERM)
    assert serving.finish()[0] == 0


def test_no_stage_outlives_a_server_that_is_killed(
    deployed: Callable[..., Path], temporary: Path, reduced_photographs: Callable[[int], list[Path]]
) -> None:
    """And nobody brings it back. Answers are on their way to it: NVIDIA's stub by itself then waits for ever."""
    image = reduced_photographs(8)[0].read_bytes()
    with Server([deployed(layout) for layout in LAYOUTS], http=0, grpc=0, metrics=0) as server:
        ending = threading.Event()

        def ask(layout: str) -> None:
            with vf.Client(server.grpc_url, f"detect-{layout}", timeout=5.0) as client:
                while not ending.is_set():
                    with contextlib.suppress(ServerError):
                        client(image)

        clients = [threading.Thread(target=ask, args=(layout,)) for layout in LAYOUTS * 3]
        for client in clients:
            client.start()
        time.sleep(1.0)
        pids = [stage.pid for stage in server.stages]
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        ending.set()
        ends = time.monotonic() + 5.0
        while any(map(lives, pids)) and time.monotonic() < ends:
            time.sleep(0.05)
        left = [pid for pid in pids if lives(pid)]
        for client in clients:
            client.join(30)
    assert not left
