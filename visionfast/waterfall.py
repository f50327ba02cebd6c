"""Traces of requests in the terminal, one bar below the other, and in a file for a trace viewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO, TypeVar

from visionfast.artifacts import atomic_write
from visionfast.serving.tracing import Span, Trace, Traced, chrome_events
from visionfast.terminal import one_line

__all__ = ["Traces", "waterfall"]

_Answer = TypeVar("_Answer")

_WIDTH = 32  # of the bars, characters
_EIGHTHS = " ▏▎▍▌▋▊▉"


class Traces:
    """Of the files of a command, one request after the other: printed below each file's line, and kept for a file.

    Args:
        shown: where each is printed.
        to: a file for all of them.
    """

    def __init__(self, *, shown: TextIO | None, to: Path | None) -> None:
        self._shown, self._to = shown, to
        self._traces: dict[str, Trace] = {}
        self._untold: Trace | None = None

    def keep(self, path: Path, done: Traced[_Answer]) -> _Answer:
        """The answer of a file; its trace is printed before the next one's, when the answer's own line is there."""
        self._tell()
        self._untold = done.trace
        # The first one's connection and buffers are new.
        self._traces[f"{len(self._traces) + 1}: {path}"] = done.trace
        return done.answer

    def end(self) -> None:
        """Prints the last one and writes the file. Raises `ArtifactError` where that cannot be written."""
        self._tell()
        if self._to is not None:
            atomic_write(self._to, json.dumps(chrome_events(self._traces)).encode())

    def _tell(self) -> None:
        trace, self._untold = self._untold, None
        if trace is not None and self._shown is not None:
            print(waterfall(trace), file=self._shown)


def waterfall(trace: Trace) -> str:
    """A line for each span: its name, indented by its depth, milliseconds, and a bar where it lies in the request."""
    whole = trace.spans[0].duration_ns
    names = [f"{'  ' * span.depth}{one_line(span.name)}" for span in trace.spans]
    column = max(map(len, names))
    lines = [
        f"  {name:<{column}}  {span.duration_ns / 1e6:9.3f} ms  {_bar(span, whole)}".rstrip()
        for name, span in zip(names, trace.spans, strict=True)
    ]
    return "\n".join([*lines, *([f"  {trace.note}"] if trace.note else [])])


def _bar(span: Span, whole_ns: int) -> str:
    if span.name == "connection":
        return ""  # it is what is left and right of the server
    scale = _WIDTH / max(1, whole_ns)
    start = min(round(span.start_ns * scale), _WIDTH - 1)
    eighths = min(round(span.duration_ns * scale * 8), (_WIDTH - start) * 8)
    return f"{' ' * start}{'█' * (eighths // 8)}{_EIGHTHS[eighths % 8]}".rstrip() or f"{' ' * start}▏"
