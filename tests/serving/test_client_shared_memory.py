"""Images through shared memory, on the real server: the same answers, and nothing left, however a client ends."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_pipeline import call

import visionfast as vf
from visionfast.errors import DeadlineError, ImageError, OptionError, ServerError
from visionfast.preprocess.decode import decode_image
from visionfast.serving.repository import deploy
from visionfast.serving.scheduling import Scheduling
from visionfast.serving.server import Server
from visionfast.serving.server_questions import forget_dead_clients
from visionfast.serving.shared_memory import remove_abandoned_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the server runs on Linux")
pytest.importorskip("tritonclient.grpc", reason="a client needs tritonclient: pip install 'visionfast[triton]'")

LOW = {"conf": 0.05, "max_det": 20}
"""The seeded network's scores are near 0.12."""


@pytest.fixture(scope="module")
def shared(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that takes shared memory and keeps answers, with the pipelines `plain` and `cached`."""
    engine = built_engine(seeded_checkpoint("detect"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISIONFAST_HOME", str(tmp_path_factory.mktemp("shared")))
        plain = deploy(engine, name="plain", uncertified=True)
        cached = deploy(engine, name="cached", scheduling=Scheduling(cache=True), uncertified=True)
    with Server([plain, cached], http=0, grpc=0, metrics=0, shared_memory=True) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_left_in_the_server(request: pytest.FixtureRequest) -> None:
    """By the test before: what a request still used when its client was closed, the next client to come forgets."""
    if "shared" not in request.fixturenames:
        return
    server: Server = request.getfixturevalue("shared")
    ends = time.monotonic() + 20
    while _regions(server):
        assert time.monotonic() < ends, "regions are left"
        time.sleep(0.1)
        _open(server).close()


def _open(server: Server, scheme: str = "grpc", model: str = "plain", **options: Any) -> vf.Client:
    return vf.Client(server.grpc_url if scheme == "grpc" else server.http_url, model, shared_memory=True, **options)


def _regions(server: Server) -> list[str]:
    """As the server knows them."""
    _, told = call(f"{server.http_url}/v2/systemsharedmemory/status")
    return [region["name"] for region in told]


def _files() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob("visionfast-client-*")]


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, ImageError):
        return (type(got), str(got)) == (type(expected), str(expected))
    return all(
        np.array_equal(getattr(got, name), getattr(expected, name)) for name in ("xyxy", "confidence", "class_id")
    )


@pytest.fixture(scope="module")
def sources(photographs: list[Path]) -> list[Any]:
    bus, zidane = (path.read_bytes() for path in photographs)
    pixels = np.arange(3 * 7 * 1001, dtype=np.uint8).reshape(7, 1001, 3)
    return [bus, photographs[1], b"", b"no image", bus[:5000], pixels, zidane + b"\0" * 300_000, pixels[:1, :1]]


@pytest.fixture(scope="module")
def expected(shared: Server, sources: list[Any]) -> list[Any]:
    with vf.Client(shared.grpc_url, "plain") as client:
        answers = client(sources, on_error="return", **LOW)
    assert sum(len(answer) for answer in answers if isinstance(answer, vf.Detections)) > 20
    return answers


# ---- answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_same_answers_and_nothing_left(
    shared: Server, sources: list[Any], expected: list[Any], scheme: str
) -> None:
    with _open(shared, scheme, concurrency=3) as client:
        for _ in range(3):
            got = client(sources, on_error="return", **LOW)
            assert all(map(_same, got, expected))
        assert 1 <= len(_regions(shared)) <= 6  # 3 at a time, of 2 sizes
        assert all(re.fullmatch(r"visionfast-client-[0-9a-f]{16}-[0-9a-f]{32}", name) for name in _regions(shared))
        assert not _files()
    assert not _regions(shared)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_with_await(shared: Server, sources: list[Any], expected: list[Any], scheme: str) -> None:
    async def ask() -> list[Any]:
        url = shared.grpc_url if scheme == "grpc" else shared.http_url
        async with vf.AsyncClient(url, "plain", shared_memory=True) as client:
            with pytest.raises(DeadlineError):
                await client(sources[0], deadline_ms=1)
            return [await client(sources, on_error="return", **LOW) for _ in range(2)]

    for got in asyncio.run(ask()):
        assert all(map(_same, got, expected))
    _wait_until(lambda: not _forgotten(shared))
    assert not _files()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_traced(shared: Server, sources: list[Any], expected: list[Any], scheme: str) -> None:
    async def ask() -> Any:
        url = shared.grpc_url if scheme == "grpc" else shared.http_url
        async with vf.AsyncClient(url, "plain", shared_memory=True) as client:
            return await client.traced(sources[0], **LOW)

    with _open(shared, scheme) as client:
        for _ in range(2):
            assert _same(client.traced(sources[0], **LOW).answer, expected[0])
    assert _same(asyncio.run(ask()).answer, expected[0])
    assert not _regions(shared)


def test_threads_share_a_client(shared: Server, sources: list[Any], expected: list[Any]) -> None:
    got: list[Any] = []
    with _open(shared) as client:
        ask = lambda: got.append(client(sources, on_error="return", **LOW))  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 4
    assert all(all(map(_same, some, expected)) for some in got)
    assert not _regions(shared)


def test_a_region_with_other_bytes_is_another_image_to_the_cache(shared: Server, photographs: list[Path]) -> None:
    """Of one padded size, so that nothing but the bytes differs; and no bytes of the image before are behind it."""
    bus = decode_image(photographs[0])
    images = [bus[top : top + 320, 40:360] for top in (0, 50, 500, 700)] + [bus[:319, 40:360]]
    with vf.Client(shared.grpc_url, "plain") as client:
        told = [client(image, **LOW)[0] for image in images]
    assert not any(_same(told[0], other) for other in told[1:])
    before = _hits(shared)
    with _open(shared, model="cached") as client:
        for _ in range(3):
            assert all(map(_same, [client(image, **LOW)[0] for image in images], told))  # one after the other
            assert len(_regions(shared)) == 1
    with vf.Client(shared.http_url, "cached") as client:  # and what a message brings is the same image
        assert all(map(_same, [client(image, **LOW)[0] for image in images], told))
    assert _hits(shared) - before == 3 * len(images)


def _hits(server: Server) -> int:
    _, told = call(f"{server.http_url}/v2/models/cached/stats")
    return int(told["model_stats"][0]["inference_stats"]["cache_hit"]["count"])


# ---- what goes wrong ----------------------------------------------------------------------------------------------


def test_where_there_is_no_room_an_image_is_in_its_message(
    shared: Server, sources: list[Any], expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with _open(shared) as client:
        assert all(map(_same, client(sources, on_error="return", **LOW), expected))
        assert not _regions(shared)
    assert not _files()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_what_was_not_answered_is_not_filled_again(
    shared: Server, sources: list[Any], expected: list[Any], scheme: str
) -> None:
    with _open(shared, scheme) as client:
        (first,) = _regions(shared)
        with pytest.raises(DeadlineError):
            client(sources[0], deadline_ms=1)
        assert _same(client(sources[0], **LOW)[0], expected[0])
        others = set(_regions(shared)) - {first}
        assert len(others) == 1
        time.sleep(0.6)
        _wait_until(lambda: bool(client(sources[0], **LOW)) and set(_regions(shared)) == others)
    assert not _regions(shared)


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_client_that_is_closed_while_it_is_asked(shared: Server, sources: list[Any], scheme: str) -> None:
    client = _open(shared, scheme)
    got: list[Exception] = []

    def ask() -> None:
        try:
            client([sources[0]] * 1000)
        except vf.VisionfastError as error:
            got.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    client.close()
    asking.join(timeout=20)
    assert not asking.is_alive()
    assert len(got) == 1
    assert not _files()
    _wait_until(lambda: not _forgotten(shared))


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_server_that_takes_none_says_so(served: Any, scheme: str) -> None:
    one = served("fused")
    said = r"^\w+://127\.0\.0\.1:\d+: the server takes no shared memory; `visionfast serve --shared-memory` does[^\n]*$"
    url = one.grpc_url if scheme == "grpc" else one.http_url
    with pytest.raises(ServerError, match=said):
        vf.Client(url, one.name, shared_memory=True)

    async def ask() -> None:
        async with vf.AsyncClient(url, one.name, shared_memory=True):
            pass

    with pytest.raises(ServerError, match=said):
        asyncio.run(ask())
    assert not _files()


def test_a_server_that_cannot_see_it_says_so(shared: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("visionfast.serving.shared_memory._FOLDER", tmp_path)  # as a container of its own has one
    with pytest.raises(ServerError, match=r"the server cannot open this client's shared memory.*--ipc=host"):
        _open(shared)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_a_server_that_was_restarted(shared: Server, sources: list[Any], expected: list[Any], scheme: str) -> None:
    with _open(shared, scheme, concurrency=2) as client:
        assert all(map(_same, client(sources, on_error="return", **LOW), expected))
        shared.__exit__(None, None, None)
        with pytest.raises(ServerError, match="no server answers there"):
            client(sources[0])
        shared.__enter__()
        assert not _regions(shared)
        _wait_until(lambda: isinstance(client(sources[0], on_error="return")[0], vf.Detections), ServerError)
        assert all(map(_same, client(sources, on_error="return", **LOW), expected))
        assert _regions(shared)
    assert not _regions(shared)


# ---- clients that end otherwise -----------------------------------------------------------------------------------

_ASKING = """\
import sys, visionfast as vf
client = vf.Client(sys.argv[1], "plain", shared_memory=True)
client(sys.argv[2])
print("asked", flush=True)
if sys.argv[3] == "wait":
    client([sys.argv[2]] * 10_000)
"""


@pytest.mark.parametrize("by", ["serve", "another client"])
def test_a_client_that_is_killed(shared: Server, photographs: list[Path], by: str) -> None:
    arguments = [sys.executable, "-c", _ASKING, shared.grpc_url, str(photographs[0]), "wait"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == b"asked\n"
        time.sleep(1.0)  # the server has mapped what it has
        assert not forget_dead_clients("127.0.0.1", _port(shared))  # it lives
        assert _regions(shared)
        asking.send_signal(signal.SIGKILL)
    assert not _files()
    assert _regions(shared)
    if by == "serve":
        _wait_until(lambda: not _forgotten(shared))
    else:
        _wait_until(lambda: _only_its_own(shared))


def _only_its_own(server: Server) -> bool:
    with _open(server):
        return len(_regions(server)) == 1


def test_an_interpreter_that_ends_without_closing(shared: Server, photographs: list[Path]) -> None:
    arguments = [sys.executable, "-c", _ASKING, shared.http_url, str(photographs[0]), "end"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("asked\n", "")
    assert not _files()
    _wait_until(lambda: not _forgotten(shared))


def test_a_client_that_is_forgotten(shared: Server, sources: list[Any]) -> None:
    client = _open(shared)
    client(sources[0])
    assert _regions(shared)
    del client
    gc.collect()
    assert not _files()
    _wait_until(lambda: not _forgotten(shared))


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_an_async_client_that_is_closed_after_its_loop(shared: Server, sources: list[Any], scheme: str) -> None:
    client = vf.AsyncClient(shared.grpc_url if scheme == "grpc" else shared.http_url, "plain", shared_memory=True)
    asyncio.run(client(sources[0]))
    asyncio.run(client.close())
    del client
    gc.collect()
    assert not _files()
    _wait_until(lambda: not _forgotten(shared))


def test_files_of_a_client_that_was_killed_before_the_server_had_mapped_them() -> None:
    name = f"visionfast-client-test-{os.getpid()}"
    script = f"""if True:
        import fcntl, os, time
        fcntl.flock(os.open("/dev/shm/{name}", os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
        print("locked", flush=True)
        time.sleep(60)"""
    path = Path("/dev/shm") / name
    try:
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as making:
            assert making.stdout is not None
            assert making.stdout.readline() == b"locked\n"
            os.utime(path, (0, 0))
            remove_abandoned_files()
            assert path.exists()
            making.kill()
        path.touch()
        remove_abandoned_files()
        assert path.exists()  # it is new: perhaps it is about to be locked
        os.utime(path, (0, 0))
        remove_abandoned_files()
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_serve_looks_for_dead_clients(shared: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("visionfast.serving.server.forget_dead_clients", lambda *where: asked.append(str(where)))
    monkeypatch.setattr(Server, "_start", lambda server: None)
    monkeypatch.setattr(Server, "_stop", lambda server: None)
    monkeypatch.setattr(Server, "fault", lambda server: shared.ask_to_stop())
    monkeypatch.setattr(shared, "_stops_asked", 0)
    shared.run(lambda line: None)
    assert asked == [str(("127.0.0.1", _port(shared)))]


def _forgotten(server: Server) -> list[str]:
    """The regions that are left once dead clients' are given back."""
    forget_dead_clients("127.0.0.1", _port(server))
    return _regions(server)


def _port(server: Server) -> int:
    return int(server.http_url.rpartition(":")[2])


def _wait_until(true: Callable[[], bool], but: type[Exception] | tuple[()] = (), within_s: float = 20.0) -> None:
    ends = time.monotonic() + within_s
    while True:
        try:
            if true():
                return
        except but:
            pass
        assert time.monotonic() < ends, "it has not come to that"
        time.sleep(0.05)


def test_only_on_loopback(deployed: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match=r"--address 0\.0\.0\.0 --shared-memory: expected a loopback address"):
        Server(deployed("fused"), http=0, grpc=0, metrics=0, address="0.0.0.0", shared_memory=True).__enter__()
