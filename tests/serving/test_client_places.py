"""A client outside the process or the event loop that it was opened in: a typed error, and nothing of it is touched."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients import url_of

import visionfast as vf
from visionfast.errors import OptionError

pytest.importorskip("tritonclient.grpc", reason="a client needs tritonclient: pip install 'visionfast[triton]'")


def _in_a_fork(check: Callable[[], None]) -> None:
    """Runs a check in a forked process, which is killed after 20 s."""
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    ends = time.monotonic() + 20
    while (told := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > ends:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the fork hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(told[1]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_another_process(served: Any, photographs: list[Path], scheme: str) -> None:
    one = served("fused")
    with vf.Client(url_of(one, scheme), one.name) as client:
        got: list[Any] = []
        asking = threading.Thread(target=lambda: got.extend(client([photographs[0]] * 6)))
        asking.start()
        time.sleep(0.05)

        def check() -> None:
            said = f"this client was opened in another process \\(pid {os.getppid()}\\); open one in this process"
            calls: list[Callable[[], Any]] = [
                lambda: client(photographs[0]),
                lambda: client.stream(photographs),
                lambda: client.traced(photographs[0]),
            ]
            for call in calls:
                with pytest.raises(OptionError, match=said):
                    call()
            client.close()  # which ends nothing of the other process's

        _in_a_fork(check)
        asking.join()
        assert len(got) == 6
        assert len(client(photographs)) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_another_process_with_await(served: Any, photographs: list[Path]) -> None:
    one = served("fused")

    async def open_and_fork() -> int:
        async with vf.AsyncClient(one.http_url, one.name) as client:

            def check() -> None:
                asyncio.events._set_running_loop(None)  # a fork inside a loop believes that it runs in it

                async def refuse() -> None:
                    with pytest.raises(OptionError, match="this client was opened in another process"):
                        await client(photographs)
                    await client.close()

                asyncio.run(refuse())

            _in_a_fork(check)
            return len(await client(photographs))

    assert asyncio.run(open_and_fork()) == 2


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # asyncio's, of sockets whose loop was closed first
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_another_event_loop(served: Any, photographs: list[Path], scheme: str) -> None:
    one = served("fused")
    client = vf.AsyncClient(url_of(one, scheme), one.name)

    assert len(asyncio.run(client(photographs))) == 2
    with pytest.raises(OptionError, match="this client belongs to an event loop that is closed; open one in this loop"):
        asyncio.run(client(photographs))
    asyncio.run(client.close())
    del client
    gc.collect()


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_two_event_loops_at_once(served: Any, photographs: list[Path], scheme: str) -> None:
    one = served("fused")

    async def ask_and_lend() -> int:
        async with vf.AsyncClient(url_of(one, scheme), one.name) as client:

            async def elsewhere() -> None:
                with pytest.raises(OptionError, match="this client belongs to another event loop; open one in this"):
                    await client(photographs)
                with pytest.raises(OptionError, match="this client belongs to another event loop"):
                    await client.close()

            await asyncio.to_thread(asyncio.run, elsewhere())
            return len(await client(photographs))

    assert asyncio.run(ask_and_lend()) == 2
