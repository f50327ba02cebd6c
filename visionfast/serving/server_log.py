"""The server's log: a file that does not grow without bound, and what it says about why the server did not start."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from visionfast.errors import ServerError

__all__ = ["ServerLog", "missing_code", "reason"]

_LIBRARY = re.compile(r"error while loading shared libraries: ([^\s:]+)")
_FAILED = re.compile(r"failed to load '([^']+)' version (\d+): (?:[A-Z][a-z]+(?: [a-z]+)*: )?(.*)", re.DOTALL)
_CONFIGURATION = re.compile(r"Error parsing text-format inference\.ModelConfig: (.*)")
_POLL = re.compile(r"Poll failed for model directory '([^']+)': (.*)")
_PORT = re.compile(r"Socket '([^']+)' already in use")
_BACKEND = re.compile(r"unable to find backend library for backend '([^']+)'")
_OPTION = re.compile(r"^\S+: (?:unrecognized )?option '--")
_NO_CODE = re.compile(r"Failed to preinitialize Python stub: Python (model file not found in '[^']+')")
_QUOTED = re.compile(r'^E\d{4} [\d:.]+ \d+ [\w.]+:\d+\] "(.*)"$')


class ServerLog:
    """The file that a server's output is added to, each start's behind the one before.

    Args:
        path: None is a temporary one, which is removed by `close` unless something failed.
        name: of a temporary one, for people.
        most_bytes: beyond which it begins anew, the part before beside it as `<path>.1`; 0: it grows.
    """

    def __init__(self, path: Path | None, name: str, most_bytes: int) -> None:
        self.path = path
        self._name, self._most_bytes = name, most_bytes
        self._is_kept = path is not None
        self._begin = 0

    @property
    def _old(self) -> Path:
        assert self.path is not None, "there is no older part of what was never opened"
        return self.path.with_name(f"{self.path.name}.1")

    def open(self) -> int:
        """A file descriptor for a start of the server.

        Raises:
            ServerError: it cannot be written.
        """
        if self.path is None:
            made, name = tempfile.mkstemp(prefix=f"visionfast-serve-{self._name}-", suffix=".log")
            os.close(made)
            self.path = Path(name)
        try:
            # What writes at its end goes on at the beginning when the file is cut.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ServerError(f"{self.path}: the log cannot be written ({error.strerror})") from error
        self._begin = os.fstat(descriptor).st_size
        return descriptor

    def written(self) -> str:
        """What this start of the server has added, as far as it is in the file yet."""
        if self.path is None or not self.path.is_file():
            return ""  # it may be /dev/stderr
        with self.path.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def shorten(self) -> None:
        """Has it begin anew if it is too long. What is written in the instant between copy and cut is lost."""
        with contextlib.suppress(OSError):
            if self.path is None or not self._most_bytes or not self.path.is_file():
                return
            if self.path.stat().st_size <= self._most_bytes:
                return
            try:
                shutil.copyfile(self.path, self._old)
            finally:  # also where a disk is full
                os.truncate(self.path, 0)
                self._begin = 0

    def keep(self) -> None:
        """Something failed: a temporary one stays for a person to read."""
        self._is_kept = True

    def close(self) -> None:
        if self.path is not None and not self._is_kept:
            for path in (self.path, self._old):
                path.unlink(missing_ok=True)
            self.path = None

    def __str__(self) -> str:
        return f" (log: {self.path})"


def missing_code(log: str) -> str | None:
    """That a model's model.py is not there, for which Triton 2.51 waits without end; None: nothing of it in the log."""
    found = _NO_CODE.search(log)
    return None if found is None else f"{found[1]}; deploy the engine again"


def reason(log: str) -> str | None:
    """The first cause that is in a log of Triton 2.51, shortened to its sense; None if it does not say.

    A later line of such a log is mostly a consequence: a model that is missing takes its ensemble along.
    """
    if found := _LIBRARY.search(log):
        return f"the library {found[1]} is not on this machine; {_how_to_have(found[1])}"
    if found := _PORT.search(log):
        return f"{found[1]} is in use by another program"
    lines = log.splitlines()
    errors = [match[1] for line in lines if (match := _QUOTED.match(line))]
    for text in map(_unescaped, errors):
        if found := _FAILED.search(text):
            return f"model {found[1]}, version {found[2]}: {_sense(found[3])}"
        if found := _POLL.search(text):
            parsed = _CONFIGURATION.search(log)
            return f"model {found[1]}: {_sense(found[2])}{f' ({_sense(parsed[1])})' if parsed else ''}"
    for text in map(_unescaped, errors):
        if text.startswith("failed to load"):
            return _sense(text)
    told = [line for line in lines if line.startswith(("error: ", "Bad option")) or _OPTION.search(line)]
    return _sense(told[-1].removeprefix("error: ")) if told else None


def _how_to_have(library: str) -> str:
    if found := re.match(r"libpython(\d\.\d+)", library):
        return f"on Debian and Ubuntu `apt install libpython{found[1]}` brings it"
    return "install it"


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace('\\"', '"')


def _sense(text: str) -> str:
    """Without the traceback that Python's message has behind it, in one line."""
    if found := _BACKEND.search(text):
        return f"this server has no backend {found[1]}; the one in NVIDIA's container has"
    return " ".join(text.split("\n\nAt:\n")[0].split()).rstrip(" ;.")
