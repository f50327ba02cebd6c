"""A client whose server refuses, is late, ends or is not there, and one that is closed: typed errors, no hang."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import async_client_of, client_of
from tiny_pipeline import write_pipeline

import visionfast as vf
from visionfast import errors
from visionfast.errors import DeadlineError, ImageError, OptionError, QueueFullError, ServerError
from visionfast.serving.repository import deploy
from visionfast.serving.scheduling import QueueLimits, Scheduling
from visionfast.serving.server import Server

pytest.importorskip("tritonclient.grpc", reason="a client needs tritonclient: pip install 'visionfast[triton]'")


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_deadline(served: Any, photographs: list[Path], scheme: str) -> None:
    with client_of(served("ensemble"), scheme) as client:
        # One behind the other is refused as it arrives: it will be late.
        with pytest.raises((DeadlineError, QueueFullError), match="ensemble: "):
            client(photographs, deadline_ms=1)
        *late, bad = client([*photographs, b"bad"], deadline_ms=1, on_error="return")
        assert [isinstance(answer, (DeadlineError, QueueFullError)) for answer in late] == [True] * len(photographs)
        assert isinstance(bad, (DeadlineError, QueueFullError, ImageError))  # what is no image is refused at once
        assert len(client(photographs)) == 2


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_deadline_with_await(served: Any, photographs: list[Path], scheme: str) -> None:
    async def ask() -> int:
        async with async_client_of(served("fused"), scheme) as client:
            with pytest.raises((DeadlineError, QueueFullError), match="fused: "):
                await client(photographs, deadline_ms=1)
            return len(await client(photographs))

    assert asyncio.run(ask()) == 2


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_call_that_is_cancelled(served: Any, photographs: list[Path], scheme: str) -> None:
    async def ask() -> int:
        async with async_client_of(served("fused"), scheme) as client:
            call = asyncio.create_task(client(photographs * 10))
            await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            ends = time.monotonic() + 20
            while len(asyncio.all_tasks()) > 1:  # gRPC's requests end by themselves
                assert scheme == "grpc"
                assert time.monotonic() < ends
                await asyncio.sleep(0.01)
            return len(await client(photographs))

    assert asyncio.run(ask()) == 2


@pytest.fixture(scope="module")
def own(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of this module's own: a pipeline with room for one waiting request, and a model of somebody else's."""
    home = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISIONFAST_HOME", str(home))
        few = QueueLimits(requests=1, timeout_ms=10_000)
        narrow = deploy(
            built_engine(seeded_checkpoint("detect")),
            name="narrow",
            scheduling=Scheduling(max_batch=1, online=few, offline=few),
            uncertified=True,
        )
    # Told to end, Triton waits as long for the connections that an HTTP client keeps open.
    with Server([narrow, write_pipeline(home / "tiny")], http=0, grpc=0, metrics=0, exit_timeout_s=3) as server:
        yield server


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_full_queue(own: Server, photographs: list[Path], scheme: str) -> None:
    url = own.grpc_url if scheme == "grpc" else own.http_url
    with vf.Client(url, "narrow", concurrency=16) as client:
        _accepted(client, photographs[0])  # what a call left behind when it raised is through
        answers = client([photographs[0]] * 24, on_error="return")
        refused = [answer for answer in answers if isinstance(answer, QueueFullError)]
        assert refused
        assert "narrow: too many requests wait already" in str(refused[0])
        assert sum(isinstance(answer, vf.Detections) for answer in answers) == len(answers) - len(refused) > 0
        with pytest.raises(QueueFullError):
            client([photographs[0]] * 24)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_models_that_are_not_there_or_not_ours(own: Server, served: Any, scheme: str) -> None:
    ours, theirs = (one.grpc_url if scheme == "grpc" else one.http_url for one in (served("fused"), own))
    for url, name, said in (
        (theirs, "nothing", "no model 'nothing' is ready there; there are narrow, tiny"),
        (theirs, "a/b c", "no model 'a/b c' is ready there; there are narrow, tiny"),
        (theirs, "tiny", "tiny: model: expected one that `visionfast deploy` wrote"),
        (ours, "detect-ensemble_engine", "detect-ensemble_engine: expected a whole pipeline, got a step of one"),
    ):
        with pytest.raises(ServerError, match=r"^(grpc|http)://127\.0\.0\.1:\d+: ") as caught:
            vf.Client(url, name)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)

        async def ask(url: str = url, name: str = name) -> None:
            async with vf.AsyncClient(url, name):
                pass

        with pytest.raises(ServerError) as again:
            asyncio.run(ask())
        assert str(again.value) == str(caught.value)


