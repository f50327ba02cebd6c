"""The load of the soak, in a process of its own: what grows there are the clients, and nothing else.

Photographs, thumbnails, pictures of all shapes, and what is no picture, over HTTP and gRPC, sync and async, by clients
that stay and clients that come and go, at random moments. The clients that stay live through the server's restarts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import io
import multiprocessing
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from PIL import Image

import visionfast as vf
from visionfast.errors import DeadlineError, ImageError, QueueFullError, ServerError, VisionfastError

__all__ = ["Asked", "Load", "mixed_images"]

_GIVE_BACK_S = 1.0
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # glibc's malloc.h
_WARM_UP_S, _ENDING_S = 180.0, 60.0
"""How long the other process may take for what it is told."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Who is asked what, and how often.

    Attributes:
        urls: of the server, by scheme (`grpc`, `http`).
        names: of its models.
        images: (`good` or `bad`, encoded bytes).
        rate: images a second, Poisson arrivals.
        seed: of what is asked when.
    """

    urls: Mapping[str, str]
    names: Sequence[str]
    images: Sequence[tuple[str, bytes]]
    rate: float
    seed: int


def mixed_images(photographs: Sequence[bytes], seed: int) -> list[tuple[str, bytes]]:
    """Good and bad, small and large: a name and its bytes."""
    noise = np.random.default_rng(seed)
    made: list[tuple[str, bytes]] = [("good", photograph) for photograph in photographs]
    for height, width in ((1, 1), (17, 640), (640, 17), (64, 64), (480, 640), (1080, 1920)):
        for kind in ("PNG", "JPEG"):
            file = io.BytesIO()
            Image.fromarray(noise.integers(0, 256, (height, width, 3), np.uint8)).save(file, kind)
            made.append(("good", file.getvalue()))
    made += [("bad", b""), ("bad", b"no image"), ("bad", noise.bytes(50_000)), ("bad", photographs[0][:5000])]
    made.append(("bad", b"P6\n60000 60000\n255\n" + bytes(100)))  # it claims what nobody has
    return made


class Load:
    """The process that asks.

    Attributes:
        pid: of that process.
    """

    def __init__(self, asked: Asked) -> None:
        own, its = multiprocessing.Pipe()
        self._told = own
        # Not a fork: that would carry all the memory along that this process ever used.
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(asked, its), daemon=True)
        self._process.start()
        its.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def warm_up(self) -> None:
        """Everything, and all that may be under way at once: the most there ever was decides what a process keeps."""
        self._tell("warm up", _WARM_UP_S)

    def resume(self) -> None:
        """Asks at random, from now on."""
        self._tell("resume")

    def pause(self) -> None:
        """The server is about to go. Requests still come, and it counts as no fault that they find nobody."""
        self._tell("pause")

    def end(self) -> Counter[str]:
        """What came of the requests."""
        outcomes: Counter[str] = self._tell("end")
        self._process.join(_ENDING_S)
        return outcomes

    def close(self) -> None:
        """Harmless where it has ended."""
        self._told.close()
        self._process.join(_ENDING_S)
        self._process.kill()
        self._process.join()
        self._process.close()

    def _tell(self, what: str, patience_s: float = _ENDING_S) -> Any:
        with contextlib.suppress(OSError, EOFError):
            self._told.send(what)
            if self._told.poll(patience_s):
                return self._told.recv()
        raise VisionfastError(f"the clients' process (pid {self.pid}): no answer to {what!r}; it is gone, or stuck")


# ---- in that process ----------------------------------------------------------------------------------------------


def _serve(asked: Asked, told: Connection) -> None:
    _keep_nothing_free()
    with contextlib.suppress(EOFError, OSError), _Clients(asked) as clients:  # the other side is gone: so are we
        while (what := told.recv()) != "end":
            {"warm up": clients.warm_up, "resume": clients.resume, "pause": clients.pause}[what]()
            told.send(None)
        clients.stop()
        told.send(clients.outcomes)


def _keep_nothing_free() -> None:
    """The memory of this process shall be what it holds: garbage, and what glibc keeps for the next time, go back.

    How much those are depends on how much was under way at once, and in how many threads: when the server had been
    away, and everything came together again, they took a step of 20 MiB, and a step is no leak.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)

    def give_back() -> None:
        while True:
            gc.collect()
            libc.malloc_trim(0)
            time.sleep(_GIVE_BACK_S)

    threading.Thread(target=give_back, daemon=True).start()


class _Clients:
    def __init__(self, asked: Asked) -> None:
        self._asked, self._random = asked, random.Random(asked.seed)
        self._ending, self._disturbed = threading.Event(), threading.Event()
        self.outcomes: Counter[str] = Counter()
        self._stay: dict[tuple[str, str], vf.Client] = {}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for client in self._stay.values():
            client.close()

    def warm_up(self) -> None:
        for name in self._asked.names:
            for url in self._asked.urls.values():
                with vf.Client(url, name, timeout=60) as client:
                    images = [image for _, image in self._asked.images]
                    client(images, on_error="return", conf=0.1)
                    client(images, on_error="return", conf=0.1, deadline_ms=1)  # given up, and still on the server

    def resume(self) -> None:
        self._disturbed.clear()
        if not self._thread.is_alive():
            self._thread.start()

    def pause(self) -> None:
        self._disturbed.set()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(self._random.expovariate(self._asked.rate)):
            self.outcomes[self._ask()] += 1

    def _ask(self) -> str:
        kind, image = self._random.choice(self._asked.images)
        name, scheme = self._random.choice(self._asked.names), self._random.choice(("grpc", "http"))
        url = self._asked.urls[scheme]
        options: dict[str, Any] = {"conf": self._random.choice((0.1, 0.25))}
        if self._random.random() < 0.3:
            options["priority"] = "offline"
        if self._random.random() < 0.1:
            options["deadline_ms"] = self._random.choice((1, 5, 2000))
        try:
            way = self._random.random()
            if way < 0.15:  # it comes, asks, and goes
                with vf.Client(url, name, timeout=20) as client:
                    client(image, **options)
            elif way < 0.3:
                asyncio.run(_ask_async(url, name, image, options))
            else:
                if (client := self._stay.get((scheme, name))) is None:
                    client = self._stay[scheme, name] = vf.Client(url, name, timeout=20)
                client(image, **options)
        except ImageError:
            return "image error" if kind == "bad" else "a good image was refused"
        except (QueueFullError, DeadlineError):
            return "refused or late"
        except ServerError as error:
            if not self._disturbed.is_set():
                print(f"{name}, {scheme}: {error}", file=sys.stderr)
            return "no server meanwhile" if self._disturbed.is_set() else "server error"
        return "answered" if kind == "good" else "a bad image was answered"


async def _ask_async(url: str, name: str, image: bytes, options: Mapping[str, Any]) -> None:
    async with vf.AsyncClient(url, name, timeout=20) as client:
        await client(image, **options)
