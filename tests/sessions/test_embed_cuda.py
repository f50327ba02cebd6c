"""The GPU's embedder on a recording device: what it asks for and when, and that its answers are the host's.

The device's memory is the host's, so everything is really computed.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from recording import RecordingDevice, RecordingEngine
from small_embedder import GRID, SIZE, WIDTH, pictures, small_network, small_spec

from visionfast.backends.fake import FakeRunner
from visionfast.backends.torch import TorchEngine
from visionfast.embedder import Embedder
from visionfast.errors import BackendError, ImageError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.results import Embeddings
from visionfast.sessions.embed_cuda import CudaEmbedSession
from visionfast.sessions.opening import open_embed_session
from visionfast.types import ModelSpec


def network(images: torch.Tensor) -> dict[str, torch.Tensor]:
    """A slot's vectors are told by its pixels alone, in a way that any change of them shows."""
    wide = images.float()
    patches = (
        wide.reshape(len(wide), 3, GRID[0], 14, GRID[1], 14).permute(0, 2, 4, 1, 3, 5).flatten(3)
    )  # (B, h, w, 588)
    return {"cls": wide.flatten(1)[:, :WIDTH] * 3 + 1, "patches": patches[..., :WIDTH]}


def on_device(
    model: ModelSpec, device: RecordingDevice | None = None, **options: Any
) -> tuple[Embedder, RecordingEngine]:
    device = device or RecordingDevice()
    engine = RecordingEngine(model.graphs[0], device, lambda feeds: network(feeds["images"]), **options)
    return Embedder(model, [engine], threads=2), engine


