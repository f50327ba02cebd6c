"""Traces of requests in the terminal, one bar below the other, and in a file for a trace viewer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from visionfast.artifacts import atomic_write
from visionfast.errors import ImageError
from visionfast.predict import Found
from visionfast.serving.tracing import Span, Trace, chrome_events
from visionfast.terminal import one_line

if TYPE_CHECKING:
    from visionfast.serving.client import Client
    from visionfast.serving.client_request import Options

__all__ = ["traced_files", "waterfall"]

_WIDTH = 32  # of the bars, characters
_EIGHTHS = " ▏▎▍▌▋▊▉"


def traced_files(
    client: Client, paths: Sequence[Path], options: Options, *, shown: TextIO | None, to: Path | None
) -> Iterator[tuple[Path, Found | ImageError]]:
    """Every file with its answer, in order, one request at a time.

    Args:
        client: of a detector.
        paths: of images.
        options: of a call.
        shown: where each trace is printed.
        to: a file for all of them, written at the end.

    Raises:
        ArtifactError: the file cannot be written.
        OptionError, QueueFullError, DeadlineError, ServerError: as a call.
    """
    traces: dict[str, Trace] = {}
    for number, path in enumerate(paths):
        try:
            done = client.traced(path, **options)
        except ImageError as error:
            yield path, error
            continue
        yield path, Found(done.answer, client.class_names)
        # The first one's connection and buffers are new.
        traces[f"{number + 1}: {path}"] = done.trace
        if shown is not None:
            print(waterfall(done.trace), file=shown)
    if to is not None:
        atomic_write(to, json.dumps(chrome_events(traces)).encode())


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
