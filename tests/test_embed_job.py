"""The batch job, in this process: every file once, whatever happens in between."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

pytest.importorskip("torch", reason="the small engine is exported with torch: pip install 'visionfast[build]'")
pytest.importorskip("openvino", reason="the small engine runs in openvino: pip install 'visionfast[openvino]'")

from embed_folders import StoppedError, beside, deep_folder, rows_of, stop_at, write_photos
from small_embedder import build_small

from visionfast import embed_job, embed_journal, embed_run, embed_table
from visionfast.backends.fake import FakeRunner
from visionfast.embed_journal import Journal
from visionfast.embed_table import Row, engine_identity, read_info, read_rows
from visionfast.embedder import Embedder
from visionfast.errors import ImageNotFoundError, OptionError
from visionfast.image_files import image_files
from visionfast.preprocess.decode import read_image_file
from visionfast.preprocess.limits import DecodeLimits


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    engine = build_small(tmp_path_factory.mktemp("engines") / "small" / "openvino")
    with Embedder.open(engine, threads=2, streams=2) as opened:
        yield opened


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "table.parquet"


# ---- what cannot be read ----------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_read(embedder: Embedder, photos: Path, output: Path) -> None:
    """Its rows of an earlier run stay, all else goes on."""
    embed_job.embed_folder(embedder, photos, output)
    before = rows_of(output)
    (photos / "sub").rename(photos / "far")
    deep = deep_folder(photos / "sub")
    (photos / "a.png").unlink()
    shutil.copy(photos / "b.jpg", photos / "new.jpg")
    report = embed_job.embed_folder(embedder, photos, output)
    assert (report.unread, report.bad, report.removed) == (1, 0, 3)
    ((folder, reason),) = report.unread_folders
    assert deep.startswith(folder)
    assert reason == "File name too long"
    # One that has the rows of what cannot be read now: they are the old ones, to the bit.
    lost = os.fsencode(folder) + b"/x.jpg"
    table = [dataclasses.replace(row, path=lost) if row.path == b"z.jpg" else row for row in read_rows(output)]
    embed_table.write_table(output, read_info(output), sorted(table, key=lambda row: row.path))
    report = embed_job.embed_folder(embedder, photos, output)
    assert (report.unread, report.embedded, report.removed) == (1, 1, 0)
    np.testing.assert_array_equal(rows_of(output)[os.fsdecode(lost)].vector, before["z.jpg"].vector)
    report = embed_job.embed_folder(embedder, photos, output)
    assert (report.unread, report.written) == (1, False)
    shutil.rmtree(photos / "sub")
    assert embed_job.embed_folder(embedder, photos, output).removed == 1


def test_a_folder_that_cannot_be_read_any_more_when_it_goes_on(embedder: Embedder, photos: Path, output: Path) -> None:
    """Of the run that was stopped its answers stay, those of files that are gone do not."""
    with pytest.raises(StoppedError):
        embed_job.embed_folder(embedder, photos, output, progress=stop_at(11))
    (photos / "sub").rename(photos / "far")
    deep_folder(photos / "sub")
    unread: list[bytes] = []
    list(image_files(photos, unread=lambda path, _: unread.append(path)))
    lost = unread[0] + b"/x.jpg"
    with Journal(output) as journal:
        found = [row for row in journal.rows() if isinstance(row, Row) and row.path == b"z.jpg"]
        journal.record(dataclasses.replace(found[0], path=lost))
        # That one could not be read is no answer that anybody would miss.
        journal.record(Row(unread[0] + b"/y.jpg", 1, 1, None, "no such file", None))
    report = embed_job.embed_folder(embedder, photos, output)
    assert (report.files, report.unread, report.embedded, report.kept, report.bad) == (12, 1, 2, 10, 0)
    rows = rows_of(output)
    np.testing.assert_array_equal(rows[os.fsdecode(lost)].vector, rows["z.jpg"].vector)
    assert not embed_job.embed_folder(embedder, photos, output).written


def test_nothing_but_a_folder_that_cannot_be_read(embedder: Embedder, output: Path, tmp_path: Path) -> None:
    deep_folder(tmp_path / "photos" / "sub")
    with pytest.raises(OptionError, match=r"d: cannot be read \(File name too long\)$"):
        embed_job.embed_folder(embedder, tmp_path / "photos", output)


# ---- what comes of it -------------------------------------------------------------------------------------


def test_a_row_for_each_file(embedder: Embedder, photos: Path, output: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    report = embed_job.embed_folder(
        embedder, photos, output, engine_name="small/openvino", progress=lambda *told: seen.append(told)
    )
    rows = list(read_rows(output))
    names = [os.fsdecode(row.path) for row in rows]
    assert names == sorted(names, key=os.fsencode)
    assert len(names) == 11
    assert beside(output) == ["table.parquet"]
    answers = embedder([photos / name for name in names], patches=False)
    for row, name, vector in zip(rows, names, answers.cls, strict=True):
        found = (photos / name).stat()
        assert (row.n_bytes, row.modified_ns, row.error) == (found.st_size, found.st_mtime_ns, None)
        assert row.sha256 == hashlib.sha256((photos / name).read_bytes()).hexdigest()
        np.testing.assert_array_equal(row.vector, vector)
    assert (report.files, report.embedded, report.kept, report.removed, report.bad) == (11, 11, 0, 0, 0)
    assert report.written
    assert report.embedding_ns > 0
    assert [told for told in seen if told[0] == "embedding"] == [("embedding", i, 11) for i in range(12)]
    assert ("listing", 11, None) in seen
    assert ("writing", 11, 11) in seen

    info = read_info(output)
    assert embedder.manifest is not None
    assert info.engine == engine_identity(embedder.manifest)
    assert (info.model, info.architecture, info.engine_name) == ("small", "dinov2_vits14", "small/openvino")
    assert (info.dim, info.normalised, info.patches, info.folder) == (384, False, None, "../photos")
    assert info.preprocess == embedder.spec.preprocess


def test_normalised(embedder: Embedder, photos: Path, output: Path) -> None:
    embed_job.embed_folder(embedder, photos, output, normalise=True)
    expected = embedder(photos / "a.png", patches=False, normalise=True).cls[0]
    np.testing.assert_array_equal(rows_of(output)["a.png"].vector, expected)
    assert read_info(output).normalised


def test_the_bytes_are_the_rows_alone(embedder: Embedder, photos: Path, output: Path, tmp_path: Path) -> None:
    embed_job.embed_folder(embedder, photos, output)
    other = tmp_path / "another" / "table.parquet"
    embed_job.embed_folder(embedder, photos, other)
    assert other.read_bytes() == output.read_bytes()


def test_what_is_new_changed_or_gone(
    embedder: Embedder, photos: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_table, "_ROW_GROUP_BYTES", 4 * 384 * 3)
    embed_job.embed_folder(embedder, photos, output)
    before = rows_of(output)
    (photos / "a.png").unlink()
    (photos / "z.jpg").unlink()
    shutil.copy(photos / "b.jpg", photos / "0.jpg")
    shutil.copy(photos / "b.jpg", photos / "sub" / "new.jpg")
    shutil.copy(photos / "b.jpg", photos / "e.jpg")
    os.utime(photos / "h.jpg", ns=(1, 1))

    read: list[str] = []

    def reading(path: Any, **options: Any) -> bytes:
        read.append(str(Path(path).relative_to(photos)))
        return read_image_file(path, **options)

    monkeypatch.setattr(embed_run, "read_image_file", reading)
    report = embed_job.embed_folder(embedder, photos, output)
    assert sorted(read) == ["0.jpg", "e.jpg", "h.jpg", "sub/new.jpg"]
    assert (report.files, report.embedded, report.kept, report.removed, report.bad) == (11, 4, 7, 2, 0)
    after = rows_of(output)
    assert after["e.jpg"].sha256 == before["b.jpg"].sha256 != before["e.jpg"].sha256
    assert (after["h.jpg"].modified_ns, after["h.jpg"].sha256) == (1, before["h.jpg"].sha256)
    anew = tmp_path / "anew" / "table.parquet"
    embed_job.embed_folder(embedder, photos, anew)
    assert anew.read_bytes() == output.read_bytes()


@pytest.mark.parametrize("gone", [True, False])
def test_only_gone_or_only_nothing(embedder: Embedder, photos: Path, output: Path, gone: bool) -> None:
    embed_job.embed_folder(embedder, photos, output)
    before = output.stat()
    if gone:
        (photos / "z.jpg").unlink()
    report = embed_job.embed_folder(embedder, photos, output)
    assert (report.embedded, report.kept, report.removed, report.written) == (0, 11 - gone, int(gone), gone)
    assert len(rows_of(output)) == 11 - gone
    after = output.stat()
    assert ((after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)) is not gone
    assert beside(output) == ["table.parquet"]


# ---- stopped in the middle --------------------------------------------------------------------------------


@pytest.fixture
def expected(embedder: Embedder, photos: Path, tmp_path: Path) -> bytes:
    """The table of a run that nothing stopped."""
    path = tmp_path / "expected" / "table.parquet"
    embed_job.embed_folder(embedder, photos, path)
    return path.read_bytes()


@pytest.mark.parametrize("kind", [StoppedError, KeyboardInterrupt])
@pytest.mark.parametrize("count", [0, 1, 7, 11])
def test_stopped_while_it_embeds(
    embedder: Embedder, photos: Path, output: Path, expected: bytes, count: int, kind: type[BaseException]
) -> None:
    with pytest.raises(kind):
        embed_job.embed_folder(embedder, photos, output, progress=stop_at(count, kind))
    assert beside(output) == (["table.parquet.journal"] if count else [])
    report = embed_job.embed_folder(embedder, photos, output)
    assert (report.embedded, report.kept) == (11 - count, count)
    assert output.read_bytes() == expected
    assert beside(output) == ["table.parquet"]


def test_stopped_again_and_again(embedder: Embedder, photos: Path, output: Path, expected: bytes) -> None:
    for count in (2, 3, 5, 9):
        with pytest.raises(StoppedError):
            embed_job.embed_folder(embedder, photos, output, progress=stop_at(count))
    embed_job.embed_folder(embedder, photos, output)
    assert output.read_bytes() == expected


def _raise(*arguments: Any, **options: Any) -> Any:
    raise StoppedError


def _and_then_raise(real: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        raise StoppedError

    return called


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (embed_run, "image_files", _raise),
        (Journal, "keep", _and_then_raise(Journal.keep)),
        (Journal, "start", _and_then_raise(Journal.start)),
        (embed_run, "write_table", _raise),
        (Path, "replace", _raise),
        (embed_run, "write_table", _and_then_raise(embed_table.write_table)),
        (Journal, "remove", _raise),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_stopped_elsewhere(
    embedder: Embedder,
    photos: Path,
    output: Path,
    expected: bytes,
    where: Any,
    name: str,
    instead: Any,
    again: bool,
) -> None:
    """The first run, or one over a table of which nearly everything is old."""
    if again:
        shutil.move(photos / "z.jpg", photos.parent / "z.jpg")
        shutil.copy(photos / "b.jpg", photos / "gone.jpg")
        embed_job.embed_folder(embedder, photos, output)
        shutil.move(photos.parent / "z.jpg", photos / "z.jpg")
        (photos / "gone.jpg").unlink()
    before = output.read_bytes() if again else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, instead)
        with pytest.raises(StoppedError):
            embed_job.embed_folder(embedder, photos, output)
    assert (output.read_bytes() if output.exists() else None) in (before, expected)
    report = embed_job.embed_folder(embedder, photos, output)
    assert report.embedded + report.kept == 11
    assert output.read_bytes() == expected
    assert beside(output) == ["table.parquet"]


def test_files_that_change_before_it_goes_on(embedder: Embedder, photos: Path, output: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        embed_job.embed_folder(embedder, photos, output, progress=stop_at(8))
    (photos / "a.png").unlink()
    shutil.copy(photos / "z.jpg", photos / "b.jpg")
    shutil.copy(photos / "z.jpg", photos / "0.jpg")
    report = embed_job.embed_folder(embedder, photos, output)
    assert (report.embedded, report.kept) == (5, 6)
    anew = tmp_path / "anew" / "table.parquet"
    embed_job.embed_folder(embedder, photos, anew)
    assert anew.read_bytes() == output.read_bytes()


def test_two_at_once(embedder: Embedder, photos: Path, output: Path, expected: bytes) -> None:
    told: list[str] = []

    def progress(stage: str, done: int, total: int | None) -> None:
        if (stage, done) in (("listing", 11), ("embedding", 4), ("writing", 11)):
            with pytest.raises(OptionError) as caught:
                embed_job.embed_folder(embedder, photos, output)
            told.append(str(caught.value))

    embed_job.embed_folder(embedder, photos, output, progress=progress)
    assert told == [f"{output}: another job is writing it; wait for that one, or name another output"] * 3
    assert output.read_bytes() == expected


def test_a_batch_is_safe_while_the_next_one_is_computed(embedder: Embedder, photos: Path, output: Path) -> None:
    """Seen by what a kill would leave: the journal, and SQLite's own beside it."""
    (graph,) = embedder.spec.graphs
    tensors = {
        side: tuple(dataclasses.replace(tensor, shape=(4, *tensor.shape[1:])) for tensor in getattr(graph, side))
        for side in ("inputs", "outputs")
    }
    four = dataclasses.replace(graph, **tensors)
    spec = dataclasses.replace(embedder.spec, graphs=(four,))
    safe: list[int] = []

    def answer(feeds: Any) -> Any:
        time.sleep(1.1)
        left = shutil.copytree(output.parent, output.parent.with_name(f"left {len(safe)}"))
        with Journal(left / output.name) as journal:
            safe.append(journal.answers)
        return {"cls": 1.0, "patches": 0}

    with Embedder(spec, [FakeRunner(four, answer)], manifest=embedder.manifest) as slow:
        embed_job.embed_folder(slow, photos, output)
    assert safe == [0, 4, 8]


