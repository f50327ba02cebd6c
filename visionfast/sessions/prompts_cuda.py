"""A prompt segmenter's two engines on a GPU, on one stream.

What the engines read and write lies where it was allocated when the session opened, but for what callers keep: the
decoder reads an image's features where they are and writes its logits into the answer's own memory, so that a click
moves nothing on the device but its points. The decoder is launched, and not replayed from a CUDA graph: a graph is of
one execution context in one state, and the decoder's changes its sizes from call to call.
"""

from __future__ import annotations

import contextlib
import threading
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt
import torch

from visionfast.backends import DeviceEngine
from visionfast.errors import BackendError, IncompatibleEngineError, ShapeError
from visionfast.postprocess.device_masks import DeviceDecoded, DeviceMasks
from visionfast.preprocess.antialias import geometry
from visionfast.preprocess.cpu_antialias import AntialiasPreprocessor
from visionfast.sessions.prompts import Features
from visionfast.stream import Turns, Upload
from visionfast.types import ModelSpec, PromptTensors

__all__ = ["CudaPromptSession"]


class CudaPromptSession:
    """See `visionfast.sessions.prompts.PromptSession`.

    An image is prepared on the CPU while other threads' prompts are answered; the GPU is one thread's at a time. A
    call waits for the device once, or once for every `prompts` prompts.

    Args:
        spec: of the model.
        encoder, decoder: its two graphs, loaded on one device; closed with the session.

    Raises:
        BackendError: the runtime failed, or the two are not of one model. Both engines are closed.
    """

    def __init__(self, spec: ModelSpec, encoder: DeviceEngine, decoder: DeviceEngine) -> None:
        self._engines: tuple[DeviceEngine, ...] = (encoder, decoder)
        self._device = encoder.device
        self._turns = Turns(encoder.device)
        self._preparing = threading.Lock()
        self._parts: tuple[_Encoder, _Decoder] | None = None
        try:
            assert decoder.device is encoder.device  # whoever opens a session loads both on one
            self._features = _shared(spec, encoder, decoder)
            self.prompts, self.points = decoder.inputs[-3].shape  # of the labels
            masks = decoder.outputs[0]
            _, _, plane_h, plane_w = masks.shape  # (P, C, h, w)
            with self._device.current():
                self._parts = _Encoder(spec, encoder), _Decoder(decoder)
            self._reader = DeviceMasks(
                self._turns, plane_hw=(plane_h, plane_w), dtype=masks.dtype, resize=spec.preprocess.resize
            )
            self._warm_up(spec)
        except BaseException:
            self.close()
            raise

    def encode(self, pixels: npt.NDArray[np.uint8], stage_ns: dict[str, int] | None = None) -> Features:
        """As `PromptSession.encode`."""
        with self._preparing:
            encoder, _ = self._open_parts()
            started = perf_counter_ns()
            encoder.prepare(pixels)
            prepared = perf_counter_ns()
            with self._turns.take():
                features = encoder.enqueue()
                self._device.synchronize()
        if stage_ns is not None:
            stage_ns["preprocess"] = prepared - started
            stage_ns["encoder"] = perf_counter_ns() - prepared
        return features

    def decode(self, features: Features, prompts: PromptTensors) -> DeviceDecoded:
        """As `PromptSession.decode`.

        Raises:
            ShapeError: the features are another model's or elsewhere, or a prompt has more than `points` points.
        """
        self._check(features, prompts)
        with self._turns.take():
            _, decoder = self._open_parts()
            logits, scores = decoder.answer(len(prompts))
            for first in range(0, len(prompts), self.prompts):
                some = slice(first, first + self.prompts)
                on_host = decoder.enqueue(features, prompts, some, logits[some])
                self._device.synchronize()
                scores[some] = on_host.numpy()
        return DeviceDecoded(logits, scores, self._reader)

    def close(self) -> None:
        """As `PromptSession.close`. Answers that callers have can still be read."""
        with self._preparing, self._turns.take(), contextlib.ExitStack() as closing:
            with contextlib.suppress(Exception):
                self._device.synchronize()
            for engine in self._engines:
                closing.callback(engine.close)  # both, whatever the first one says
            self._engines = ()
            self._parts = None

    def _open_parts(self) -> tuple[_Encoder, _Decoder]:
        if self._parts is None:
            raise BackendError("session: it is closed; open the engine again")
        return self._parts

    def _warm_up(self, spec: ModelSpec) -> None:
        """One click on an image of one pixel: kernels are compiled now, and libraries set up what they set up once."""
        usual = spec.graphs[-1].usual
        prompts, points = usual.get("prompts", 1), usual.get("points", 1)
        click = PromptTensors(np.zeros((prompts, points, 2), np.float32), np.zeros((prompts, points), np.float32))
        decoded = self.decode(self.encode(np.zeros((1, 1, 3), np.uint8)), click)
        first, placed = np.zeros(1, np.int64), geometry((1, 1), spec.preprocess)
        decoded.masks(first, placed)
        for where in (placed, None):
            decoded.stability(first, 0.0, where)

    def _check(self, features: Features, prompts: PromptTensors) -> None:
        """An engine takes any address, and what is not the device's to read ends its context."""
        if features.keys() != self._features:
            expected = ", ".join(sorted(self._features))
            raise ShapeError(f"features: expected {expected}, got {', '.join(features) or 'none'}; encode the image")
        for name, tensor in features.items():
            where = tensor.device if isinstance(tensor, torch.Tensor) else "the host"
            if where != self._device.where:
                raise ShapeError(f"{name}: expected a tensor on {self._device.where}, got one on {where}")
        if (points := prompts.labels.shape[1]) > self.points:
            raise ShapeError(f"points: expected at most {self.points} with padding and box corners, got {points}")


