"""Asks a server, and is cheap: one thread, one connection, messages made beforehand, answers not looked into.

A process of its own, which `overload.py` starts. It takes a command a line as JSON and answers with a line; times are
nanoseconds of CLOCK_MONOTONIC. Open loop: a request is sent when it is due, whatever came of those before, and its
latency counts from when it was due, not from when it was sent (so a generator that falls behind shows). Closed loop: a
number of clients ask one after the other.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from visionfast.serving.wire import inputs_of, pack_image

LEVELS = ("online", "offline")
OUTCOMES = ("answered", "refused: queue", "refused: time", "given up", "failed")
_METHOD = "/inference.GRPCInferenceService/ModelInfer"


def message(model: str, image: bytes, level: str, deadline_ms: float) -> bytes:
    """One image's request, ready to be sent."""
    made = service_pb2.ModelInferRequest(model_name=model)
    made.parameters["timeout"].int64_param = round(deadline_ms * 1000)
    made.parameters["priority"].uint64_param = LEVELS.index(level) + 1
    if level == "offline":
        made.parameters["offline"].bool_param = True
    arrays = pack_image(image)
    for tensor in inputs_of("detect"):
        array = arrays[tensor.name]
        made.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=array.shape)
        made.raw_input_contents.append(array.tobytes())
    whole: bytes = made.SerializeToString()
    return whole


def outcome_of(error: grpc.RpcError) -> str:
    told = str(error.details())
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "given up"
    if "QueueFullError" in told or "Exceeds maximum queue size" in told:
        return "refused: queue"
    if "DeadlineError" in told or "Request timeout expired" in told:
        return "refused: time"
    print(f"failed: {error.code()} {told}", file=sys.stderr)
    return "failed"


class Generator:
    """Sends what it is told to."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Callable[..., Awaitable[bytes]] = channel.unary_unary(_METHOD)
        self._messages: dict[str, list[bytes]] = {}

    def prepare(self, model: str, images: Sequence[str], deadline_ms: dict[str, float]) -> None:
        """Makes the messages of every level."""
        self._messages = {
            level: [message(model, Path(image).read_bytes(), level, deadline_ms[level]) for image in images]
            for level in LEVELS
        }
        self._deadline_s = {level: deadline_ms[level] / 1e3 for level in LEVELS}

    async def _ask(self, level: str, number: int, due_ns: int) -> tuple[str, int, int]:
        """What came of a request, its latency, and how late it was sent."""
        sent_ns = time.monotonic_ns()
        patience_s = self._deadline_s[level] - (sent_ns - due_ns) / 1e9
        messages = self._messages[level]
        try:
            # The server is not told that it is too late (see `serving.client_grpc`).
            asked = asyncio.ensure_future(self._call(messages[number % len(messages)], timeout=patience_s + 60))
            # What comes of one that was given up is nobody's; asyncio would print it otherwise.
            asked.add_done_callback(lambda task: task.cancelled() or task.exception())
            done, _ = await asyncio.wait([asked], timeout=max(0.001, patience_s))
            outcome = ("answered" if asked.result() else "failed") if done else "given up"
        except grpc.RpcError as error:
            outcome = outcome_of(error)
        return outcome, time.monotonic_ns() - due_ns, sent_ns - due_ns

    async def open_loop(self, arrivals: Sequence[tuple[float, str]]) -> list[tuple[str, int, int]]:
        """Asks at each of the times, seconds from now; of each request as `_ask`."""
        began_ns = time.monotonic_ns()
        under_way = []
        for number, (due_s, level) in enumerate(arrivals):
            due_ns = began_ns + round(due_s * 1e9)
            await asyncio.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
            under_way.append(asyncio.ensure_future(self._ask(level, number, due_ns)))
        return list(await asyncio.gather(*under_way))

    async def closed_loop(self, clients: int, seconds: float, level: str) -> list[tuple[str, int, int]]:
        """So many clients, each of which asks again as soon as it is answered."""
        ends_ns = time.monotonic_ns() + round(seconds * 1e9)
        asked: list[tuple[str, int, int]] = []

        async def ask_on() -> None:
            while (now_ns := time.monotonic_ns()) < ends_ns:
                asked.append(await self._ask(level, len(asked), now_ns))

        await asyncio.gather(*(ask_on() for _ in range(clients)))
        return asked


async def main() -> None:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(sys.argv[1], options=options) as channel:
        generator = Generator(channel)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            told: dict[str, Any] = json.loads(line)
            work = getattr(generator, told.pop("do"))
            wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
            made = work(**told)
            asked = await made if asyncio.iscoroutine(made) else made
            spent = {"wall_ns": time.monotonic_ns() - wall_ns, "cpu_ns": time.process_time_ns() - cpu_ns}
            print(json.dumps({"asked": asked, **spent}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
