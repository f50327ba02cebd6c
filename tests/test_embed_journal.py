"""What a job remembers: nothing twice, nothing lost, one job at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from visionfast import embed_journal
from visionfast.embed_journal import Journal
from visionfast.embed_table import Row
from visionfast.errors import ArtifactError, OptionError
from visionfast.image_files import ImageFile


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "table.parquet"


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed_journal, "_PAGE", 2)


FILES = [ImageFile(b"%d" % i, 10 + i, 20 + i) for i in range(5)]


def _row(file: ImageFile, *, sha256: str | None = "ab", error: str | None = None) -> Row:
    return Row(*file, sha256, error, None if error else np.arange(3, dtype=np.float32) + file.n_bytes)


def _pending(journal: Journal) -> list[bytes]:
    return [file.path for file in journal.pending()]


def _all(path: bytes) -> bool:
    return True


def test_what_is_done_survives(output: Path) -> None:
    with Journal(output) as journal:
        assert journal.settings is None
        assert journal.list(reversed(FILES)) == 5
        journal.start("settings")
        assert list(journal.pending()) == FILES
        for file in FILES[:3]:
            journal.record(_row(file))
        assert _pending(journal) == [b"3", b"4"]
    assert os.listdir(output.parent) == ["table.parquet.journal"]  # noqa: PTH208
    with Journal(output) as journal:
        assert journal.settings == "settings"
        journal.list(FILES)
        journal.revise(_all)
        assert _pending(journal) == [b"3", b"4"]
        assert journal.answers == 3
        rows = list(journal.rows())
        assert [row.path if isinstance(row, Row) else row for row in rows] == [file.path for file in FILES]
        first = rows[0]
        assert isinstance(first, Row)
        assert first.vector is not None
        np.testing.assert_array_equal(first.vector, np.float32([10, 11, 12]))
        journal.remove()
    assert not os.listdir(output.parent)  # noqa: PTH208


def test_answers_while_the_pending_are_read(output: Path) -> None:
    with Journal(output) as journal:
        journal.list(FILES)
        seen = []
        for file in journal.pending():
            seen.append(file.path)
            journal.record(_row(file))
        assert seen == [file.path for file in FILES]
        assert _pending(journal) == []


def test_an_answer_is_written_once(output: Path) -> None:
    with Journal(output) as journal:
        journal.record(_row(FILES[0]))
        with pytest.raises(ArtifactError, match="UNIQUE"):
            journal.record(_row(FILES[0]))
        assert journal.answers == 1


def test_a_journal_without_an_answer_goes(output: Path) -> None:
    with Journal(output) as journal:
        journal.list(FILES)
        journal.start("settings")
    assert not os.listdir(output.parent)  # noqa: PTH208
    with pytest.raises(RuntimeError), Journal(output) as journal:
        raise RuntimeError
    assert not os.listdir(output.parent)  # noqa: PTH208


def test_what_is_kept_and_what_is_forgotten(output: Path) -> None:
    with Journal(output) as journal:
        journal.list(FILES)
        table = [_row(FILES[0]), dataclasses.replace(_row(FILES[1]), n_bytes=99), _row(ImageFile(b"gone", 1, 1))]
        for file in FILES[:4]:
            journal.record(_row(file))
        assert journal.keep(table) == (3, 2, 1)
        journal.revise(_all)
        assert _pending(journal) == [b"4"]  # 0 is the table's, 1 to 3 the journal's
        assert journal.answers == 3
        journal.revise(lambda path: path != b"2")
        assert _pending(journal) == [b"2", b"4"]
        journal.list([FILES[0], FILES[1]._replace(n_bytes=0), FILES[2]._replace(modified_ns=0), FILES[3]])
        assert journal.keep(table) == (3, 2, 1)
        journal.revise(_all)
        assert _pending(journal) == [b"1", b"2"]
        assert journal.answers == 1


def test_what_could_not_be_read_is_tried_again(output: Path) -> None:
    with Journal(output) as journal:
        journal.list(FILES[:2])
        journal.record(_row(FILES[0], sha256=None, error="the file may not be read"))
        journal.record(_row(FILES[1], error="no image"))
        journal.revise(_all)
        assert _pending(journal) == [b"0"]


def test_a_listing_that_fails_leaves_the_last_one(output: Path) -> None:
    def failing() -> Iterator[ImageFile]:
        yield ImageFile(b"new", 1, 1)
        raise OptionError("unreadable")

    with Journal(output) as journal:
        journal.list(FILES)
        with pytest.raises(OptionError):
            journal.list(failing())
        assert list(journal.pending()) == FILES


# ---- one at a time ----------------------------------------------------------------------------------------


def _busy(output: Path) -> None:
    with pytest.raises(OptionError, match=r"another job is writing it; wait for that one, or name another output$"):
        Journal(output)


def test_one_job_at_a_time(output: Path) -> None:
    with Journal(output) as journal:
        _busy(output)
        journal.list(FILES)
        _busy(output)
        journal.record(_row(FILES[0]))
        with Journal(output.with_name("other.parquet")):
            pass
        _busy(output)
    with Journal(output) as journal:
        assert journal.answers == 1


def test_one_process_at_a_time(output: Path) -> None:
    code = "import sys; from visionfast.embed_journal import *; from pathlib import Path; Journal(Path(sys.argv[1]))"
    with Journal(output) as journal:
        journal.record(_row(FILES[0]))
        journal.commit()
        done = subprocess.run([sys.executable, "-c", code, output], capture_output=True, text=True, check=False)
        assert "OptionError" in done.stderr
        assert "another job is writing it" in done.stderr


def test_a_job_that_finished_meanwhile(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Journal(output)
    first.record(_row(FILES[0]))
    first.commit()
    real = Journal._open

    def late(self: Journal) -> None:
        first.remove()  # between the file's being opened and its lock
        real(self)

    monkeypatch.setattr(Journal, "_open", late)
    with pytest.raises(OptionError, match=r"another job has finished it this very moment; start again$"):
        Journal(output)


# ---- what goes wrong --------------------------------------------------------------------------------------


def test_a_full_disk(output: Path) -> None:
    journal = Journal(output)
    journal.list(FILES)
    journal.record(_row(FILES[0]))
    journal.commit()
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages}")

    def fill() -> None:
        for i in range(1000):
            journal.record(Row(b"new %d" % i, 1, 1, "ab", None, np.zeros(1000, np.float32)))

    with pytest.raises(ArtifactError) as caught, journal:
        fill()
    assert str(caught.value) == (
        f"{journal.path}: cannot be written (the disk is full); what is in it is kept, and the same command goes on"
    )
    with Journal(output) as journal:
        assert journal.answers >= 1
        assert list(journal.pending())[0] == FILES[1]  # noqa: RUF015


@pytest.mark.parametrize("content", [b"a text\n" * 1000, b"SQLite format 3\0" + b"\1" * 1000])
def test_a_file_that_is_no_journal(output: Path, content: bytes) -> None:
    path = output.with_name("table.parquet.journal")
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="expected a journal of `visionfast embed`, got something else"):
        Journal(output)
    assert path.read_bytes() == content


def test_another_program_s_database(output: Path) -> None:
    path = output.with_name("table.parquet.journal")
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE answer (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(ArtifactError, match=r"got something else; move it away$"):
        Journal(output)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE answer SET vector = x'00000000'",  # numpy would spread one number over a row
        "UPDATE answer SET vector = x'000000'",
        "UPDATE answer SET vector = NULL",
        "UPDATE answer SET vector = 'twelve bytes'",
        "UPDATE answer SET error = 'and a vector'",
        "UPDATE answer SET error = x'ff', vector = NULL",
        "UPDATE answer SET bytes = 'many'",
        "UPDATE answer SET modified_ns = 0.5",
        "UPDATE answer SET sha256 = x'ff'",
        "UPDATE answer SET path = 'text' WHERE path = x'30'",
    ],
)
def test_an_answer_that_somebody_edited(output: Path, edit: str) -> None:
    _edited(output, edit)
    with Journal(output) as journal:
        with pytest.raises(ArtifactError) as caught:
            journal.check(3)
        assert str(caught.value) == (
            f"{journal.path}: damaged, or of another version (an answer in it is none); "
            "delete it to begin again, without what is in it"
        )


def _edited(output: Path, *edits: str) -> None:
    with Journal(output) as journal:
        journal.list(FILES)
        journal.start("settings")
        journal.record(_row(FILES[0]))
        journal.record(_row(FILES[1], error="no image"))
        journal.record(_row(FILES[2], sha256=None, error="not readable"))
    with Journal(output) as journal:
        journal.check(3)
        with pytest.raises(ArtifactError, match="delete it"):
            journal.check(4)
    with contextlib.closing(sqlite3.connect(output.with_name("table.parquet.journal"))) as there, there:
        for edit in edits:
            there.execute(edit)


@pytest.mark.parametrize(
    "edit",
    [
        "DROP TABLE answer",
        "DROP TABLE setting",
        "ALTER TABLE answer DROP COLUMN sha256",
        "ALTER TABLE file ADD COLUMN more",
        "CREATE TRIGGER more AFTER DELETE ON file BEGIN DELETE FROM answer; END",
    ],
)
def test_a_journal_without_its_tables(output: Path, edit: str) -> None:
    _edited(output, edit)
    with pytest.raises(
        ArtifactError, match=r"journal: damaged, or of another version \(.*\); delete it to begin again"
    ):
        Journal(output)


def test_text_that_is_none(output: Path) -> None:
    _edited(output, "UPDATE answer SET sha256 = CAST(x'ff1b' AS TEXT)")
    with Journal(output) as journal:
        journal.check(3)
        with pytest.raises(ArtifactError, match=r"damaged, or of another version \(.*UTF-8.*\); delete it") as caught:
            list(journal.rows())
        assert str(caught.value).isprintable()


def test_pages_that_are_damaged(output: Path) -> None:
    with Journal(output) as journal:
        journal.list(FILES)
        for i in range(500):
            journal.record(_row(ImageFile(b"%d" % i, 1, 1)))
    path = output.with_name("table.parquet.journal")
    content = bytearray(path.read_bytes())
    content[8192:] = b"\xaa" * (len(content) - 8192)
    path.write_bytes(content)

    def used() -> None:
        with Journal(output) as journal:
            journal.check(3)
            journal.list(FILES)
            list(journal.rows())

    with pytest.raises(
        ArtifactError, match=r"journal: damaged, or of another version \(.*\); delete it to begin again"
    ):
        used()


def test_a_folder_in_its_place(output: Path) -> None:
    output.with_name("table.parquet.journal").mkdir()
    with pytest.raises(ArtifactError, match=r"journal: cannot be opened; it should be a file that may be written$"):
        Journal(output)


def test_a_folder_that_is_not_there(output: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be written"):
        Journal(output.parent / "nothing" / "table.parquet")
