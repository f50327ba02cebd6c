"""A runner that answers what it is told to, for testing what stands around a runner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.backends import GraphRunner, check_feeds
from visionfast.types import GraphSpec

__all__ = ["FakeRunner"]


class FakeRunner(GraphRunner):
    """Answers `answer(feeds)`, or zeros, and counts its calls.

    With `copy=False` it hands out the same buffers every time and overwrites them at the next call, as real
    runtimes do, so that a caller who keeps them is found out.
    """

    def __init__(
        self,
        graph: GraphSpec,
        answer: Callable[[Mapping[str, npt.NDArray[Any]]], Mapping[str, npt.NDArray[Any]]] | None = None,
    ) -> None:
        super().__init__(graph)
        self._answer = answer
        self._buffers = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in graph.outputs}
        self.calls = 0
        self.closed = False

    def infer(self, feeds: Mapping[str, npt.NDArray[Any]], *, copy: bool = True) -> dict[str, npt.NDArray[Any]]:
        sizes = check_feeds(self.inputs, feeds)
        self.calls += 1
        answer = self._answer(feeds) if self._answer else {}
        outputs = {}
        for spec in self.outputs:
            shape = spec.sized(sizes)
            buffer = self._buffers[spec.name].reshape(-1)[: math.prod(shape)].reshape(shape)
            buffer[...] = np.asarray(answer.get(spec.name, 0), spec.dtype)
            outputs[spec.name] = buffer.copy() if copy else buffer
        return outputs

    def close(self) -> None:
        self.closed = True
