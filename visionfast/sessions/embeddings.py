"""What stands between an embedder and its engine: images in, vectors out.

`B` images a call of the engine, `D` channels, `h × w` patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from visionfast.sessions import ImageSource
from visionfast.types import Letterbox

__all__ = ["EmbedSession", "Embedded", "Prepared"]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One image, ready for the engine.

    Attributes:
        placed: where it lies in the network's input.
        stage_ns: nanoseconds of `decode` and `preprocess`.
        tensor: the session's own business; on the host (h, w, 3) uint8.
    """

    placed: Letterbox
    stage_ns: Mapping[str, int]
    tensor: Any = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """One image's vectors, which are nobody else's buffers.

    Attributes:
        cls: (D,) float32.
        patches: (h, w, D) float32, or `None` where they were not asked for.
        placed: where the image lies in the network's input.
        stage_ns: nanoseconds of `decode`, `preprocess` and `engine`; a batch's engine time is shared out evenly.
    """

    cls: npt.NDArray[np.float32]
    patches: npt.NDArray[np.float32] | None
    placed: Letterbox
    stage_ns: Mapping[str, int] = field(default_factory=dict, repr=False)


class EmbedSession(Protocol):
    """One engine with what stands before it. Safe for several threads.

    Attributes:
        batch: images that one call of `embed` takes at most.
        streams: calls of `embed` that run at the same time; who comes on top of them waits.
    """

    batch: int
    streams: int

    def prepare(self, source: ImageSource, *, name: str | None) -> Prepared:
        """Decodes an image and brings it to the network's size; as many at once as there are threads.

        Raises:
            ImageError: it is no image, a damaged one, or over the limits.
        """
        ...

    def embed(self, images: Sequence[Prepared], *, patches: bool) -> list[Embedded]:
        """The engine on 1 to `batch` images. An image's vectors do not depend on the others.

        Raises:
            BackendError: the runtime failed, or the session is closed.
        """
        ...

    def close(self) -> None:
        """Waits for those that are inside, and frees the engine; closing twice is harmless."""
        ...
