"""What the server's log says about why it did not start, in one line."""

from __future__ import annotations

import re

__all__ = ["reason"]

_LIBRARY = re.compile(r"error while loading shared libraries: ([^\s:]+)")
_FAILED = re.compile(r"failed to load '([^']+)' version (\d+): (?:[A-Z][a-z]+(?: [a-z]+)*: )?(.*)", re.DOTALL)
_CONFIGURATION = re.compile(r"Error parsing text-format inference\.ModelConfig: (.*)")
_POLL = re.compile(r"Poll failed for model directory '([^']+)': (.*)")
_PORT = re.compile(r"Socket '([^']+)' already in use")
_BACKEND = re.compile(r"unable to find backend library for backend '([^']+)'")
_OPTION = re.compile(r"^\S+: (?:unrecognized )?option '--")
_QUOTED = re.compile(r'^E\d{4} [\d:.]+ \d+ [\w.]+:\d+\] "(.*)"$')


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
