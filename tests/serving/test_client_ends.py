"""What a client leaves behind when nobody waits any more: requests that end by themselves, and never a cancelled one.

Triton up to 24.11 may end with SIGSEGV when a request is cancelled (its issue 7368), so a gRPC server of these tests'
own stands before the real one and sees whether one is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import visionfast as vf
from visionfast.embedding import image_key
from visionfast.errors import DeadlineError, ImageNotFoundError, OptionError

if TYPE_CHECKING:
    from conftest import Served

grpc = pytest.importorskip("grpc", reason="a client needs tritonclient: pip install 'visionfast[triton]'")
services = pytest.importorskip("tritonclient.grpc.service_pb2_grpc", reason="as above")

HOLDS_S = 0.5


class Watching(services.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Hands requests on to a real server, each after `HOLDS_S`, and notes which were cancelled by then.

    Attributes:
        begun: requests for an answer.
        answered: those whose client had not hung up by the time of their answer.
    """

    def __init__(self, url: str) -> None:
        self._channel = grpc.insecure_channel(url.removeprefix("grpc://"))
        self._stub = services.GRPCInferenceServiceStub(self._channel)
        self._lock = threading.Lock()
        self.begun = self.answered = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(32))
        services.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self._stub.ModelConfig(request)

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._lock:
            self.begun += 1
        time.sleep(HOLDS_S)
        try:
            answer = self._stub.ModelInfer(request)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())
        finally:
            with self._lock:
                self.answered += context.is_active()
        return answer

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._channel.close()


@pytest.fixture
def watched() -> Iterator[Callable[[Served], Watching]]:
    opened: list[Watching] = []

    def watch(served: Served) -> Watching:
        opened.append(Watching(served.grpc_url))
        return opened[-1]

    yield watch
    for one in opened:
        one.stop()


def _wait_for_the_first(watching: Watching, within_s: float = 20.0) -> None:
    ends = time.monotonic() + within_s
    while not watching.begun:
        assert time.monotonic() < ends, "no request comes"
        time.sleep(0.01)


def test_the_first_error_cancels_no_other_request(
    served: Any, watched: Callable[[Served], Watching], photographs: list[Path]
) -> None:
    watching = watched(served("fused"))
    with vf.Client(watching.url, "detect-fused") as client:
        began = time.monotonic()
        with pytest.raises(ImageNotFoundError):
            client(["missing.jpg", *[photographs[0]] * 3])
        assert time.monotonic() - began < HOLDS_S
        _wait_for_the_first(watching)
    assert watching.begun == watching.answered > 0


def test_a_stream_that_is_left_cancels_no_request(
    served: Any, watched: Callable[[Served], Watching], photographs: list[Path]
) -> None:
    watching = watched(served("fused"))
    with vf.Client(watching.url, "detect-fused", concurrency=2) as client:
        for _ in client.stream([photographs[0]] * 6):
            break
    assert watching.begun == watching.answered > 0


@pytest.mark.parametrize("images", [1, 20])
def test_a_client_that_is_closed_while_it_is_asked_has_its_answers(
    served: Any, watched: Callable[[Served], Watching], photographs: list[Path], images: int
) -> None:
    watching = watched(served("fused"))
    client = vf.Client(watching.url, "detect-fused", concurrency=2)
    got: list[Any] = []

    def ask() -> None:
        try:
            got.append(client([photographs[0]] * images))
        except OptionError as error:
            got.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    _wait_for_the_first(watching)
    client.close()
    asking.join(20)
    assert watching.begun == watching.answered > 0
    if images == 1:
        assert len(got[0]) == 1
    else:
        assert "this client is closed" in str(got[0])
        assert watching.begun < images


@pytest.mark.parametrize("ends", ["by an error", "by a time limit", "by a cancellation", "by close"])
def test_with_await_no_request_is_cancelled(
    served: Any, watched: Callable[[Served], Watching], photographs: list[Path], ends: str
) -> None:
    watching = watched(served("fused"))

    async def ask() -> None:
        first = "missing.jpg" if ends == "by an error" else photographs[0]
        async with vf.AsyncClient(watching.url, "detect-fused", concurrency=4) as client:
            call = asyncio.create_task(client([first, *[photographs[0]] * 20]))
            if ends == "by a time limit":
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(call, 0.7 * HOLDS_S)
            elif ends == "by an error":
                with pytest.raises(ImageNotFoundError):
                    await call
            else:
                await asyncio.to_thread(_wait_for_the_first, watching)
                if ends == "by a cancellation":
                    began = time.monotonic()
                    call.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await call
                    assert time.monotonic() - began < HOLDS_S / 2
            if ends == "by an error":
                await client(photographs[0])  # the client goes on
        if ends == "by close":
            with pytest.raises(vf.VisionfastError, match="closed"):
                await call

    asyncio.run(ask())
    assert 0 < watching.begun == watching.answered < 20


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_image_that_is_not_kept_is_sent_within_what_is_left_of_the_deadline(
    small_served: Callable[[str], Served], watched: Callable[[Served], Watching], photographs: list[Path], kind: str
) -> None:
    encoded = photographs[0].read_bytes()
    watching = watched(small_served("prompt-few"))  # which keeps none
    asked: dict[str, Any] = {"points": [(9, 9, 1)], "deadline_ms": 1.6e3 * HOLDS_S}

    async def ask() -> None:
        async with vf.AsyncClient(watching.url, "prompt-few") as client:
            client._sent.add(image_key(encoded).key)
            with pytest.raises(DeadlineError):
                await client.segment(encoded, **asked)

    if kind == "async":
        asyncio.run(ask())
    else:
        with vf.Client(watching.url, "prompt-few") as client:
            client._sent.add(image_key(encoded).key)
            with pytest.raises(DeadlineError):
                client.segment(encoded, **asked)
    assert watching.begun == 2


def test_no_more_images_are_under_way_than_allowed(
    served: Any, watched: Callable[[Served], Watching], photographs: list[Path]
) -> None:
    """Calls of one image, from several threads, count as those of a list do."""
    watching = watched(served("fused"))
    with vf.Client(watching.url, "detect-fused", concurrency=2) as client:
        threads = [threading.Thread(target=client, args=(photographs[0],)) for _ in range(6)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began >= 3 * HOLDS_S
    assert watching.answered == 6
