"""Images to a server on this machine through shared memory, in place of a message's bytes; all else as ever.

A region is filled, named in the request, and used again once the server has answered. Where no answer came (a deadline,
a connection that broke) the server may still read it, and an answer from other bytes would be kept by its cache; so it
is not filled again, and the server is asked to forget it, which it refuses while a request uses it (Triton 2.51).
A server that was restarted knows no region: new ones are made. Where there is no room, an image is in its message.

Answers come in messages: they are a few kilobytes, and shared memory for them would have to be as large as the largest.
CUDA's has no use: what is sent is an encoded image, which decoders, also those of GPUs, read in the host's memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy.typing as npt

from visionfast.errors import InputError, QueueFullError, ServerError
from visionfast.serving.client_request import Request
from visionfast.serving.client_transport import AsyncMessageTransport, MessageTransport, Placed
from visionfast.serving.shared_memory import Region, Regions, abandoned, remove_abandoned_files

__all__ = ["AsyncSharedMemoryTransport", "SharedMemoryTransport"]

_IMAGE = "image"
_UNKNOWN = "Unable to find shared memory region"
_ANSWERS = (QueueFullError, InputError)
"""Errors that only a server gives, once it is through with a request."""
_END_S = 1.0
"""That the server has to forget a region when the client is closed."""


class SharedMemoryTransport:
    """See `client_transport.Transport`."""

    def __init__(self, messages: MessageTransport) -> None:
        self._messages = messages
        self._regions = Regions()

    def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        config = self._messages.config(model, timeout_s)
        # Whether the server takes it is known before the first image.
        if (region := self._regions.take(1)) is not None:
            with _in_use(self._regions, region):
                if not region.registered:
                    self._register(region, timeout_s)
            remove_abandoned_files()
            for name in abandoned(self._messages.regions(timeout_s)):
                with contextlib.suppress(ServerError):  # a request still uses it
                    self._messages.forget_region(name, timeout_s)
        return config

    def models(self, timeout_s: float) -> list[str]:
        return self._messages.models(timeout_s)

    def statistics(self, timeout_s: float) -> Mapping[str, Any]:
        return self._messages.statistics(timeout_s)

    def infer(self, model: str, request: Request, timeout_s: float) -> dict[str, npt.NDArray[Any]]:
        ends = time.monotonic() + timeout_s
        for left in self._regions.take_left():
            self._regions.forgotten(left, self._forgets(left, timeout_s))
        image = request.arrays.get(_IMAGE)
        while image is not None and (region := self._regions.take(image.nbytes)) is not None:
            was_known = region.registered
            try:
                with _in_use(self._regions, region):
                    if not was_known:
                        self._register(region, _left(ends))
                    region.fill(image)
                    return self._messages.infer(model, request, _left(ends), Placed(_IMAGE, region.name))
            except ServerError as error:
                if not (was_known and _UNKNOWN in str(error)):
                    raise
                self._regions.leave_free()  # the server was restarted: it knows none of them
        return self._messages.infer(model, request, _left(ends))

    def close(self) -> None:
        ends = time.monotonic() + _END_S
        for region in self._regions.registered():
            if time.monotonic() < ends:
                self._forgets(region, _END_S)
        self._regions.close()
        self._messages.close()

    def _register(self, region: Region, timeout_s: float) -> None:
        region.registered = True  # perhaps, also when no answer comes
        try:
            self._messages.register_region(region.name, region.key, region.size, timeout_s)
        except ServerError as error:
            raise _refused(error) from error
        region.unlink()

    def _forgets(self, region: Region, timeout_s: float) -> bool:
        try:
            self._messages.forget_region(region.name, timeout_s)
        except ServerError:  # a request still uses it, or there is no server
            return False
        return True


class AsyncSharedMemoryTransport:
    """See `client_transport.AsyncTransport`."""

    def __init__(self, messages: AsyncMessageTransport) -> None:
        self._messages = messages
        self._regions = Regions()

    async def config(self, model: str, timeout_s: float) -> Mapping[str, Any]:
        config = await self._messages.config(model, timeout_s)
        if (region := self._regions.take(1)) is not None:
            with _in_use(self._regions, region):
                if not region.registered:
                    await self._register(region, timeout_s)
            remove_abandoned_files()
            for name in abandoned(await self._messages.regions(timeout_s)):
                with contextlib.suppress(ServerError):
                    await self._messages.forget_region(name, timeout_s)
        return config

    async def models(self, timeout_s: float) -> list[str]:
        return await self._messages.models(timeout_s)

    async def statistics(self, timeout_s: float) -> Mapping[str, Any]:
        return await self._messages.statistics(timeout_s)

    async def infer(self, model: str, request: Request, timeout_s: float) -> dict[str, npt.NDArray[Any]]:
        ends = time.monotonic() + timeout_s
        for left in self._regions.take_left():
            self._regions.forgotten(left, await self._forgets(left, timeout_s))
        image = request.arrays.get(_IMAGE)
        while image is not None and (region := self._regions.take(image.nbytes)) is not None:
            was_known = region.registered
            try:
                with _in_use(self._regions, region):
                    if not was_known:
                        await self._register(region, _left(ends))
                    region.fill(image)
                    return await self._messages.infer(model, request, _left(ends), Placed(_IMAGE, region.name))
            except ServerError as error:
                if not (was_known and _UNKNOWN in str(error)):
                    raise
                self._regions.leave_free()
        return await self._messages.infer(model, request, _left(ends))

    async def close(self) -> None:
        ends = time.monotonic() + _END_S
        for region in self._regions.registered():
            if time.monotonic() < ends:
                await self._forgets(region, _END_S)
        self._regions.close()
        await self._messages.close()

    async def _register(self, region: Region, timeout_s: float) -> None:
        region.registered = True
        try:
            await self._messages.register_region(region.name, region.key, region.size, timeout_s)
        except ServerError as error:
            raise _refused(error) from error
        region.unlink()

    async def _forgets(self, region: Region, timeout_s: float) -> bool:
        try:
            await self._messages.forget_region(region.name, timeout_s)
        except ServerError:
            return False
        return True


@contextlib.contextmanager
def _in_use(regions: Regions, region: Region) -> Iterator[None]:
    """Until the server has answered; if it does not, the region is not used again."""
    try:
        yield
    except _ANSWERS:
        regions.give_back(region)
        raise
    except BaseException:
        regions.leave(region)
        raise
    regions.give_back(region)


def _left(ends: float) -> float:
    return max(1e-3, ends - time.monotonic())


def _refused(error: ServerError) -> ServerError:
    text = str(error)
    where = text.split(": ")[0]
    if "is restricted" in text:
        return ServerError(
            f"{where}: the server takes no shared memory; `visionfast serve --shared-memory` does, on a loopback "
            "address, or open the client without shared_memory=True"
        )
    if "Unable to open shared memory region" in text:
        return ServerError(
            f"{where}: the server cannot open this client's shared memory; expected one on this machine, run by the "
            "same user, and a container's with --ipc=host; or open the client without shared_memory=True"
        )
    return error
