"""An embedder's engine on a GPU, on one stream.

Images are decoded and cropped by as many threads of the CPU as there are, and go up as bytes, a quarter of what the
engine reads. There a table says what each level is after normalisation, so that the engine reads the host's numbers to
the bit; that and the engine are one CUDA graph where the engine can be captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from time import perf_counter_ns

import numpy as np
import torch

from visionfast.backends import DeviceEngine
from visionfast.errors import BackendError
from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.reference import normalise
from visionfast.sessions import ImageSource
from visionfast.sessions.embeddings import Embedded, Prepared, Streams, embedded, prepared
from visionfast.stream import Turns
from visionfast.types import ModelSpec, PreprocessSpec

__all__ = ["CudaEmbedSession"]

_LEVELS = 256


class CudaEmbedSession:
    """See `visionfast.sessions.embeddings.EmbedSession`.

    Two calls of `embed` are in at a time: one puts its images into page-locked memory, and takes its vectors out of
    it, while the other has the device.

    Args:
        spec: of the model.
        engine: of its graph, with `NCHW` images; closed with the session.
        limits: what an image may claim.
        graph: replay one CUDA graph (`True`), or launch each part (`False`); `None`: a graph where the engine can be
            captured. The answers are the same to the bit.

    Raises:
        BackendError: the runtime failed, or `graph=True` and the engine cannot be captured. The engine is closed.
    """

    streams = 2

    def __init__(
        self, spec: ModelSpec, engine: DeviceEngine, *, limits: DecodeLimits, graph: bool | None = None
    ) -> None:
        self._engine = engine
        self._device = device = engine.device
        self._limits = limits
        self._turns = Turns(device)
        self._streams: Streams[_Transfer] = Streams([])
        self._closed = False
        (image,) = engine.inputs  # (B, 3, h, w)
        self.batch = image.shape[0]
        try:
            self._preprocessor = CropPreprocessor(spec.preprocess)
            shape = (self.batch, *spec.preprocess.size_hw, 3)
            with self._turns.take():
                self._tensors = {t.name: device.empty(t.shape, t.dtype) for t in (*engine.inputs, *engine.outputs)}
                self._input = self._tensors[image.name].view(-1)
                self._pixels = device.empty(shape, "uint8").zero_()
                self._index = device.empty(image.shape, "int32")
                self._levels, self._channel = _table(spec.preprocess, image.dtype, device.where)
                engine.bind(self._tensors)
                self._streams = Streams([_Transfer(engine, shape) for _ in range(self.streams)])
                # Once as it is: libraries set up what they set up once.
                self._work()
                device.synchronize()
                self._run = self._replayable(graph)
        except BaseException:
            self.close()
            raise

    def prepare(self, source: ImageSource, *, name: str | None) -> Prepared:
        """As `EmbedSession.prepare`."""
        return prepared(source, self._preprocessor, limits=self._limits, name=name)

    def embed(self, images: Sequence[Prepared], *, patches: bool) -> list[Embedded]:
        """As `EmbedSession.embed`."""
        with self._streams.take() as transfer:
            started = perf_counter_ns()
            pixels = transfer.pixels.numpy()
            for slot, image in zip(pixels, images, strict=False):
                slot[...] = image.tensor
            with self._turns.take():
                self._device.copy(transfer.pixels, self._pixels)
                self._run()
                for name in ("cls", "patches") if patches else ("cls",):
                    self._device.copy(self._tensors[name], transfer.output(name))
                self._device.synchronize()
            engine_ns = perf_counter_ns() - started
            cls = transfer.output("cls").numpy()
            dense = transfer.output("patches").numpy() if patches else None
            return embedded(images, cls, dense, engine_ns)

    def close(self) -> None:
        """As `EmbedSession.close`."""
        self._streams.close()
        with self._turns.take():
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(Exception):
                self._device.synchronize()
            # The graph holds the buffers' addresses, the engine its own memory: both go before the buffers.
            self._run = self._work
            self._engine.close()
            self._tensors = {}

    def _work(self) -> None:
        """From pixels to vectors, put on the stream; nothing is allocated."""
        torch.add(self._pixels.permute(0, 3, 1, 2), self._channel, out=self._index)  # (B, 3, h, w)
        torch.index_select(self._levels, 0, self._index.view(-1), out=self._input)
        self._engine.enqueue()

    def _replayable(self, graph: bool | None) -> Callable[[], None]:
        if graph is False:
            return self._work
        if not self._engine.can_be_captured():
            if graph:
                raise BackendError("graph: this engine's runs cannot be captured in a CUDA graph; leave the graph off")
            return self._work
        return self._device.capture(self._work)


class _Transfer:
    """Page-locked memory of one call: pixels (B, h, w, 3) u8 up, vectors down, patches once they are asked for,
    hundreds of times as many."""

    def __init__(self, engine: DeviceEngine, shape: tuple[int, ...]) -> None:
        self._device = engine.device
        self._specs = {spec.name: spec for spec in engine.outputs}
        self._outputs: dict[str, torch.Tensor] = {}
        self.pixels = self._device.pinned(shape, "uint8")
        self.output("cls")

    def output(self, name: str) -> torch.Tensor:
        if name not in self._outputs:
            spec = self._specs[name]
            self._outputs[name] = self._device.pinned(spec.shape, spec.dtype)
        return self._outputs[name]


def _table(spec: PreprocessSpec, dtype: str, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Every level after normalisation (768,), channel by channel, and where each channel begins (3, 1, 1)."""
    levels = np.repeat(np.arange(_LEVELS, dtype=np.uint8), 3).reshape(1, _LEVELS, 3)
    table = torch.from_numpy(normalise(levels, spec, np.dtype(dtype)).reshape(-1))
    channel = torch.arange(0, 3 * _LEVELS, _LEVELS, dtype=torch.int32).view(3, 1, 1)
    return table.to(where), channel.to(where)