class _Encoder:
    """The encoder with its buffers."""

    def __init__(self, spec: ModelSpec, engine: DeviceEngine) -> None:
        self._engine = engine
        self._device = device = engine.device
        (image,) = engine.inputs  # (1, 3, h, w)
        self._preprocessor = AntialiasPreprocessor(spec.preprocess)
        self._image = device.pinned(image.shape, image.dtype)
        tensors = {t.name: device.empty(t.shape, t.dtype) for t in (image, *engine.outputs)}
        engine.bind(tensors)
        self._image_on_device = tensors.pop(image.name)
        self._live = tensors

    def prepare(self, pixels: npt.NDArray[np.uint8]) -> None:
        """On the host, once the stream has passed the image before."""
        self._preprocessor.write(pixels, self._image.numpy())

    def enqueue(self) -> dict[str, torch.Tensor]:
        """The features of the image that was prepared, in memory of their own."""
        device = self._device
        device.copy(self._image, self._image_on_device)
        self._engine.enqueue()
        features = {spec.name: device.empty(spec.shape, spec.dtype) for spec in self._engine.outputs}
        for name, tensor in features.items():
            device.copy(self._live[name], tensor)
        return features


class _Decoder:
    """The decoder with its buffers; each run binds as much of them as its sizes need."""

    def __init__(self, engine: DeviceEngine) -> None:
        self._engine = engine
        self._device = device = engine.device
        *features, self._points, self._labels, self._mask_input, self._has_mask = engine.inputs
        self._features = tuple(spec.name for spec in features)
        self._masks, self._scores = engine.outputs  # (P, C, h, w), (P, C)
        prompts, points = self._labels.shape
        self._points_up = Upload(device, self._points.dtype, prompts * points * 2)
        self._labels_up = Upload(device, self._labels.dtype, prompts * points)
        self._masks_up = Upload(device, self._mask_input.dtype)  # few ever give one
        # What counts for nothing is read all the same, and must be finite.
        self._no_mask = device.empty(self._mask_input.shape, self._mask_input.dtype).zero_()
        self._flags = [
            device.empty(self._has_mask.shape, self._has_mask.dtype).fill_(value)  # (P,), for none and for all
            for value in (0, 1)
        ]
        self._scores_on_device = device.empty(self._scores.shape, self._scores.dtype)
        self._scores_on_host = device.pinned(self._scores.shape, self._scores.dtype)

    def answer(self, prompts: int) -> tuple[torch.Tensor, npt.NDArray[np.float32]]:
        """Memory for the logits of so many prompts, on the device, and for their scores, on the host."""
        logits = self._device.empty((prompts, *self._masks.shape[1:]), self._masks.dtype)
        return logits, np.empty((prompts, *self._scores.shape[1:]), np.float32)

    def enqueue(self, features: Features, prompts: PromptTensors, some: slice, logits: torch.Tensor) -> torch.Tensor:
        """Some of the prompts, into `logits`; gives where their scores are once the device was synchronised."""
        n, given = len(logits), prompts.mask_input
        tensors: dict[str, torch.Tensor] = {name: features[name] for name in self._features}
        tensors[self._points.name] = self._points_up.write(prompts.points[some])
        tensors[self._labels.name] = self._labels_up.write(prompts.labels[some])
        tensors[self._mask_input.name] = self._no_mask[:n] if given is None else self._masks_up.write(given[some])
        tensors[self._has_mask.name] = self._flags[given is not None][:n]
        tensors[self._masks.name] = logits
        tensors[self._scores.name] = self._scores_on_device[:n]
        self._engine.bind(tensors)
        self._engine.enqueue()
        self._device.copy(self._scores_on_device[:n], self._scores_on_host[:n])
        return self._scores_on_host[:n]


def _shared(spec: ModelSpec, encoder: DeviceEngine, decoder: DeviceEngine) -> set[str]:
    """The names of the tensors that the encoder writes and the decoder reads."""
    written, read = (
        {tensor.name: f"{tensor.name} {tensor.shown} {tensor.dtype}" for tensor in tensors}
        for tensors in (encoder.outputs, decoder.inputs[:-4])
    )
    if written != read:
        raise IncompatibleEngineError(
            f"{spec.name}: expected an encoder that writes {', '.join(read.values())}, as the decoder reads, got "
            f"{', '.join(written.values())}; build the engine again"
        )
    return set(read)
