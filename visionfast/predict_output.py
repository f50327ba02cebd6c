"""What `visionfast predict` gives out for each image: words, a JSON line, a picture; a bad file harms no other."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
import numpy.typing as npt

from visionfast.artifacts import atomic_write
from visionfast.errors import ArtifactError, ImageError, OptionError
from visionfast.preprocess.decode import DecodeLimits, decode_image

__all__ = ["MANY", "Answer", "json_lines", "report", "write_line"]

MANY = 10
"""Images of a call from which on their progress is shown."""


class Answer(Protocol):
    """One image's answer, whatever the engine's task is.

    Attributes:
        image_hw: the image, pixels.
        stage_ns: nanoseconds of each stage.
    """

    @property
    def image_hw(self) -> tuple[int, int]: ...

    @property
    def stage_ns(self) -> Mapping[str, int]: ...

    def words(self) -> str:
        """What was found, in a few words."""
        ...

    def record(self) -> dict[str, Any]:
        """What was found, for JSON."""
        ...

    def draw(self, image_rgb: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A picture of it, made from the image's (H, W, 3) u8 pixels."""
        ...


def report(
    answers: Iterable[tuple[Path, Answer | ImageError]],
    paths: Sequence[Path],
    *,
    save: Path | None,
    json_to: str | None,
) -> int:
    """Writes each answer as it comes: words on stdout (on stderr when stdout carries the JSON), a line, a picture.

    Args:
        answers: every path's, in order; they are asked for one at a time.
        paths: all of them.
        save: folder for the pictures.
        json_to: file for the JSON lines; `-` is stdout.

    Returns:
        how many files could not be answered.

    Raises:
        ArtifactError: an output cannot be written.
        OptionError: a picture would overwrite its original.
    """
    spoken = sys.stderr if json_to == "-" else sys.stdout
    names = _picture_names(paths) if save is not None else {}
    bad = 0
    with json_lines(json_to) as lines:
        for path, answer in _progress(answers, len(paths)):
            if lines is not None:
                write_line(lines, _record(path, answer), json_to or "")
            if isinstance(answer, ImageError):
                bad += 1
                print(_one_line(f"visionfast: {answer}"), file=sys.stderr)
                continue
            print(_one_line(_sentence(path, answer)), file=spoken)
            if save is not None:
                _save(path, answer, save / names[path])
    if bad and len(paths) > 1:  # of a single file, all is said
        print(f"visionfast: {bad} of {len(paths)} images could not be answered", file=sys.stderr)
    return bad


def _record(path: Path, answer: Answer | ImageError) -> dict[str, Any]:
    """One image's JSON: `file`, then `image_hw`, what was found and `ms` by stage, or `error`."""
    if isinstance(answer, ImageError):
        return {"file": _shown(path), "error": {"kind": answer.kind, "message": _printable(answer.reason)}}
    ms = {stage: round(ns / 1e6, 3) for stage, ns in answer.stage_ns.items()}
    return {"file": _shown(path), "image_hw": list(answer.image_hw), **answer.record(), "ms": ms}


def _sentence(path: Path, answer: Answer) -> str:
    h, w = answer.image_hw
    return f"{_shown(path)}: {w}×{h}: {answer.words()} ({sum(answer.stage_ns.values()) / 1e6:.1f} ms)"


def _one_line(text: str) -> str:
    """A file's name may have line breaks in it, and bytes that are no text."""
    return " ".join(_printable(text).splitlines())


def _shown(path: Path) -> str:
    return _printable(str(path))


def _printable(text: str) -> str:
    """Bytes of a name that are no UTF-8 as `\\xff`: JSON and terminals have nothing else for them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _picture_names(paths: Sequence[Path]) -> dict[Path, str]:
    """`bus.jpg` → `bus.jpg`; files of one name from several folders are numbered, none is overwritten."""
    names: dict[Path, str] = {}
    taken: set[str] = set()
    numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))  # a stem's, counted on
    for path in paths:
        stem = path.stem
        tried = (f"{stem}.jpg" if number == 1 else f"{stem}-{number}.jpg" for number in numbers[stem])
        names[path] = next(name for name in tried if name not in taken)
        taken.add(names[path])
    return names


def _save(path: Path, answer: Answer, target: Path) -> None:
    import cv2

    # Decoded again: keeping every batch's pixels for pictures would slow those who want none.
    pixels = decode_image(path, limits=DecodeLimits(allow_truncated=True))
    drawn = answer.draw(pixels)
    done, encoded = cv2.imencode(".jpg", cv2.cvtColor(drawn, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 92])
    if not done:
        raise ArtifactError(f"{target}: the annotated picture cannot be encoded as JPEG (sides up to 65535 pixels)")
    if target.resolve() == path.resolve():
        raise OptionError(f"--save {target.parent}: the picture would overwrite its original; name another folder")
    atomic_write(target, encoded.tobytes())


@contextlib.contextmanager
def json_lines(target: str | None) -> Iterator[TextIO | None]:
    """stdout, a pipe or a device as it is, or a file that takes its name only when everything was written.

    Raises:
        OptionError: `target` is a folder.
        ArtifactError: it cannot be written.
    """
    if target is None:
        yield None
    elif target == "-":
        yield sys.stdout
    elif not target or Path(target).is_dir():
        raise OptionError(f"--json {target!r}: expected a file to write, or - for stdout")
    elif (path := Path(target)).exists() and not path.is_file():
        try:
            with path.open("w", encoding="utf-8") as file:
                yield file
        except OSError as error:
            raise ArtifactError(f"{target}: cannot be written ({error.strerror})") from error
    else:
        path = path.resolve()  # a link stays one
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        except OSError as error:
            raise ArtifactError(f"{target}: cannot be written ({error.strerror})") from error
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                yield file
            Path(partial).chmod(0o644)
            Path(partial).replace(path)
        except OSError as error:
            raise ArtifactError(f"{target}: cannot be written ({error.strerror})") from error
        finally:
            Path(partial).unlink(missing_ok=True)


def write_line(lines: TextIO, content: dict[str, Any], target: str) -> None:
    """One JSON line into what `json_lines(target)` opened.

    Raises:
        ArtifactError: it cannot be written.
    """
    try:
        lines.write(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")
        if target == "-":
            lines.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ArtifactError(f"{target}: cannot be written ({error.strerror})") from error


def _progress(
    answers: Iterable[tuple[Path, Answer | ImageError]], total: int
) -> Iterable[tuple[Path, Answer | ImageError]]:
    """A bar on stderr for a long run that somebody watches."""
    if total < MANY or not sys.stderr.isatty():
        return answers
    from rich.console import Console
    from rich.progress import track

    return track(answers, "predict", total=total, console=Console(stderr=True), transient=True)
