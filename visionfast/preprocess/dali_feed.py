"""One image in the form in which it may be decoded beside strangers': what DALI gets where its failure is everybody's.

In a session a run of DALI that fails is done again image by image. In a server's pipeline nobody does that, so what
reaches DALI here is what it is known to decode:

- an ordinary JPEG without its metadata (`dali_admission.admit`), after libjpeg-turbo has read all of its coefficients
  without a warning: half of a decode's time on the CPU, and the only way to know;
- every other image that can be decoded, decoded and letterboxed on the CPU, and handed over as those pixels in a PPM of
  exactly the network's size: there DALI resizes nothing, so what it makes is the definition's to the bit, and never
  large;
- a PPM of one pixel in the place of an image that cannot be.

Behind each stand zeros up to the length of the longest in its batch, and its trailer (`dali_graph.trailer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.preprocess.dali_admission import admit
from visionfast.preprocess.dali_graph import trailer
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.reference import letterbox_geometry
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["PLACEHOLDER", "TICKET", "DaliFeed", "feed_of", "packed", "ticket_of"]

TICKET = 7
"""Numbers that say what a row of DALI's answer must have been made from."""


@dataclass(frozen=True, slots=True)
class DaliFeed:
    """What DALI gets for an image.

    Attributes:
        encoded: a JPEG or a PPM.
        image_hw: of the image as it was sent, upright, pixels; 0 × 0: there is none.
        told: where DALI is to put what it decodes.
    """

    encoded: bytes
    image_hw: tuple[int, int]
    told: Letterbox


def _ppm(pixels: npt.NDArray[np.uint8]) -> bytes:
    height, width, _ = pixels.shape
    return b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()


PLACEHOLDER = DaliFeed(_ppm(np.zeros((1, 1, 3), np.uint8)), (0, 0), Letterbox((1, 1), (1, 1), (1, 1), 0, 0, 1.0))
"""For an image that cannot be decoded."""


def feed_of(data: bytes, spec: PreprocessSpec, *, limits: DecodeLimits, name: str) -> DaliFeed:
    """The form in which an encoded image goes to DALI, for a letterbox.

    Raises:
        ImageError: it cannot be used: what `decode_image` raises for it.
    """
    admission = admit(data, limits=limits, name=name)
    if not isinstance(admission, str) and _is_sound_jpeg(admission.encoded):
        return DaliFeed(admission.encoded, admission.image_hw, letterbox_geometry(admission.image_hw, spec.size_hw))
    canvas = np.empty((*spec.size_hw, 3), np.uint8)
    placed = CpuPreprocessor(spec).write(decode_image(data, limits=limits, name=name), canvas)
    return DaliFeed(_ppm(canvas), placed.image_hw, letterbox_geometry(spec.size_hw, spec.size_hw))


def _is_sound_jpeg(encoded: bytes) -> bool:
    """Whether libjpeg-turbo reads every coefficient without a word; it makes hardly a pixel of them."""
    if not encoded.startswith(b"\xff\xd8"):
        return False  # a PNG: DALI would decode it on the CPU, too
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(encoded, "GRAY", min_height=1, min_width=1, strict=True)
    except ValueError:
        return False
    return True


def ticket_of(feed: DaliFeed, serial: int) -> npt.NDArray[np.int32]:
    """(7,) int32: the trailer that goes in, and comes out again, and the `(H, W)` that DALI must have seen."""
    return np.concatenate((trailer(serial, feed.told), np.array(feed.told.image_hw, np.int32)))


def packed(feeds: Sequence[DaliFeed], tickets: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """(B, n) uint8: B images as the graph `input_pipeline(..., with_trailer=True)` takes them.

    Args:
        feeds: at least one.
        tickets: (B, 7), of `ticket_of`.
    """
    trailers = tickets[:, :5].astype("<i4").view(np.uint8)  # (B, 20)
    longest = max(len(feed.encoded) for feed in feeds)
    rows = np.zeros((len(feeds), longest + trailers.shape[1]), np.uint8)
    for row, feed in zip(rows, feeds, strict=True):
        row[: len(feed.encoded)] = np.frombuffer(feed.encoded, np.uint8)
    rows[:, longest:] = trailers
    return rows
