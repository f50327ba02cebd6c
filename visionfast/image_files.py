"""The image files under a folder, known by their suffixes. Paths are bytes here: a file's name need not be text."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from visionfast.errors import OptionError
from visionfast.terminal import one_line

__all__ = [
    "IMAGE_SUFFIXES",
    "ImageFile",
    "count_deeper",
    "image_files",
    "name_bytes",
    "printable",
    "same_file",
    "shown_name",
]

IMAGE_SUFFIXES = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".png",
        ".webp",
        ".bmp",
        ".dib",
        ".tif",
        ".tiff",
        ".gif",
        ".ppm",
        ".pgm",
        ".pbm",
        ".jp2",
        ".avif",
    ]
)
"""Looked for in a folder, in lower case; a file that is named by itself is tried whatever it is called."""

_SUFFIXES = frozenset(suffix.encode() for suffix in IMAGE_SUFFIXES)
_ESCAPED = re.compile(r"\\x[89a-f][0-9a-f]")
_INT64_MAX = 2**63 - 1


class ImageFile(NamedTuple):
    """A file as its folder shows it.

    Attributes:
        path: below the folder that was listed, with `/` between.
        n_bytes: its size.
        modified_ns: when it was last written, nanoseconds since 1970.
    """

    path: bytes
    n_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: bytes, found: os.stat_result) -> ImageFile:
        # A file system may know times that int64 does not, which ends in 2262.
        return cls(path, found.st_size, max(-_INT64_MAX, min(found.st_mtime_ns, _INT64_MAX)))


def image_files(
    folder: str | os.PathLike[str], *, unread: Callable[[bytes, str], None] | None = None
) -> Iterator[ImageFile]:
    """Everything below a folder that is called like an image and is no folder, as the disk gives it, in no order.

    Links to files are followed, links to folders are not. A pipe, or a link to nothing, is listed too: whoever reads
    it says what is wrong with it. Nothing is held but one open folder a level.

    Args:
        folder: to look in.
        unread: is told each folder below it that cannot be read, as `ImageFile.path` without a `/` at its end, and
            why; the others are listed then.

    Raises:
        OptionError: it is no folder, or cannot be read; or one below it where `unread` is not given.
    """
    root = os.fsencode(folder)
    try:
        yield from _below(root, unread)
    except NotADirectoryError:
        raise OptionError(f"{os.fspath(folder)}: expected a folder with images, got a file") from None
    except OSError as error:
        where = error.filename or root
        name = printable(where if isinstance(where, bytes) else os.fsencode(str(where)))
        raise OptionError(f"{name}: cannot be read ({error.strerror})") from error


def count_deeper(folder: str | os.PathLike[str]) -> int:
    """Images in the folders below a folder, those in itself not among them; as `**` looks, not in hidden ones.

    Of the first thousand folders, and what cannot be read does not count: it is for a word to whoever expected them.
    """
    count = 0
    for deeper, (_, folders, files) in zip(range(1000), os.walk(folder), strict=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if deeper:
            count += sum(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in files)  # noqa: PTH122
    return count


def _below(root: bytes, unread: Callable[[bytes, str], None] | None) -> Iterator[ImageFile]:
    levels = [(b"", os.scandir(root))]
    try:
        while levels:
            prefix, entries = levels[-1]
            where = prefix  # what cannot be read, if something cannot
            try:
                entry = next(entries, None)
                if entry is None:
                    levels.pop()[1].close()
                    continue
                if entry.is_dir(follow_symlinks=False):
                    where = prefix + entry.name + b"/"
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it went away a moment ago
                        levels.append((where, os.scandir(entry.path)))
                    continue
                if os.path.splitext(entry.name)[1].lower() not in _SUFFIXES:  # noqa: PTH122
                    continue
                found = _looked_at(entry)
            except FileNotFoundError:
                continue
            except OSError as error:
                if unread is None or not where:
                    raise
                unread(where[:-1], os.strerror(error.errno or 0))
                if where == prefix:  # its names can be had, and nothing else
                    levels.pop()[1].close()
                continue
            if not stat.S_ISDIR(found.st_mode):
                yield ImageFile.of(prefix + entry.name, found)
    finally:
        for _, entries in levels:
            entries.close()


def _looked_at(entry: os.DirEntry[bytes]) -> os.stat_result:
    """Of what a link points to; of the link itself where that cannot be had."""
    try:
        return entry.stat()
    except OSError:
        return entry.stat(follow_symlinks=False)


def same_file(path: Path, other: Path) -> bool:
    """Whether both are there, and one file: by links, another name of it, or another case of its letters."""
    with contextlib.suppress(OSError, ValueError):
        return path.samefile(other)
    return False


def printable(name: bytes) -> str:
    """A name as one line that a terminal only shows: what is no UTF-8 as `\\xff`, and see `terminal.one_line`."""
    return one_line(name.decode("utf-8", "backslashreplace"))


def shown_name(path: bytes) -> str:
    """A path as text. One that is UTF-8 is itself; bytes that are none become `\\xff`.

    Then, and where a name only looks as if it had been escaped, a backslash becomes two, so that no two paths look
    alike and `name_bytes` finds the way back.
    """
    with contextlib.suppress(UnicodeDecodeError):
        text = path.decode("utf-8")
        if _ESCAPED.search(text) is None:
            return text
    return path.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")


def name_bytes(shown: str) -> bytes:
    """The path that `shown_name` shows."""
    if _ESCAPED.search(shown) is None:
        return shown.encode("utf-8", "surrogateescape")
    parts = re.split(r"(\\\\|\\x[89a-f][0-9a-f])", shown)
    escapes = (b"\\" if part == r"\\" else bytes([int(part[2:], 16)]) for part in parts[1::2])
    return parts[0].encode() + b"".join(
        escape + text.encode() for escape, text in zip(escapes, parts[2::2], strict=True)
    )
