"""Matrix products on the calling thread alone.

OpenBLAS, which NumPy multiplies with, shares a large product out among threads of its own. They spin while they wait
for one another, and for a thirtieth of a second after the last one, in case there is more to do: whatever runs next has
that processor only in part. On two processors an engine that was called after the masks of the image before took 100 ms
instead of 50 (YOLOv8n-seg), and a resize beside other work 4.3 s instead of 0.35.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["product"]

_ONE_THREAD = 1 << 18  # multiplications: OpenBLAS computes a product of no more on the calling thread


def product(a: npt.NDArray[Any], b: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """`out = a @ b`, (m, k) and (k, n), in pieces that the BLAS does not share out to threads of its own.

    Where `m` or `n` is 1 NumPy asks for a product with a vector, of which the BLAS shares out far smaller ones.
    """
    (m, k), n = a.shape, b.shape[1]
    if m > n:
        piece = max(1, _ONE_THREAD // max(1, k * n))
        for i in range(0, m, piece):
            np.matmul(a[i : i + piece], b, out=out[i : i + piece])
    else:
        piece = max(1, _ONE_THREAD // max(1, k * m))
        for i in range(0, n, piece):
            np.matmul(a, b[:, i : i + piece], out=out[:, i : i + piece])
