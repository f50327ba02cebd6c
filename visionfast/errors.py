"""The exceptions that visionfast raises on purpose.

Every message is one line: what it is about, what was expected, what came, and what to do about it.

::

    VisionfastError
    ├── InputError                 what the caller handed over
    │   ├── ImageError             one image cannot be used; the rest of its batch is unharmed
    │   │   ├── ImageNotFoundError     no such file, or not a readable one
    │   │   ├── ImageFormatError       not an image, or a kind that is not decoded here
    │   │   ├── ImageTruncatedError    the file ends early or is damaged inside
    │   │   └── ImageTooLargeError     its header claims more pixels or bytes than is allowed
    │   ├── ShapeError             a tensor's name, shape or dtype is not what was declared
    │   └── OptionError            an option, name or combination that does not exist
    ├── CheckpointError            a weights file that cannot be used
    │   ├── UnsafeCheckpointError      it asks the unpickler for something outside the allow-list
    │   └── UnsupportedModelError      it is intact, but of a family or task that is not handled
    ├── ArtifactError              something in models/, engines/ or pipelines/ is missing or damaged
    │   └── ManifestError              engine.json cannot be read or does not describe its files
    ├── BackendError               a runtime
    │   ├── BackendUnavailableError    its package or its device is not on this machine
    │   ├── IncompatibleEngineError    the engine was made for another backend, device or version
    │   └── SessionBusyError           two threads asked one session at the same time
    ├── BuildError                 the compiler refused the graph, or the result could not be written
    ├── CertificateError           the engine and PyTorch do not agree
    ├── FetchError                 a published file could not be had, or is not the one it should be
    └── ServerError                a server is not there, does not start, or does not answer as it should
        ├── QueueFullError             too many requests wait already; this one was refused at once
        ├── DeadlineError              the answer was not there in the time that it was given
        └── ImageNotKeptError          a request named an image by its key, and the server does not have it
"""

from __future__ import annotations

__all__ = [
    "ArtifactError",
    "BackendError",
    "BackendUnavailableError",
    "BuildError",
    "CertificateError",
    "CheckpointError",
    "DeadlineError",
    "FetchError",
    "ImageError",
    "ImageFormatError",
    "ImageNotFoundError",
    "ImageNotKeptError",
    "ImageTooLargeError",
    "ImageTruncatedError",
    "IncompatibleEngineError",
    "InputError",
    "ManifestError",
    "OptionError",
    "QueueFullError",
    "ServerError",
    "SessionBusyError",
    "ShapeError",
    "UnsafeCheckpointError",
    "UnsupportedModelError",
    "VisionfastError",
]


class VisionfastError(Exception):
    """Base of everything that visionfast raises on purpose. `str()` of it is one line."""


class InputError(VisionfastError):
    """What the caller handed over cannot be used."""


class ImageError(InputError):
    """One image cannot be used.

    Attributes:
        source: what the caller called the image: its path, or `"bytes"` / `"array"` (with an index where
            there are several).
        reason: the message without the source in front.
        kind: a stable word for this sort of fault, used in JSON output and metrics.
    """

    kind = "image"

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source}: {reason}")
        self.source = source
        self.reason = reason

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        return type(self), (self.source, self.reason)


class ImageNotFoundError(ImageError):
    """There is no such file, or it cannot be read."""

    kind = "not-found"


class ImageFormatError(ImageError):
    """The bytes are not an image, or one of a kind that is not decoded here."""

    kind = "format"


class ImageTruncatedError(ImageError):
    """The file ends early or is damaged inside."""

    kind = "truncated"


class ImageTooLargeError(ImageError):
    """The header claims more pixels, or the file has more bytes, than is allowed."""

    kind = "too-large"


class ShapeError(InputError):
    """A tensor's name, shape or dtype is not what was declared."""


class OptionError(InputError):
    """An option, a name or a combination of them that does not exist."""


class CheckpointError(VisionfastError):
    """A weights file that cannot be used."""


class UnsafeCheckpointError(CheckpointError):
    """The file asks the unpickler for something outside the allow-list; nothing of it was run."""


class UnsupportedModelError(CheckpointError):
    """The file is intact, but of a family or a task that is not handled."""


class ArtifactError(VisionfastError):
    """Something in models/, engines/ or pipelines/ is missing or damaged."""


class ManifestError(ArtifactError):
    """engine.json cannot be read, or does not describe the files beside it."""


class BackendError(VisionfastError):
    """A runtime failed."""


class BackendUnavailableError(BackendError):
    """The runtime's package or its device is not on this machine."""


class IncompatibleEngineError(BackendError):
    """The engine was made for another backend, device or version."""


class SessionBusyError(BackendError):
    """Two threads asked one session at the same time; each needs a session of its own."""


class BuildError(VisionfastError):
    """The compiler refused the graph, or the result could not be written."""


class CertificateError(VisionfastError):
    """The engine and PyTorch do not agree within the tolerances."""


class FetchError(VisionfastError):
    """A published file could not be had, or is not the one that it should be."""


class ServerError(VisionfastError):
    """A server is not there, does not start, does not know the model, or does not answer as visionfast's do."""


class QueueFullError(ServerError):
    """Too many requests wait already: this one was refused at once, and nothing was computed for it."""


class DeadlineError(ServerError):
    """The answer was not there in the time that the request was given."""


class ImageNotKeptError(ServerError):
    """A request named an image by its key alone, and the server does not have it, or not any more: send it."""