# ---- bad files --------------------------------------------------------------------------------------------


def test_bad_files(embedder: Embedder, photos: Path, output: Path) -> None:
    whole = (photos / "b.jpg").read_bytes()
    contents = {
        "empty.jpg": (b"", "got an empty file"),
        "text.jpg": (b"no picture at all", "expected a JPEG"),
        "cut.jpg": (whole[:-200], "cut short"),
        "large.jpg": (b"\xff\xd8" + bytes(300_000), "expected at most 200000 bytes, got 300002"),
    }
    for name, (content, _) in contents.items():
        (photos / name).write_bytes(content)
    (photos / "link.jpg").symlink_to("nothing")
    os.mkfifo(photos / "pipe.jpg")
    words = {name: reason for name, (_, reason) in contents.items()}
    words |= {"link.jpg": "no such file", "pipe.jpg": "expected a regular file, got a pipe"}
    limits = DecodeLimits(max_bytes=200_000)
    report = embed_job.embed_folder(embedder, photos, output, limits=limits)
    assert (report.files, report.embedded, report.bad) == (17, 11, 6)
    assert [name for name, _ in report.bad_files] == sorted(words)
    rows = rows_of(output)
    for name, error in report.bad_files:
        assert words[name] in error
        assert rows[name].error == error
        assert rows[name].vector is None
        assert (rows[name].sha256 is not None) == (name in ("text.jpg", "cut.jpg"))
    assert rows["cut.jpg"].n_bytes == len(whole) - 200

    again = embed_job.embed_folder(embedder, photos, output, limits=limits)
    assert (again.embedded, again.written, again.bad_files) == (0, False, report.bad_files)
    (photos / "cut.jpg").write_bytes(whole)
    (photos / "link.jpg").unlink()
    mended = embed_job.embed_folder(embedder, photos, output, limits=limits)
    assert (mended.embedded, mended.removed, mended.bad) == (1, 1, 4)


