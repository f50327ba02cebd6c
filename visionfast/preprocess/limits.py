"""What an image may cost."""

from __future__ import annotations

from dataclasses import dataclass

from visionfast.errors import ImageFormatError, ImageTooLargeError

__all__ = ["DecodeLimits"]


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What an image may cost, decided before it is paid.

    Attributes:
        max_pixels: that the header may claim. The default, 100 million, is a 300 MB array: above any camera's
            picture in use today, and small beside a serving machine's memory.
        max_bytes: of the encoded file; a larger one is not read. The default is 256 MiB.
        allow_truncated: decode a damaged or incomplete file as far as it goes, the rest grey (JPEG)
            or black, instead of raising `ImageTruncatedError`. WebP, AVIF and JPEG 2000 still raise:
            their decoders give all or nothing.
    """

    max_pixels: int = 100_000_000
    max_bytes: int = 256 * 1024 * 1024
    allow_truncated: bool = False

    def check_bytes(self, n_bytes: int, name: str) -> None:
        """Raises `ImageTooLargeError` for a file over `max_bytes`."""
        if n_bytes > self.max_bytes:
            raise ImageTooLargeError(
                name,
                f"expected at most {self.max_bytes} bytes, got {n_bytes}; "
                "shrink the file, or in Python raise DecodeLimits.max_bytes",
            )

    def check_pixels(self, image_hw: tuple[int, int], name: str) -> None:
        """Raises `ImageTooLargeError` over `max_pixels`, `ImageFormatError` for no pixel at all."""
        height, width = image_hw
        if height < 1 or width < 1:
            raise ImageFormatError(name, f"expected an image of at least 1×1 pixels, got {width}×{height}")
        if height * width > self.max_pixels:
            raise ImageTooLargeError(
                name,
                f"expected at most {self.max_pixels} pixels, got {width}×{height} = {width * height}; "
                "shrink the image, or in Python raise DecodeLimits.max_pixels",
            )
