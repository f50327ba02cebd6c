"""Uploads that are wrong, in every layer: for `corrupt_uploads.py` and the tests."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Upload", "images", "uploads"]

_ROUTE = "/v2/models/{model}/infer"


@dataclass(frozen=True, slots=True)
class Upload:
    """One that is wrong somewhere.

    Attributes:
        kind: what is wrong, for people.
        message: all bytes of an HTTP request, or a `ModelInferRequest` for gRPC.
    """

    kind: str
    message: Any


# ---- images -------------------------------------------------------------------------------------------------------


def _png(width: int, height: int) -> bytes:
    """A PNG that claims a size, with next to nothing in it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(4096))) + chunk(b"IEND", b"")


def _with_size(jpeg: bytes, height: int, width: int) -> bytes:
    """A JPEG whose frame header claims another size."""
    at = max(jpeg.find(b"\xff\xc0"), jpeg.find(b"\xff\xc2"))
    return jpeg[: at + 5] + struct.pack(">HH", height, width) + jpeg[at + 9 :]


def images(jpeg: bytes, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """One of each kind of corrupt image."""
    yield "image: cut short", jpeg[: draw.randrange(1, len(jpeg))]
    yield "image: garbage", draw.randbytes(draw.randrange(1, 100_000))
    yield "image: none", b""
    yield "image: zeros", bytes(draw.randrange(1, 100_000))
    damaged = bytearray(jpeg)
    for _ in range(draw.randrange(1, 200)):
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    yield "image: damaged", bytes(damaged)
    yield "image: the signature, then garbage", jpeg[:4] + draw.randbytes(10_000)
    yield "image: a PNG of terapixels", _png(draw.choice([100_000, 2**31 - 1]), draw.choice([100_000, 2**31 - 1]))
    yield "image: a PNG of none", _png(0, draw.choice([0, 100]))
    yield "image: a PNG without its pixels", _png(4000, 3000)
    yield "image: a JPEG of 65500 × 65500", _with_size(jpeg, 65500, 65500)
    yield "image: a PPM of terapixels", b"P6\n9999999 9999999\n255\n" + draw.randbytes(1000)
    yield "image: a PPM of less than none", b"P6\n-5 5\n255\n" + draw.randbytes(1000)
    yield "image: text", b"<html>" + bytes(draw.choices(b"abc <>", k=1000))


# ---- HTTP ---------------------------------------------------------------------------------------------------------


def _tensors(encoded: bytes, text: bytes = b"", /, **changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """As the client sends them; `changes` are of a tensor, by its name."""
    padded = encoded.ljust(max(1, -(-len(encoded) // 65536)) * 65536, b"\0")
    options = text.ljust(max(1, -(-len(text) // 64)) * 64, b"\0")
    made = (
        {"name": "image", "shape": [1, len(padded)], "datatype": "UINT8", "data": padded},
        {"name": "length", "shape": [1, 1], "datatype": "INT32", "data": struct.pack("<i", len(encoded))},
        {"name": "options", "shape": [1, len(options)], "datatype": "UINT8", "data": options},
    )
    return [tensor | dict(changes.get(str(tensor["name"]), {})) for tensor in made]


def _body(tensors: Sequence[Mapping[str, Any]], **parameters: Any) -> tuple[bytes, int]:
    """A request's body, and the length of its header."""
    told = [
        {name: tensor[name] for name in ("name", "shape", "datatype")}
        | {"parameters": {"binary_data_size": tensor.get("size", len(tensor["data"]))}}
        for tensor in tensors
    ]
    head = json.dumps({"inputs": told, "parameters": parameters}).encode()
    return head + b"".join(tensor["data"] for tensor in tensors), len(head)


def _http(model: str, body: bytes, head: Any, length: int | None = None) -> bytes:
    lines = [
        f"POST {_ROUTE.format(model=model)} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(body) if length is None else length}",
        *([] if head is None else [f"Inference-Header-Content-Length: {head}"]),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _tensor_faults(jpeg: bytes, draw: random.Random) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    n = -(-len(jpeg) // 65536) * 65536
    for lie in (-1, n + 1, 2**31 - 1, -(2**31), draw.randrange(-(2**31), 0)):
        yield "length: a lie", _tensors(jpeg, length={"data": struct.pack("<i", lie)})
    yield "length: as a float", _tensors(jpeg, length={"datatype": "FP32"})
    yield "length: two of them", _tensors(jpeg, length={"shape": [1, 2], "data": bytes(8)})
    yield "tensor: another dtype", _tensors(jpeg, image={"datatype": "FP32", "shape": [1, n // 4]})
    yield (
        "tensor: a dtype that is none",
        _tensors(jpeg, image={"datatype": draw.choice(["", "U8", "BYTES", "x" * 999])}),
    )
    for shape in ([n], [1, 1, n], [0, n], [2, n // 2], [1, n - 1], [1, -1], [-1, -n], [1, 2**62], [2**32, 2**32], []):
        yield "tensor: a shape that does not fit", _tensors(jpeg, image={"shape": shape})
    yield "tensor: of no bytes", _tensors(jpeg, image={"shape": [1, 0], "data": b""})
    yield (
        "tensor: too many images",
        _tensors(jpeg, image={"shape": [64, n // 64]}, length={"shape": [64, 1], "data": bytes(256)}),
    )
    yield "tensor: one is missing", _tensors(jpeg)[draw.randrange(3) :][:2][-1:]
    yield "tensor: one too many", [*_tensors(jpeg), {"name": "more", "shape": [1], "datatype": "UINT8", "data": b"1"}]
    yield "tensor: twice", [*_tensors(jpeg), _tensors(jpeg)[0]]
    for size in (-1, 0, n - 1, n + 1, 2**63 - 1, 2**64, "12", None, 1.5, {}):
        yield "tensor: a size that lies", _tensors(jpeg, image={"size": size})
    for options in (
        b"{", b"[1]", b"\xff\xfe", b"[" * 50_000, b'{"conf": NaN}', b'{"conf": 1e999}', b'{"conf": "a"}',
        b'{"max_det": -1}', b'{"max_det": 99999999999999999999}', b'{"classes": [[[]]]}',
        b'{"' + b"x" * 5000 + b'": 1}', draw.randbytes(300),
    ):  # fmt: skip
        yield "options: none that are", _tensors(jpeg, options)


def _http_faults(model: str, jpeg: bytes, draw: random.Random) -> Iterator[tuple[str, bytes]]:
    body, head = _body(_tensors(jpeg))
    for lie in (-1, 0, 1, head - 1, head + 1, len(body) + 1, 2**63, "abc", "", "1e3"):
        yield "HTTP: a header's length that lies", _http(model, body, lie)
    yield "HTTP: no header's length", _http(model, body, None)
    yield "HTTP: half a body", _http(model, body[: len(body) // 2], head, length=len(body))
    yield "HTTP: a body of a length that is none", _http(model, body, head, length=draw.choice([-1, 2**64, 2**31]))
    yield "HTTP: no JSON", _http(model, b"{" * draw.choice([10, 10_000]), None)
    yield (
        "HTTP: another JSON",
        _http(model, draw.choice([b"[]", b"1", b'{"inputs": 1}', b'{"inputs": [1]}', b"{}"]), None),
    )
    text = json.dumps({"inputs": [{"name": "image", "shape": [1, 3], "datatype": "UINT8", "data": [-1, 256, "a"]}]})
    yield "HTTP: numbers out of their range", _http(model, text.encode(), None)
    yield (
        "HTTP: compressed, and is not",
        _http(model, body, head).replace(b"Host", b"Content-Encoding: gzip\r\nHost", 1),
    )
    yield "HTTP: no HTTP", draw.randbytes(draw.randrange(1, 5000)) + b"\r\n\r\n"
    yield "HTTP: a long path", b"GET /v2/" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"
    yield "HTTP: many headers", b"GET /v2 HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n"
    strange = _body(_tensors(jpeg), timeout="x", priority=-5, sequence_id={}, conf=[1])
    yield "HTTP: parameters that are none", _http(model, *strange)


# ---- gRPC ---------------------------------------------------------------------------------------------------------


def _grpc_faults(model: str, jpeg: bytes, draw: random.Random) -> Iterator[tuple[str, Any]]:
    from tritonclient.grpc import service_pb2

    def message(tensors: Sequence[Mapping[str, Any]], raw: Sequence[bytes] | None = None) -> Any:
        made = service_pb2.ModelInferRequest(model_name=model)
        for tensor in tensors:
            made.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        made.raw_input_contents.extend([tensor["data"] for tensor in tensors] if raw is None else raw)
        return made

    for kind, tensors in _tensor_faults(jpeg, draw):
        if kind != "tensor: a size that lies" and not any(abs(size) >= 2**63 for t in tensors for size in t["shape"]):
            yield f"gRPC, {kind}", message(tensors)
    good = _tensors(jpeg)
    for raw in ([], [b""] * 3, [b"x"] * 3, [tensor["data"] for tensor in good] * 2, [draw.randbytes(9)] * 5000):
        yield "gRPC: other contents than tensors", message(good, raw)
    typed = message(good, [])
    typed.inputs[0].contents.uint_contents.extend([1, 2, 2**32 - 1])
    yield "gRPC: numbers in place of bytes", typed
    elsewhere = message(good)
    elsewhere.inputs[0].parameters["shared_memory_region"].string_param = draw.choice(["", "none", "/etc/passwd"])
    elsewhere.inputs[0].parameters["shared_memory_byte_size"].int64_param = draw.choice([-1, 2**62, 5])
    elsewhere.inputs[0].parameters["shared_memory_offset"].int64_param = draw.choice([-1, 2**62, 5])
    yield "gRPC: in no shared memory", elsewhere
    strange = message(good)
    strange.parameters["priority"].string_param = "first"
    strange.parameters["timeout"].int64_param = -1
    yield "gRPC: parameters that are none", strange
    yield "gRPC: no model of ours", service_pb2.ModelInferRequest(model_name=model + "x" * draw.randrange(9))


def uploads(model: str, jpeg: bytes, draw: random.Random) -> list[Upload]:
    """One of each kind, in random order; another `draw` makes others."""
    from tritonclient.grpc import service_pb2

    made = []
    for kind, image in images(jpeg, draw):
        body, head = _body(_tensors(image))
        made.append(Upload(kind, _http(model, body, head)))
        message = service_pb2.ModelInferRequest(model_name=model)
        for tensor in _tensors(image):
            message.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
            message.raw_input_contents.append(tensor["data"])
        made.append(Upload(f"gRPC, {kind}", message))
    for kind, tensors in _tensor_faults(jpeg, draw):
        made.append(Upload(kind, _http(model, *_body(tensors))))
    made += [Upload(*one) for one in _http_faults(model, jpeg, draw)]
    made += [Upload(*one) for one in _grpc_faults(model, jpeg, draw)]
    draw.shuffle(made)
    return made