def test_the_wrong_port(own: Server) -> None:
    with pytest.raises(ServerError, match=r"no server answers there by gRPC .* http:// in front is for its HTTP port"):
        vf.Client(own.http_url.removeprefix("http://"), "narrow")
    with pytest.raises(ServerError, match=r"no server answers there by HTTP .* grpc:// in front is for its gRPC port"):
        vf.Client(own.grpc_url.replace("grpc", "http"), "narrow")


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_nobody_there(scheme: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"{scheme}://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"no server answers there.*`visionfast serve` starts one"):
            vf.Client(url, "narrow")


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_somebody_who_never_answers(scheme: str, kind: str) -> None:
    async def ask(url: str) -> None:
        async with vf.AsyncClient(url, "narrow", timeout=0.3):
            pass

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{scheme}://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="narrow: no answer within 300 ms"):
            vf.Client(url, "narrow", timeout=0.3) if kind == "sync" else asyncio.run(ask(url))
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_server_that_ends_meanwhile(own: Server, photographs: list[Path], scheme: str) -> None:
    """It is started again, and the client finds it."""
    url = own.grpc_url if scheme == "grpc" else own.http_url
    with vf.Client(url, "narrow", concurrency=2, timeout=20) as client:
        got: list[Any] = []

        def ask() -> None:
            try:
                client([photographs[0]] * 1000)
            except ServerError as error:
                got.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.3)
        own.__exit__(None, None, None)
        asking.join(timeout=60)
        assert not asking.is_alive()
        assert len(got) == 1
        with pytest.raises(ServerError):
            client(photographs)
        own.__enter__()
        _accepted(client, photographs[0])  # gRPC looks for it again within a second


# ---- the client itself --------------------------------------------------------------------------------------------


def test_a_closed_client(served: Any, photographs: list[Path]) -> None:
    client = client_of(served("fused"))
    client.close()
    client.close()
    with pytest.raises(OptionError, match="this client is closed"):
        client(photographs)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_client_that_is_closed_while_it_is_asked(served: Any, photographs: list[Path], scheme: str) -> None:
    client = client_of(served("fused"), scheme)
    got: list[Exception] = []

    def ask() -> None:
        try:
            client([photographs[0]] * 1000)
        except errors.VisionfastError as error:
            got.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.2)
    client.close()
    asking.join(timeout=20)
    assert not asking.is_alive()
    assert "closed" in str(got[0])


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_an_async_client_that_is_closed_while_it_is_asked(served: Any, photographs: list[Path], scheme: str) -> None:
    async def ask() -> None:
        client = async_client_of(served("fused"), scheme)
        call = asyncio.create_task(client([photographs[0]] * 1000))
        await asyncio.sleep(0.5)
        await client.close()
        with pytest.raises(errors.VisionfastError):
            await asyncio.wait_for(call, 20)

    asyncio.run(ask())


def test_an_async_client_that_was_not_asked_yet() -> None:
    client = vf.AsyncClient("localhost:1", "yolov8s")
    with pytest.raises(OptionError, match="the server was not asked yet"):
        _ = client.class_names


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timeout": 0}, "timeout: expected more than 0 seconds"),
        ({"timeout": float("nan")}, "timeout: expected more than 0 seconds"),
        ({"concurrency": 0}, "concurrency: expected at least 1"),
        ({"model": ""}, "model: expected its name"),
        ({"protocol": "ftp"}, "protocol: expected 'grpc' or 'http'"),
    ],
)
@pytest.mark.parametrize("kind", [vf.Client, vf.AsyncClient])
def test_settings(kind: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        kind(**({"url": "localhost:1", "model": "yolov8s"} | settings))


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_without_nvidias_client(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setitem(sys.modules, f"tritonclient.{scheme}", None)
    with pytest.raises(errors.BackendUnavailableError, match=r"pip install 'visionfast\[triton\]'"):
        vf.Client(f"{scheme}://localhost", "yolov8s")


def test_a_client_is_light() -> None:
    heavy = ("torch", "openvino", "onnx", "ultralytics", "timm", "transformers", "tritonclient", "grpc", "aiohttp")
    code = f"import sys, visionfast as vf; vf.Client, vf.AsyncClient; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _accepted(client: vf.Client, photograph: Path, within_s: float = 20.0) -> None:
    """Asks until it is answered."""
    ends = time.monotonic() + within_s
    while True:
        try:
            client(photograph)
            return
        except ServerError:
            assert time.monotonic() < ends
            time.sleep(0.1)
