"""What `DaliPreprocessor.run` hands out for a batch of images."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from visionfast.errors import ImageError
from visionfast.types import Letterbox

__all__ = ["CpuDecode", "DaliBatch", "DaliRow", "DaliRun"]


@dataclass(frozen=True, slots=True, eq=False)
class DaliRun:
    """What one run of the graph made.

    Attributes:
        tensor: DALI's own, (n, h, w, 3) uint8 or (n, 3, h, w) float; `torch.from_dlpack(tensor)`, or on the CPU
            `numpy.from_dlpack(tensor)`, views it without a copy.
        indices: for each of its n rows, which image it was made from. Only a row that an answer names is an input.
    """

    tensor: Any
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DaliRow:
    """Image `index`'s input: row `row` of `run.tensor`, and where the image lies in it."""

    index: int
    run: DaliRun
    row: int
    letterbox: Letterbox


@dataclass(frozen=True, slots=True)
class CpuDecode:
    """Image `index` is not for DALI, or DALI refused it: `decode_image` decodes it, or says what is wrong."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class DaliBatch:
    """A batch's answers, in the order of its images.

    Attributes:
        answers: for each image its input, that it must be decoded on the CPU, or what is wrong with it.
        runs: what the rows lie in; a single one unless an image failed or there were more than `batch`.
    """

    answers: tuple[DaliRow | CpuDecode | ImageError, ...]
    runs: tuple[DaliRun, ...]
    _checks: Mapping[int, Future[ImageError | None]] = field(repr=False)

    def damage(self) -> dict[int, ImageError]:
        """The images, by index, whose rows must not be answered: they are damaged where DALI does not look.

        The check runs on CPU threads since the batch was begun, and is waited for here: ask when the engine's
        work is enqueued, before answers are given out. Always empty for a preprocessor without `check_scans`.
        """
        rows = [answer.index for answer in self.answers if isinstance(answer, DaliRow)]
        found = {index: self._checks[index].result() for index in rows if index in self._checks}
        return {index: error for index, error in found.items() if error is not None}
