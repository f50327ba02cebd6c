"""`visionfast embed` as a person meets it: a process that is killed, stopped, or one of two."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import pytest

pytest.importorskip("torch", reason="the small engine is exported with torch: pip install 'visionfast[build]'")
pytest.importorskip("openvino", reason="the small engine runs in openvino: pip install 'visionfast[openvino]'")

from embed_folders import deep_folder
from small_embedder import build_small

from visionfast.embed_table import read_info, read_rows

PATIENCE = 120.0  # seconds, after which a test fails instead of hanging
COUNT = 48
# Each answer is on the disk before the next one is taken, so that a kill finds something there.
EAGER = "import visionfast.embed_journal as j; j._COMMIT_SECONDS = 0; from visionfast.cli import main; main()"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    build_small(folder / "engines" / "small" / "openvino")
    return folder


@pytest.fixture(scope="module")
def photos(home: Path, photographs: list[Path]) -> Path:
    """Parts of the two photographs, in three folders."""
    folder = home / "photos"
    originals = [cv2.imread(str(path)) for path in photographs]
    for i in range(COUNT):
        pixels = originals[i % 2][i * 5 : i * 5 + 200, i * 7 : i * 7 + 240 + i]
        path = folder / f"{i % 3}" / f"{i:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), pixels)
    return folder


@pytest.fixture
def out(tmp_path: Path, home: Path) -> Iterator[Path]:
    """A folder beside the photographs, as far from them as every other one."""
    folder = home / tmp_path.name
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _command(*arguments: str | Path, eager: bool = False) -> list[str]:
    start = ["-c", EAGER] if eager else ["-m", "visionfast.cli"]
    return [sys.executable, *start, "embed", *map(str, arguments)]


def _run(home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"VISIONFAST_HOME": str(home)}
    return subprocess.run(
        _command(*arguments), capture_output=True, text=True, env=environment, cwd=home, check=False, timeout=PATIENCE
    )


@contextlib.contextmanager
def _started(home: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"VISIONFAST_HOME": str(home)}
    with subprocess.Popen(
        _command(*arguments, eager=True),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=home,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def _patches(out: Path) -> dict[str, bytes]:
    folder = out / "table.parquet.patches"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.npz")}


def _answers(out: Path) -> int:
    with contextlib.closing(sqlite3.connect(out / "table.parquet.journal")) as journal:
        (count,) = journal.execute("SELECT count(*) FROM answer").fetchone()
        return int(count)


def _fails_in_one_line(done: subprocess.CompletedProcess[str], *words: str, code: int = 1) -> None:
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("visionfast: ")
    for word in words:
        assert word in line


@pytest.fixture(scope="module")
def whole(home: Path, photos: Path) -> Path:
    """What comes of a run that nothing stopped."""
    folder = home / "whole"
    done = _run(home, "small", photos, "-o", folder / "table.parquet", "--features", "patch", "--half")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        rf"{COUNT} embedded \([0-9.]+ images/s\), 0 bad: {re.escape(str(folder))}/table.parquet\n", done.stdout
    )
    return folder


def _same(out: Path, whole: Path) -> None:
    assert (out / "table.parquet").read_bytes() == (whole / "table.parquet").read_bytes()
    assert _patches(out) == _patches(whole)
    assert sorted(os.listdir(out)) == ["table.parquet", "table.parquet.patches"]  # noqa: PTH208


def test_again(home: Path, photos: Path, whole: Path) -> None:
    before = (whole / "table.parquet").stat()
    done = _run(home, "small", "photos", "-o", "whole/table.parquet", "--features", "patch", "--half")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"nothing new: {COUNT} images are in whole/table.parquet, 0 of them bad\n"
    after = (whole / "table.parquet").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    info = read_info(whole / "table.parquet")
    assert (info.engine_name, info.folder, info.patches) == ("small/openvino", "../photos", "float16")


def test_killed_again_and_again(home: Path, photos: Path, whole: Path, out: Path) -> None:
    arguments = ("small", photos, "-o", out / "table.parquet", "--features", "patch", "--half")
    rng = random.Random(0)
    halfway = 0
    for at_least in (1, 9, 10, 30, COUNT):
        if (out / "table.parquet").exists():  # killed too late
            break
        with _started(home, *arguments) as process:
            _wait_for(lambda least=at_least: len(_patches(out)) >= least, process)  # type: ignore[misc]
            time.sleep(rng.random() * 0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
        if (out / "table.parquet.journal").exists():
            answers = _answers(out)
            halfway += 0 < answers < COUNT
            # No answer counts before its features are there, whole.
            assert answers <= len(_patches(out))
    assert halfway >= 2
    done = _run(home, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^\d+ embedded.*, 0 bad, \d+ kept: |^nothing new", done.stdout)
    _same(out, whole)


def test_interrupted(home: Path, photos: Path, whole: Path, out: Path) -> None:
    arguments = ("small", photos, "-o", out / "table.parquet", "--features", "patch", "--half")
    with _started(home, *arguments) as process:
        _wait_for(lambda: len(_patches(out)) >= 5, process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stdout) == (130, "")
    assert stderr == (
        f"visionfast: stopped; what is done is kept, and the same command goes on with {out / 'table.parquet'}\n"
    )
    assert 4 <= _answers(out) < COUNT
    assert _run(home, *arguments).returncode == 0
    _same(out, whole)


def test_two_at_once(home: Path, photos: Path, whole: Path, out: Path) -> None:
    arguments = ("small", photos, "-o", out / "table.parquet", "--features", "patch", "--half")
    with _started(home, *arguments) as process:
        _wait_for(lambda: len(_patches(out)) >= 2, process)
        process.send_signal(signal.SIGSTOP)
        second = _run(home, *arguments)
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=PATIENCE)
    _fails_in_one_line(second, f"{out / 'table.parquet'}: another job is writing it")
    assert process.returncode == 0
    _same(out, whole)


def test_a_disk_that_takes_no_more(home: Path, photos: Path, whole: Path, out: Path) -> None:
    arguments = ("small", photos, "-o", out / "table.parquet", "--features", "patch", "--half")
    environment = os.environ | {"VISIONFAST_HOME": str(home)}

    def limit() -> None:  # a write beyond it fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    done = subprocess.run(
        _command(*arguments, eager=True),
        capture_output=True,
        text=True,
        env=environment,
        cwd=home,
        check=False,
        timeout=PATIENCE,
        preexec_fn=limit,
    )
    _fails_in_one_line(done, "table.parquet.journal: cannot be written", "the same command goes on")
    assert 0 < _answers(out) < COUNT
    assert _run(home, *arguments).returncode == 0
    _same(out, whole)


def test_bad_files(home: Path, photos: Path, out: Path) -> None:
    folder = out / "photos"
    shutil.copytree(photos / "0", folder)
    cut = (folder / "000.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(cut[: len(cut) // 2])
    (folder / os.fsdecode(b"bad\xff.jpg")).write_bytes(b"")
    for i in range(20):
        (folder / f"more{i:02}.jpg").write_bytes(b"x")
    done = _run(home, "small", folder, "-o", out / "table.parquet")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "visionfast: bad\\xff.jpg: expected an image, got an empty file"
    assert lines[1].startswith("visionfast: cut.jpg: the JPEG is cut short or damaged")
    assert lines[-1] == "visionfast: … and 2 more; the column `error` has them all"
    assert len(lines) == 21
    assert "16 embedded" in done.stdout
    assert ", 22 bad: " in done.stdout
    again = _run(home, "small", folder, "-o", out / "table.parquet")
    assert (again.returncode, again.stderr) == (1, "")
    assert again.stdout == (
        f"nothing new: 38 images are in {out / 'table.parquet'}, 22 of them bad, as the column `error` says\n"
    )
    other = _run(home, "small", folder, "-o", out / "table.parquet", "--allow-truncated")
    _fails_in_one_line(other, "made without --allow-truncated, this is with it")
    allowed = _run(home, "small", folder, "-o", out / "allowed.parquet", "--allow-truncated", "--normalise")
    assert "17 embedded" in allowed.stdout


def test_a_folder_that_cannot_be_read(home: Path, photos: Path, out: Path) -> None:
    folder = out / "photos"
    shutil.copytree(photos / "0", folder)
    deep_folder(folder / "deep")
    for words in ("16 embedded", "nothing new: 16 images"):
        done = _run(home, "small", folder, "-o", out / "table.parquet")
        _fails_in_one_line(done, "deep/ddd", "cannot be read (File name too long); nothing in it was looked at")
        assert words in done.stdout


def test_odd_images(home: Path, shared_data: Path, out: Path) -> None:
    done = _run(home, "small", shared_data / "odd-images", "-o", out / "table.parquet")
    assert done.returncode == 1
    bad = {row.path.decode() for row in read_rows(out / "table.parquet") if row.error is not None}
    assert bad == {"broken.png", "decompression_bomb.gif", "monkey12.jpg", "truncated_jpeg.jpg"}
    _run(home, "small", shared_data / "odd-images", "-o", out / "again.parquet", "--streams", "2")
    assert (out / "again.parquet").read_bytes() == (out / "table.parquet").read_bytes()


def test_a_bar_where_somebody_watches(home: Path, photos: Path, out: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"VISIONFAST_HOME": str(home), "TERM": "xterm", "COLUMNS": "120"}
    command = _command("small", photos, "-o", out / "table.parquet")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, cwd=home) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while read := os.read(ours, 4096):
                shown += read
        stdout, _ = process.communicate(timeout=PATIENCE)
    os.close(ours)
    assert process.returncode == 0
    assert stdout.startswith(f"{COUNT} embedded".encode())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "embedding" in text
    assert f"{COUNT}/{COUNT}" in text
    assert "images/s" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--features", "cls"), "--features cls: expected patch"),
        (("--half",), "--half: goes with --features patch"),
        (("--threads", "0"), "threads: expected a whole number from 1"),
        (("--threads", str(10**20)), "threads: expected a whole number from 1"),
        (("--streams", "0"), "streams: expected a whole number from 1"),
        (("--device", "cuda"), "device cuda: this engine is for the cpu"),
    ],
)
def test_options_that_do_not_exist(home: Path, photos: Path, out: Path, options: tuple[str, ...], words: str) -> None:
    _fails_in_one_line(_run(home, "small", photos, "-o", out / "table.parquet", *options), words)
    assert not out.exists()


def test_what_is_not_there(home: Path, photos: Path, out: Path) -> None:
    _fails_in_one_line(_run(home, "small", out / "nothing", "-o", out / "a.parquet"), "expected a folder with images")
    _fails_in_one_line(_run(home, "other", photos, "-o", out / "a.parquet"), "other: no engine there")
    _fails_in_one_line(_run(home, "small", photos, "-o", "/proc/a.parquet"), "/proc/a.parquet", "cannot be")
    assert not out.exists()
