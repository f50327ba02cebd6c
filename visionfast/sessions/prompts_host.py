"""A prompt segmenter's two engines on the host."""

from __future__ import annotations

import threading
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import BackendError
from visionfast.postprocess.decoded import HostDecoded
from visionfast.preprocess.cpu_antialias import AntialiasPreprocessor
from visionfast.sessions.prompts import Features
from visionfast.types import ModelSpec, PromptTensors, Runner

__all__ = ["HostPromptSession"]


_OUTPUTS = ("masks", "scores")


class HostPromptSession:
    """See `visionfast.sessions.prompts.PromptSession`.

    Args:
        spec: of the model.
        encoder, decoder: runners of its two graphs; closed with the session.
    """

    prompts = 1
    """A CPU computes several prompts together no faster than one by one: vit_b's decoder took 34 ms for one and 41 ms
    for each of 64 (2 cores, OpenVINO 2026.4)."""

    def __init__(self, spec: ModelSpec, encoder: Runner, decoder: Runner) -> None:
        self._encoder, self._decoder = encoder, decoder
        self._preprocessor = AntialiasPreprocessor(spec.preprocess)
        self._resize = spec.preprocess.resize
        self._image = np.zeros(encoder.inputs[0].shape, encoder.inputs[0].dtype)  # (1, 3, h, w)
        points, _labels, mask_input, _has_mask = decoder.inputs[-4:]
        self.points = points.shape[1]
        self._no_mask = np.zeros((1, *mask_input.shape[1:]), mask_input.dtype)
        self._encoding, self._decoding = threading.Lock(), threading.Lock()
        self._closed = False

    def encode(self, pixels: npt.NDArray[np.uint8], stage_ns: dict[str, int] | None = None) -> Features:
        """As `PromptSession.encode`."""
        came, waits = perf_counter_ns(), self._encoding.locked()
        with self._encoding:
            self._check_open()
            started = perf_counter_ns()
            self._preprocessor.write(pixels, self._image)
            prepared = perf_counter_ns()
            features = self._encoder.infer({self._encoder.inputs[0].name: self._image})
        if stage_ns is not None:
            if waits:
                stage_ns["turn"] = started - came
            stage_ns["preprocess"] = prepared - started
            stage_ns["encoder"] = perf_counter_ns() - prepared
        return features

    def decode(self, features: Features, prompts: PromptTensors) -> HostDecoded:
        """As `PromptSession.decode`."""
        outputs = [self._decoded(features, prompts, i) for i in range(len(prompts))]
        # An FP16 graph's are float16.
        masks, scores = (np.concatenate([o[n] for o in outputs]).astype(np.float32, copy=False) for n in _OUTPUTS)
        return HostDecoded(masks, scores, self._resize)

    def _decoded(self, features: Features, prompts: PromptTensors, i: int) -> dict[str, npt.NDArray[Any]]:
        one = np.s_[i : i + 1]
        mask = prompts.mask_input
        feeds = {
            **features,
            "points": prompts.points[one],
            "labels": prompts.labels[one],
            "mask_input": self._no_mask if mask is None else mask[one],
            "has_mask": np.full(1, mask is not None, np.float32),
        }
        with self._decoding:
            self._check_open()
            return self._decoder.infer(feeds)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("session: it is closed; open the engine again")

    def close(self) -> None:
        with self._encoding, self._decoding:
            self._closed = True
            self._encoder.close()
            self._decoder.close()
