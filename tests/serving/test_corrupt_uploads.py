"""Uploads that are wrong in every layer, to both layouts: each is answered or closed, and a good one is as ever."""

from __future__ import annotations

import collections
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import client_of

import visionfast as vf
from visionfast.errors import ImageError

pytest.importorskip("tritonclient.grpc", reason="a client needs tritonclient: pip install 'visionfast[triton]'")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from corrupt_messages import images, uploads
from corrupt_uploads import Sender, slope


@pytest.fixture(scope="module")
def jpeg(photographs: list[Path]) -> bytes:
    return photographs[0].read_bytes()


@pytest.fixture(scope="module")
def sender(served: Callable[..., Any]) -> Iterator[Sender]:
    one = served("fused")
    sender = Sender(one.http_url, one.grpc_url)
    yield sender
    sender.close()


@pytest.mark.parametrize("layout", ["fused", "ensemble"])
def test_the_server_lives(served: Callable[..., Any], sender: Sender, jpeg: bytes, layout: str) -> None:
    model = served(layout)
    with client_of(model) as client:
        good = client(jpeg, conf=0.05)[0]
        assert len(good)
        outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        with ThreadPoolExecutor(4) as pool:
            for seed in range(2):
                some = uploads(model.name, jpeg, random.Random(seed))
                for upload, outcome in zip(some, pool.map(sender.send, some), strict=True):
                    outcomes[upload.kind][outcome] += 1
                again = client(jpeg, conf=0.05)[0]
                assert np.array_equal(again.xyxy, good.xyxy)
    assert sum(sum(counter.values()) for counter in outcomes.values()) > 250
    for kind, counter in outcomes.items():
        assert not {"no answer", "UNAVAILABLE", "INTERNAL", "UNKNOWN"} & set(counter), (kind, counter)
        if "image: " in kind:
            assert set(counter) == {"200"}, (kind, counter)  # what is wrong is in the answer
        if kind.removeprefix("gRPC, ").startswith(
            ("tensor: a", "tensor: o", "tensor: twice", "length: as", "length: two")
        ):
            assert "200" not in counter or kind.endswith("of no bytes"), (kind, counter)


def test_a_corrupt_image_is_that_images_error(served: Callable[..., Any], jpeg: bytes) -> None:
    some = [(kind, image) for seed in range(3) for kind, image in images(jpeg, random.Random(seed))]
    with client_of(served("ensemble"), "http") as client:
        answers = client([jpeg, *(image for _, image in some), jpeg], on_error="return", conf=0.05)
    assert isinstance(answers[0], vf.Detections)
    assert np.array_equal(answers[0].xyxy, answers[-1].xyxy)
    for (kind, _), answer in zip(some, answers[1:-1], strict=True):
        if kind != "image: damaged":  # which may be decoded
            assert isinstance(answer, ImageError), kind


def test_the_slope_is_of_the_second_half() -> None:
    sent = [*range(0, 1000, 100)]
    assert slope(sent, [0, 10**9, 0, 10**9, 0, *(5000 + 3 * n for n in sent[5:])]) == pytest.approx(3.0)