def test_more_bad_files_than_are_told(embedder: Embedder, photos: Path, output: Path) -> None:
    for i in range(25):
        (photos / f"bad{i:02}.jpg").write_bytes(b"x")
    report = embed_job.embed_folder(embedder, photos, output)
    assert report.bad == 25
    assert [name for name, _ in report.bad_files] == [f"bad{i:02}.jpg" for i in range(20)]


def test_files_that_change_while_it_runs(embedder: Embedder, photos: Path, output: Path) -> None:
    def progress(stage: str, done: int, total: int | None) -> None:
        if (stage, done) == ("embedding", 0):
            (photos / "a.png").unlink()
            shutil.copy(photos / "z.jpg", photos / "b.jpg")

    report = embed_job.embed_folder(embedder, photos, output, progress=progress)
    rows = rows_of(output)
    assert report.bad_files == (("a.png", "no such file"),)
    assert rows["b.jpg"].sha256 == rows["z.jpg"].sha256
    assert rows["b.jpg"].n_bytes == (photos / "b.jpg").stat().st_size
    again = embed_job.embed_folder(embedder, photos, output)
    assert (again.embedded, again.removed, again.bad) == (0, 1, 0)


@pytest.mark.parametrize("stop", [False, True])
def test_a_file_that_may_be_read_again(
    embedder: Embedder, photos: Path, output: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch, stop: bool
) -> None:
    """Nothing about it has changed but that: as after chmod, which leaves its time as it is."""
    closed = True

    def reading(path: Any, **options: Any) -> bytes:
        if closed and Path(path).name == "b.jpg":
            raise ImageNotFoundError(str(path), "the file may not be read; check its permissions")
        return read_image_file(path, **options)

    monkeypatch.setattr(embed_run, "read_image_file", reading)
    if stop:
        with pytest.raises(StoppedError):
            embed_job.embed_folder(embedder, photos, output, progress=stop_at(7))
    else:
        assert embed_job.embed_folder(embedder, photos, output).bad == 1
        assert not embed_job.embed_folder(embedder, photos, output).written
    closed = False
    report = embed_job.embed_folder(embedder, photos, output)
    assert report.bad == 0
    assert output.read_bytes() == expected