def on_host(model: ModelSpec) -> Embedder:
    def answer(feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        made = network(torch.from_numpy(np.array(feeds["images"])))
        return {name: tensor.numpy() for name, tensor in made.items()}

    return Embedder(model, [FakeRunner(model.graphs[0], answer)], threads=1)


def assert_same(got: Embeddings, expected: Embeddings) -> None:
    np.testing.assert_array_equal(got.cls, expected.cls)
    assert (got.patches is None) == (expected.patches is None)
    if got.patches is not None:
        np.testing.assert_array_equal(got.patches, expected.patches)
    assert got.placed == expected.placed


# ---- the answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("batch", [1, 3])
def test_answers_are_those_of_the_host(batch: int, dtype: str, capturable: bool) -> None:
    model = small_spec(batch, dtype=dtype, outputs=dtype)
    images = pictures(7)
    with on_device(model, capturable=capturable)[0] as device, on_host(model) as host:
        expected = host(images)
        assert np.ptp(expected.cls) > 1
        assert_same(device(images), expected)
        assert_same(device(images[:2], patches=False), host(images[:2], patches=False))
        streamed = [answer for _, answer in device.stream(images, load=lambda image: image, patches=True)]
        assert all(np.array_equal(got.cls, want) for got, want in zip(streamed, expected.cls, strict=True))  # type: ignore[union-attr]


def test_every_level_is_normalised_as_the_definition_has_it() -> None:
    model = small_spec(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize="stretch", cover_hw=None)
    levels = np.zeros((*SIZE, 3), np.uint8)
    levels.reshape(-1, 3)[:256] = np.arange(256)[:, None]
    seen: list[torch.Tensor] = []
    device = RecordingDevice()
    engine = RecordingEngine(
        model.graphs[0], device, lambda feeds: seen.append(feeds["images"].clone()) or network(feeds["images"])
    )
    fed: list[npt.NDArray[Any]] = []
    runner = FakeRunner(model.graphs[0], lambda feeds: fed.append(feeds["images"].copy()) or {})
    with Embedder(model, [engine]) as gpu, Embedder(model, [runner]) as host:
        gpu(levels)
        host(levels)
    np.testing.assert_array_equal(seen[-1].numpy(), fed[-1])


def test_a_real_network_on_a_torch_engine() -> None:
    model = small_spec(2)
    device = RecordingDevice()
    with (
        Embedder(model, [TorchEngine(small_network(), model.graphs[0], device)], threads=1) as gpu,
        Embedder(model, [FakeRunner(model.graphs[0], _through(small_network()))], threads=1) as host,
    ):
        got, expected = gpu(pictures(5)), host(pictures(5))
    np.testing.assert_allclose(got.cls, expected.cls, atol=1e-5)
    np.testing.assert_allclose(got.patches, expected.patches, atol=1e-5)  # type: ignore[arg-type]


def _through(module: torch.nn.Module) -> Any:
    def answer(feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        with torch.inference_mode():
            cls, patches = module(torch.from_numpy(np.array(feeds["images"])))
        return {"cls": cls.numpy(), "patches": patches.numpy()}

    return answer


def test_bad_images_harm_no_other() -> None:
    model = small_spec(3)
    images: list[Any] = list(pictures(4))
    with on_device(model)[0] as embedder:
        alone = embedder(images)
        found = embedder([b"nothing", *images, torch.zeros(4, 4, 3)], on_error="return")
        assert sorted(found.errors) == [0, 5]
        np.testing.assert_array_equal(found.cls[1:5], alone.cls)
        with pytest.raises(ImageError, match="image 0: "):
            embedder([b"nothing", *images])


def test_vectors_are_the_callers() -> None:
    with on_device(small_spec(2))[0] as embedder:
        first = [answer for _, answer in embedder.stream(pictures(2), load=lambda image: image, patches=True)]
        kept = [(answer.cls.copy(), answer.patches.copy()) for answer in first]  # type: ignore[union-attr]
        embedder(pictures(6, seed=1))
        for answer, (cls, patches) in zip(first, kept, strict=True):
            np.testing.assert_array_equal(answer.cls, cls)  # type: ignore[union-attr]
            np.testing.assert_array_equal(answer.patches, patches)  # type: ignore[union-attr]


# ---- the device -------------------------------------------------------------------------------------------


def test_what_a_call_asks_of_the_device() -> None:
    device = RecordingDevice()
    with on_device(small_spec(2), device)[0] as embedder:
        embedder(pictures(2), patches=False)
        del device.log[:]
        embedder(pictures(2), patches=False)
        assert device.log == ["copy to device", "replay", "engine", "copy to host", "synchronize"]
        embedder(pictures(2))
        embedder(pictures(2))
        del device.log[:]
        allocated = device.allocated
        embedder(pictures(2))
        assert device.log == ["copy to device", "replay", "engine", "copy to host", "copy to host", "synchronize"]
        for _ in range(3):
            list(embedder.stream(pictures(9), load=lambda image: image, patches=False))
        assert device.allocated == allocated, "buffers are made once"


def test_patches_need_no_memory_unless_they_are_asked_for() -> None:
    device, model = RecordingDevice(), small_spec(2)
    with on_device(model, device)[0] as embedder:
        allocated = device.allocated
        list(embedder.stream(pictures(9), load=lambda image: image))
        assert device.allocated == allocated
        embedder(pictures(2))
        assert device.allocated == allocated + 4 * 2 * WIDTH * GRID[0] * GRID[1]


@pytest.mark.parametrize("graph", [True, False, None])
@pytest.mark.parametrize("capturable", [True, False])
def test_a_graph_where_it_can_be(graph: bool | None, capturable: bool) -> None:
    model, device = small_spec(), RecordingDevice()
    engine = RecordingEngine(model.graphs[0], device, lambda feeds: network(feeds["images"]), capturable=capturable)
    if graph and not capturable:
        with pytest.raises(BackendError, match="cannot be captured"):
            CudaEmbedSession(model, engine, limits=DecodeLimits(), graph=True)
        assert engine.closed == 1
        return
    session = CudaEmbedSession(model, engine, limits=DecodeLimits(), graph=graph)
    assert ("capture" in device.log) == (capturable and graph is not False)
    session.close()


def test_one_call_is_laid_down_while_another_has_the_device() -> None:
    model = small_spec()
    inside, go_on = threading.Event(), threading.Event()

    class Slow(RecordingDevice):
        slow = False

        def synchronize(self) -> None:
            if self.slow:
                inside.set()
                assert go_on.wait(20)
            super().synchronize()

    device = Slow()
    embedder, _ = on_device(model, device)
    device.slow = True
    first = threading.Thread(target=lambda: embedder(pictures(1)))
    second = threading.Thread(target=lambda: embedder(pictures(1, seed=1)))
    with embedder:
        first.start()
        assert inside.wait(20)
        second.start()
        while embedder.session._streams._free:  # type: ignore[attr-defined]  # both have their memory
            assert second.is_alive()
        closer = threading.Thread(target=embedder.close)
        closer.start()
        closer.join(0.05)
        assert closer.is_alive(), "it waits for whoever is inside"
        go_on.set()
        for thread in (first, second, closer):
            thread.join(20)
            assert not thread.is_alive()


def test_several_threads() -> None:
    model = small_spec(2)
    with on_device(model)[0] as embedder:
        images = pictures(6)
        expected = embedder(images)
        found: dict[int, Embeddings] = {}

        def ask(number: int) -> None:
            for _ in range(5):
                found[number] = embedder([*images[number:], *images[:number]])

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for n, got in found.items():
        np.testing.assert_array_equal(np.roll(got.cls, n, 0), expected.cls)


# ---- failing and closing ----------------------------------------------------------------------------------


def test_a_failure_leaves_a_session_that_works() -> None:
    device = RecordingDevice()
    embedder, engine = on_device(small_spec(), device, capturable=False)
    with embedder:
        expected = embedder(pictures(1))
        engine.failing = BackendError("fake: it broke")
        del device.log[:]
        with pytest.raises(BackendError, match="it broke"):
            embedder(pictures(1))
        assert device.log[-1] == "synchronize", "nothing on the stream reads what the next call writes"
        engine.failing = None
        assert_same(embedder(pictures(1)), expected)


def test_opening_that_fails_closes_the_engine() -> None:
    model, device = small_spec(), RecordingDevice()
    engine = RecordingEngine(model.graphs[0], device, lambda feeds: network(feeds["images"]))
    engine.failing = BackendError("fake: it broke")
    with pytest.raises(BackendError, match="it broke"):
        open_embed_session(model, [engine], DecodeLimits())
    assert engine.closed == 1


def test_closed() -> None:
    embedder, engine = on_device(small_spec())
    embedder.close()
    embedder.close()
    assert engine.closed == 1
    with pytest.raises(BackendError, match="closed; open the engine again"):
        embedder(pictures(1))
    session = embedder.session
    with pytest.raises(BackendError, match="closed; open the engine again"):
        session.embed([session.prepare(pictures(1)[0], name=None)], patches=False)


@pytest.fixture
def collected() -> Iterator[None]:
    gc.collect()
    yield
    gc.collect()


@pytest.mark.usefixtures("collected")
def test_buffers_go_with_the_session() -> None:
    embedder, _ = on_device(small_spec())
    tensors = [weakref.ref(tensor) for tensor in embedder.session._tensors.values()]  # type: ignore[attr-defined]
    with contextlib.closing(embedder):
        embedder(pictures(1))
    del embedder, _
    gc.collect()
    assert [ref() for ref in tensors] == [None] * 3
