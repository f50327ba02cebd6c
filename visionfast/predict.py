"""`visionfast predict`: many files in, a line, a JSON record and a picture each out; a bad file harms no other."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from visionfast.artifacts import atomic_write
from visionfast.errors import ArtifactError, ImageError, OptionError
from visionfast.pipeline import Detector
from visionfast.preprocess.decode import DecodeLimits, decode_image
from visionfast.results import Detections

__all__ = ["expand", "record", "run"]

_SUFFIXES = frozenset(
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
)  # looked for in a directory; a file that is named is tried whatever it is called


def expand(sources: Sequence[str]) -> list[Path]:
    """Files, the images in directories, and what globs match, in the order given, each once.

    Raises:
        OptionError: a directory without an image or that cannot be read, or a glob that matches nothing.
    """
    found: dict[Path, None] = {}
    for source in sources:
        try:
            found.update(dict.fromkeys(_expanded(source)))
        except OSError as error:
            raise OptionError(f"{source}: cannot be read ({error.strerror})") from error
    return list(found)


def _expanded(source: str) -> list[Path]:
    path = Path(source)
    # Unlike pathlib's, these raise nothing where a folder on the way is closed: such a file is that one image's error.
    if os.path.isdir(path):  # noqa: PTH112
        inside = sorted(p for p in path.iterdir() if p.suffix.lower() in _SUFFIXES and p.is_file())
        if not inside:
            raise OptionError(f"{source}: expected a directory with images, found none in it")
        return inside
    if not os.path.exists(path) and glob.has_magic(source):  # noqa: PTH110
        # Path.glob refuses absolute patterns.
        matches = sorted(Path(p) for p in glob.glob(source, recursive=True))  # noqa: PTH207
        matches = [p for p in matches if p.is_file()]
        if not matches:
            raise OptionError(f"{source}: expected a pattern that matches images, it matches nothing")
        return matches
    return [path]


def run(detector: Detector, paths: Sequence[Path], *, save: Path | None, json_to: str | None) -> int:
    """Answers the files and says so on stdout (on stderr when stdout carries the JSON).

    Returns:
        how many files could not be answered.

    Raises:
        ArtifactError: an output cannot be written.
    """
    words = sys.stderr if json_to == "-" else sys.stdout
    names = _picture_names(paths) if save is not None else {}
    bad = 0
    batch = detector.spec.batch
    with _json_lines(json_to) as lines:
        for first in _progress(range(0, len(paths), batch), len(paths) >= 10):
            some = paths[first : first + batch]
            for path, answer in zip(some, detector(some, on_error="return"), strict=True):
                if lines is not None:
                    _write_line(lines, record(path, answer, detector.class_names), json_to or "")
                if isinstance(answer, ImageError):
                    bad += 1
                    print(_one_line(f"visionfast: {answer}"), file=sys.stderr)
                    continue
                print(_one_line(_sentence(path, answer, detector.class_names)), file=words)
                if save is not None:
                    _save(detector, path, answer, save / names[path])
    if bad and len(paths) > 1:  # of a single file, all is said
        print(f"visionfast: {bad} of {len(paths)} images could not be answered", file=sys.stderr)
    return bad


def record(path: Path, answer: Detections | ImageError, class_names: Sequence[str]) -> dict[str, Any]:
    """One image's JSON: `file`, then `image_hw`, `detections` and `ms` by stage, or `error`."""
    if isinstance(answer, ImageError):
        return {"file": str(path), "error": {"kind": answer.kind, "message": answer.reason}}
    masks = answer.mask.rle() if answer.mask is not None else None
    objects = [
        {
            "xyxy": [round(float(value), 2) for value in answer.xyxy[i]],
            "confidence": round(float(answer.confidence[i]), 4),
            "class_id": int(answer.class_id[i]),
            "class_name": class_names[int(answer.class_id[i])],
            **({"mask": masks[i]} if masks is not None else {}),
        }
        for i in range(len(answer))
    ]
    ms = {stage: round(ns / 1e6, 3) for stage, ns in answer.stage_ns.items()}
    return {"file": str(path), "image_hw": list(answer.image_hw), "detections": objects, "ms": ms}


def _sentence(path: Path, answer: Detections, class_names: Sequence[str]) -> str:
    counted = Counter(class_names[int(i)] for i in answer.class_id)
    what = ", ".join(f"{count} {name}" for name, count in counted.items()) or "nothing found"
    h, w = answer.image_hw
    return f"{path}: {w}×{h}: {what} ({sum(answer.stage_ns.values()) / 1e6:.1f} ms)"


def _one_line(text: str) -> str:
    """A file's name may have line breaks in it."""
    return " ".join(text.splitlines())


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


def _save(detector: Detector, path: Path, answer: Detections, target: Path) -> None:
    import cv2

    from visionfast.draw import draw

    # Decoded again: keeping every batch's pixels for pictures would slow those who want none.
    pixels = decode_image(path, limits=DecodeLimits(allow_truncated=True))
    drawn = draw(pixels, answer, detector.class_names)
    done, encoded = cv2.imencode(".jpg", cv2.cvtColor(drawn, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 92])
    if not done:
        raise ArtifactError(f"{target}: the annotated picture cannot be encoded as JPEG (sides up to 65535 pixels)")
    if target.resolve() == path.resolve():
        raise OptionError(f"--save {target.parent}: the picture would overwrite its original; name another folder")
    atomic_write(target, encoded.tobytes())


@contextlib.contextmanager
def _json_lines(target: str | None) -> Iterator[TextIO | None]:
    """stdout, or a file that takes its name only when everything was written."""
    if target is None:
        yield None
    elif target == "-":
        yield sys.stdout
    else:
        path = Path(target)
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


def _write_line(lines: TextIO, content: dict[str, Any], target: str) -> None:
    try:
        lines.write(json.dumps(content, ensure_ascii=False) + "\n")
        if target == "-":
            lines.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ArtifactError(f"{target}: cannot be written ({error.strerror})") from error


def _progress(steps: range, long: bool) -> Any:
    """A bar on stderr for a long run that somebody watches."""
    if not (long and sys.stderr.isatty()):
        return steps
    from rich.console import Console
    from rich.progress import track

    return track(steps, "predict", console=Console(stderr=True), transient=True)