def test_names_that_are_no_text(embedder: Embedder, photos: Path, output: Path) -> None:
    names = [b"bad\xff.jpg", b"bad\\xff.jpg", b"sub/\x80\n.jpg"]
    for name in names:
        shutil.copy(photos / "b.jpg", photos / os.fsdecode(name))
    with pytest.raises(StoppedError):
        embed_job.embed_folder(embedder, photos, output, progress=stop_at(13))
    embed_job.embed_folder(embedder, photos, output)
    rows = rows_of(output)
    assert len(rows) == 14
    for name in names:
        np.testing.assert_array_equal(rows[os.fsdecode(name)].vector, rows["b.jpg"].vector)
    assert not embed_job.embed_folder(embedder, photos, output).written
    (photos / os.fsdecode(names[2])).write_bytes(b"x")
    assert embed_job.embed_folder(embedder, photos, output).bad_files[0][0] == "sub/\\x80\\n.jpg"


def test_an_engine_that_gives_no_numbers(embedder: Embedder, photos: Path, output: Path) -> None:
    def answer(feeds: Any) -> Any:
        cls = np.where(feeds["images"].astype(np.float64).mean() > 127, np.nan, 1.0)
        return {"cls": cls, "patches": 0}

    graph = embedder.spec.graphs[0]
    with Embedder(embedder.spec, [FakeRunner(graph, answer)], manifest=embedder.manifest) as broken:
        report = embed_job.embed_folder(broken, photos, output, normalise=True)
    assert 0 < report.bad < 11
    assert {error for _, error in report.bad_files} == {"the engine gave values that are no numbers"}
    assert all((row.vector is None) == (row.error is not None) for row in read_rows(output))


# ---- many files -------------------------------------------------------------------------------------------


def test_memory_is_flat_in_the_number_of_files(
    embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed_table, "_ROW_GROUP_BYTES", 4 * 384 * 20)
    monkeypatch.setattr(embed_journal, "_PAGE", 20)
    content = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
    limits = DecodeLimits(max_bytes=1000)
    zeros = Embedder(embedder.spec, [FakeRunner(embedder.spec.graphs[0])], threads=2, manifest=embedder.manifest)
    peaks = {}
    tracemalloc.start()
    try:
        for count in (20, 200, 2000):  # the first warms up
            folder = tmp_path / str(count)
            folder.mkdir()
            for i in range(count):
                (folder / f"{i:08}.png").write_bytes(content)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            embed_job.embed_folder(zeros, folder, tmp_path / f"{count}.parquet", limits=limits)
            (folder / "new.png").write_bytes(content)
            embed_job.embed_folder(zeros, folder, tmp_path / f"{count}.parquet", limits=limits)
            peaks[count] = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    # A list of 1800 paths of this length would be 100 kB more; vectors kept, 2.7 MB.
    assert peaks[2000] - peaks[200] < 60_000, peaks
