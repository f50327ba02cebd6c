"""What `visionfast predict` gives out for each image: words, a JSON line, a picture; a bad file harms no other."""

from __future__ import annotations

import contextlib
import errno
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
from visionfast.terminal import one_line

__all__ = ["MANY", "Answer", "check_targets", "json_lines", "report", "write_line"]

MANY = 10
"""Images of a call from which on their progress is shown."""

_OF_A_NAME = frozenset({errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL, errno.EISDIR})
"""What is wrong with one name, not with the disk: too long, no text, of characters that the disk has no room for, a
folder's."""


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
        how many files could not be answered, or not be drawn.

    Raises:
        ArtifactError: an output cannot be written.
        OptionError: of `check_targets`, before anything is asked for.
    """
    check_targets(paths, save=save, json_to=json_to)
    spoken = sys.stderr if json_to == "-" else sys.stdout
    names = _picture_names(paths) if save is not None else {}
    bad = 0
    with json_lines(json_to) as lines:
        for path, answer in _progress(answers, len(paths)):
            if lines is not None:
                write_line(lines, _record(path, answer), json_to or "")
            if isinstance(answer, ImageError):
                bad += 1
                print(one_line(f"visionfast: {answer}"), file=sys.stderr)
                continue
            print(one_line(_sentence(path, answer)), file=spoken)
            if save is not None:
                try:
                    _save(path, answer, save / names[path])
                except ImageError as error:
                    bad += 1
                    print(one_line(f"visionfast: {error}"), file=sys.stderr)
    if bad and len(paths) > 1:  # of a single file, all is said
        print(f"visionfast: {bad} of {len(paths)} images could not be answered", file=sys.stderr)
    return bad


def check_targets(paths: Sequence[Path], *, save: Path | None, json_to: str | None, option: str = "--json") -> None:
    """Holds what a call would write against what it reads, by the files' identities, whatever their names are.

    Raises:
        OptionError: a picture or the JSON would take the place of an image of this call, or of one another; or the
            pictures' folder is a file.
    """
    inputs = _Files(paths)
    if json_to not in (None, "-", "") and (source := inputs.same(Path(os.path.realpath(json_to)))) is not None:
        raise OptionError(
            f"{option} {json_to}: would overwrite {_shown(source)}, an image of this call; name another file"
        )
    if save is None:
        return
    if os.path.exists(save) and not os.path.isdir(save):  # noqa: PTH110, PTH112
        raise OptionError(f"--save {save}: expected a folder, got a file; name another place")
    pictures = {path: save / name for path, name in _picture_names(paths).items()}
    for path, target in pictures.items():
        if (source := inputs.same(target)) is None:
            continue
        if source == path and not os.path.lexists(path):
            continue  # there is no image, so there will be no picture of it
        what = "its original" if source == path else f"{_shown(source)}, an image of this call"
        raise OptionError(f"--save {save}: the picture of {_shown(path)} would overwrite {what}; name another folder")
    if json_to not in (None, "-", "") and _Files(pictures.values()).same(Path(os.path.realpath(json_to))) is not None:
        raise OptionError(f"{option} {json_to}: a picture of --save would overwrite it; name another file")


class _Files:
    """Files that are told by where they are and, of those that exist, by what they are: links lead to one another."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._folders: dict[Path, str] = {}  # as given → without links
        self._known: dict[tuple[object, ...], Path] = {}
        for path in paths:
            for key in self._keys(path):
                self._known.setdefault(key, path)

    def same(self, path: Path) -> Path | None:
        """The one that a path leads to."""
        return next((self._known[key] for key in self._keys(path) if key in self._known), None)

    def _keys(self, path: Path) -> Iterator[tuple[object, ...]]:
        folder = path.parent
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        yield self._folders[folder], path.name
        with contextlib.suppress(OSError, ValueError):
            found = path.stat()
            yield found.st_dev, found.st_ino


def _record(path: Path, answer: Answer | ImageError) -> dict[str, Any]:
    """One image's JSON: `file`, then `image_hw`, what was found and `ms` by stage, or `error`."""
    if isinstance(answer, ImageError):
        return {"file": _shown(path), "error": {"kind": answer.kind, "message": _text(answer.reason)}}
    ms = {stage: round(ns / 1e6, 3) for stage, ns in answer.stage_ns.items()}
    return {"file": _shown(path), "image_hw": list(answer.image_hw), **answer.record(), "ms": ms}


def _sentence(path: Path, answer: Answer) -> str:
    h, w = answer.image_hw
    return f"{path}: {w}×{h}: {answer.words()} ({sum(answer.stage_ns.values()) / 1e6:.1f} ms)"


def _shown(path: Path) -> str:
    return _text(str(path))


def _text(text: str) -> str:
    """Bytes of a name that are no UTF-8 as `\\xff`, for which JSON has nothing else."""
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


class _PictureError(ImageError):
    """The image was answered, and has no picture."""

    kind = "picture"


def _save(path: Path, answer: Answer, target: Path) -> None:
    """Raises `ImageError` for what is wrong with this one picture, `ArtifactError` for what is with all."""
    import cv2

    # Decoded again: keeping every batch's pixels for pictures would slow those who want none.
    pixels = decode_image(path, limits=DecodeLimits(allow_truncated=True))
    if pixels.shape[:2] != answer.image_hw:
        raise _PictureError(str(path), "it is not drawn, for the file changed while it was answered")
    drawn = answer.draw(pixels)
    done, encoded = cv2.imencode(".jpg", cv2.cvtColor(drawn, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 92])
    if not done:
        reason = "the annotated picture cannot be encoded as JPEG (sides up to 65535 pixels)"
        raise _PictureError(str(path), reason)
    if _Files([path]).same(target) is not None:  # the image came after the check
        raise _PictureError(str(path), f"its picture would overwrite it in {target.parent}; name another folder")
    try:
        atomic_write(target, encoded.tobytes())
    except ArtifactError as error:
        cause = error.__cause__
        of_all = not os.path.isdir(target.parent)  # noqa: PTH112 (pathlib's raises where a name is too long)
        if of_all or not isinstance(cause, OSError) or cause.errno not in _OF_A_NAME:
            raise
        reason = f"its picture cannot be called {target.name} ({os.strerror(cause.errno)}); rename the file"
        raise _PictureError(str(path), reason) from error


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
    elif not target or os.path.isdir(target):  # noqa: PTH112 (pathlib's raises where a name is too long)
        raise OptionError(f"--json {target!r}: expected a file to write, or - for stdout")
    elif os.path.exists(target) and not os.path.isfile(target):  # noqa: PTH110, PTH113
        try:
            with Path(target).open("w", encoding="utf-8") as file:
                yield file
        except OSError as error:
            raise ArtifactError(f"{target}: cannot be written ({error.strerror})") from error
    else:
        path = Path(os.path.realpath(target))  # a link stays one
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.lstat()  # a name that is too long is known now, not when all is done
            handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
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
