"""What counts as an image file, and how names that are no text are shown."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from embed_folders import deep_folder
from hypothesis import example, given
from hypothesis import strategies as st

from visionfast.errors import OptionError
from visionfast.image_files import ImageFile, count_deeper, image_files, name_bytes, printable, shown_name


def _listed(folder: Path) -> list[bytes]:
    found = [file.path for file in image_files(folder)]
    assert len(set(found)) == len(found)
    return sorted(found)


def test_by_suffix_in_every_folder_below(tmp_path: Path) -> None:
    for name in (
        "a.jpg",
        "b.JPEG",
        "sub/deep/c.tiff",
        "sub/folder.png/d.webp",
        ".jpg",
        "e.txt",
        "sub/png",
        "f.jpg.npz",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "empty").mkdir()
    assert _listed(tmp_path) == [b"a.jpg", b"b.JPEG", b"sub/deep/c.tiff", b"sub/folder.png/d.webp"]
    os.utime(tmp_path / "a.jpg", ns=(1, 1_700_000_000_123_456_789))
    assert ImageFile(b"a.jpg", 5, 1_700_000_000_123_456_789) in list(image_files(tmp_path))


def test_links(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "there.jpg").write_bytes(b"1234567")
    (folder / "file.jpg").symlink_to(elsewhere / "there.jpg")
    (folder / "nowhere.jpg").symlink_to("nothing")
    (folder / "itself.jpg").symlink_to("itself.jpg")
    (folder / "folder").symlink_to(elsewhere)
    (folder / "folder.jpg").symlink_to(elsewhere)
    (folder / "round").symlink_to(folder)
    os.mkfifo(folder / "pipe.jpg")
    assert _listed(folder) == [b"file.jpg", b"itself.jpg", b"nowhere.jpg", b"pipe.jpg"]
    assert {file.path: file.n_bytes for file in image_files(folder)}[b"file.jpg"] == 7
    (tmp_path / "link").symlink_to(folder)
    assert _listed(tmp_path / "link") == _listed(folder)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")).mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe/a\n\x80.jpg")).write_bytes(b"")
    assert _listed(tmp_path) == [b"\xff\xfe/a\n\x80.jpg"]
    assert printable(b"\xff\xfe/a\n\x80.jpg") == "\\xff\\xfe/a\\n\\x80.jpg"
    assert printable("a\x1b[2J\x9b\u202eb".encode()) == r"a\x1b[2J\x9b\u202eb"


def test_a_time_that_no_int64_holds(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    found = list((tmp_path / "a.jpg").stat())
    late = os.stat_result(found, {"st_mtime_ns": 2**64})
    assert ImageFile.of(b"a", late).modified_ns == 2**63 - 1
    early = os.stat_result(found, {"st_mtime_ns": -(2**64)})
    assert ImageFile.of(b"a", early).modified_ns == 1 - 2**63


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file.jpg").write_bytes(b"")
    with pytest.raises(OptionError, match=r"file\.jpg: expected a folder with images, got a file$"):
        next(image_files(tmp_path / "file.jpg"))
    with pytest.raises(OptionError, match=r"nothing: cannot be read \(No such file or directory\)$"):
        next(image_files(tmp_path / "nothing"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(OptionError, match=r"closed: cannot be read \(Permission denied\)$"):
        list(image_files(tmp_path))


def test_a_folder_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    deep = deep_folder(tmp_path / "closed")
    for name in ("a.jpg", "closed/b.jpg", "open/c.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(OptionError, match=r"d: cannot be read \(File name too long\)$"):
        list(image_files(tmp_path))
    told: list[tuple[bytes, str]] = []
    found = [file.path for file in image_files(tmp_path, unread=lambda *what: told.append(what))]
    assert sorted(found) == [b"a.jpg", b"closed/b.jpg", b"open/c.jpg"]
    ((path, reason),) = told
    assert reason == "File name too long"
    assert path.startswith(b"closed/" + b"d" * 250)
    assert deep.startswith(os.fsdecode(path))
    with pytest.raises(OptionError, match="cannot be read"):
        next(image_files(tmp_path / "nothing", unread=lambda *what: told.append(what)))


_NAMES = st.lists(st.sampled_from([b"a", b"\\", b"\\xff", b"\\x7f", b"x", b"ff", b"\xff", b"\x80", "ü".encode(), b"/"]))


@given(_NAMES.map(b"".join) | st.binary())
@example(b"")
@example(rb"bad\xff.jpg")
@example(b"bad\xff.jpg")
@example(rb"bad\\xff.jpg")
@example(b"bad\\\xff.jpg")
def test_a_shown_name_leads_back(path: bytes) -> None:
    shown = shown_name(path)
    assert name_bytes(shown) == path
    shown.encode("utf-8")  # no surrogates
    if re.search(rb"\\x[89a-f][0-9a-f]", path) is None and path.decode("utf-8", "ignore").encode() == path:
        assert shown == path.decode()


def test_images_deeper_down(tmp_path: Path) -> None:
    assert count_deeper(tmp_path) == 0
    for name in ("a.jpg", "sub/b.JPG", "sub/deep/c.png", "sub/d.txt", ".hidden/e.jpg", "sub/.hidden/f.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert count_deeper(tmp_path) == 2
    assert count_deeper(tmp_path / "sub" / "deep") == 0
    assert count_deeper(tmp_path / "nowhere") == 0
