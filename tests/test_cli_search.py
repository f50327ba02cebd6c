"""`search` as a person meets it: a folder that was embedded, and the command line in this process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from small_embedder import build_small, pictures

from visionfast.artifacts import read_manifest, write_manifest
from visionfast.cli import app
from visionfast.embed_table import Row, TableInfo, engine_identity, read_info, read_rows, write_table
from visionfast.embedder import Embedder
from visionfast.embedding_search import cosines
from visionfast.errors import ArtifactError, OptionError
from visionfast.preprocess.limits import DecodeLimits

VARIANT = "openvino-fp32-cpu-56x42-b1"


def search(*arguments: str | int | Path) -> int:
    """Its exit code."""
    return int(app(["search", *map(str, arguments)], standalone_mode=False) or 0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `VISIONFAST_HOME` with the engine `small`."""
    pytest.importorskip("openvino", reason="engines are built with openvino: pip install 'visionfast[openvino]'")
    folder = tmp_path_factory.mktemp("home")
    (folder / "engines" / "small").mkdir(parents=True)
    build_small(folder / "engines" / "small" / VARIANT)
    return folder


@pytest.fixture(scope="module")
def embedder(home: Path) -> Iterator[Embedder]:
    with Embedder.open(home / "engines" / "small" / VARIANT) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """photos/ with 0.png to 5.png."""
    photos = tmp_path_factory.mktemp("folder") / "photos"
    photos.mkdir()
    for i, pixels in enumerate(pictures(6)):
        (photos / f"{i}.png").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    return photos


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture that is not in the folder."""
    path = tmp_path_factory.mktemp("other") / "other.png"
    path.write_bytes(cv2.imencode(".png", pictures(1, seed=9)[0])[1].tobytes())
    return path


@pytest.fixture(scope="module")
def embedded(home: Path, folder: Path) -> Path:
    """The table beside photos/, as `visionfast embed` writes it."""
    table = folder.parent / "embeddings.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISIONFAST_HOME", str(home))
        assert not app(["embed", "small", str(folder), "-o", str(table)], standalone_mode=False)
    return table


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISIONFAST_HOME", str(home))


def _records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_nearest_first_in_words_and_json(
    embedded: Path, embedder: Embedder, folder: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert search(embedded, other, "-k", 4, "--json", "-") == 0
    out, said = capsys.readouterr()
    (record,) = _records(out)
    assert record["file"] == str(other)
    paths = sorted(folder.iterdir())
    similarity = cosines(embedder(paths).cls, embedder(other).cls[0])
    expected = sorted(range(6), key=lambda i: -similarity[i])[:4]
    assert [hit["file"] for hit in record["nearest"]] == [paths[i].name for i in expected]
    assert [hit["row"] for hit in record["nearest"]] == expected
    found = [hit["similarity"] for hit in record["nearest"]]
    np.testing.assert_allclose(found, similarity[expected], atol=1e-5)
    lines = said.splitlines()  # stdout carries the JSON
    assert lines[0] == f"{other}:"
    assert lines[1].split() == ["1", f"{found[0]:.4f}", paths[expected[0]].name]
    assert len(lines) == 5


def test_an_image_of_the_table_takes_no_engine(
    embedded: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VISIONFAST_HOME", str(tmp_path))  # where there are none
    copy = tmp_path / "another name.png"
    shutil.copy(folder / "3.png", copy)
    assert search(embedded, copy, "--json", "-") == 0
    (record,) = _records(capsys.readouterr().out)
    assert record["nearest"][0] == {"file": "3.png", "similarity": 1.0, "row": 3}
    assert len(record["nearest"]) == 6  # there are no ten


def test_a_bad_query_harms_no_other(
    embedded: Path, folder: Path, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad\nname.jpg"
    bad.write_text("no picture")
    assert search(embedded, bad, other, tmp_path / "gone.jpg", folder / "0.png", "--json", "-", "-k", 1) == 1
    out, said = capsys.readouterr()
    records = _records(out)
    assert [record.get("error", {}).get("kind") for record in records] == ["format", None, "not-found", None]
    assert records[3]["nearest"][0]["file"] == "0.png"
    assert sum(line.startswith("visionfast: ") for line in said.splitlines()) == 2


def test_a_damaged_query_is_told_of_no_option_that_is_not_there(
    embedded: Path, folder: Path, photographs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(photographs[0].read_bytes()[:20_000])
    assert search(embedded, cut, folder / "0.png", "-k", 2, "--json", "-", "--save", tmp_path / "sheet.png") == 1
    out, said = capsys.readouterr()
    (line,) = [line for line in said.splitlines() if line.startswith("visionfast: ")]
    assert line.startswith(f"visionfast: {cut}: the JPEG is cut short or damaged")
    assert line.endswith("; a whole file is needed")
    assert line.endswith(_records(out)[0]["error"]["message"])
    assert _greys(tmp_path / "sheet.png") == 1  # the query's own


def test_only_bad_queries(embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search(embedded, tmp_path / "gone.jpg", "--save", tmp_path / "sheet.png") == 1
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "sheet.png").exists()


# ---- engines ----------------------------------------------------------------------------------------------


def test_an_engine_that_is_named(embedded: Path, home: Path, other: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(home / "engines" / "small" / VARIANT, moved)
    assert search(embedded, other, "--engine", moved) == 0


def test_of_several_engines_the_one_that_made_the_table(
    embedded: Path, home: Path, folder: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(home, tmp_path / "home")
    engines = tmp_path / "home" / "engines" / "small"
    another = shutil.copytree(engines / VARIANT, engines / "another")
    write_manifest(another, dataclasses.replace(read_manifest(another), weights_sha256="f" * 64))
    monkeypatch.setenv("VISIONFAST_HOME", str(tmp_path / "home"))
    assert search(embedded, other, "--engine", "small") == 0
    table = tmp_path / "table.parquet"
    embed = ["embed", "small", str(folder), "-o", str(table)]
    with pytest.raises(
        ArtifactError, match=f"^small: 2 engines are there; give one of: small/another, small/{VARIANT}$"
    ):
        app(embed, standalone_mode=False)
    assert not app([embed[0], f"small/{VARIANT}", *embed[2:]], standalone_mode=False)
    assert not app(embed, standalone_mode=False)


def test_no_engine_at_hand(embedded: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISIONFAST_HOME", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"^.*embeddings.parquet: its engine is not at hand, --engine says where"):
        search(embedded, other)


@pytest.mark.parametrize("query", ["in the table", "another"])
def test_another_engine_is_refused(
    embedded: Path, home: Path, folder: Path, other: Path, tmp_path: Path, query: str
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(home / "engines" / "small" / VARIANT, changed)
    write_manifest(changed, dataclasses.replace(read_manifest(changed), weights_sha256="f" * 64))
    with pytest.raises(OptionError, match=r"changed: expected the engine that .* was made with, small/openvino.*, got"):
        search(embedded, folder / "0.png" if query == "in the table" else other, "--engine", changed)


def test_an_engine_that_was_built_anew_under_the_name(
    embedded: Path, home: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(home, tmp_path / "home")
    engine = tmp_path / "home" / "engines" / "small" / VARIANT
    write_manifest(engine, dataclasses.replace(read_manifest(engine), weights_sha256="f" * 64))
    monkeypatch.setenv("VISIONFAST_HOME", str(tmp_path / "home"))
    with pytest.raises(OptionError, match=r"expected the engine that .* was made with"):
        search(embedded, other)


def test_a_query_is_read_within_the_tables_limits(home: Path, embedder: Embedder, other: Path, tmp_path: Path) -> None:
    manifest = embedder.manifest
    assert manifest is not None
    info = TableInfo(
        "small",
        "",
        "",
        engine_identity(manifest),
        f"small/{VARIANT}",
        embedder.spec.preprocess,
        DecodeLimits(max_pixels=10),
        embedder.dim,
        False,
        None,
        ".",
        "0",
    )
    write_table(tmp_path / "t.parquet", info, [Row(b"a.png", 1, 1, "0" * 64, None, np.ones(embedder.dim, np.float32))])
    assert search(tmp_path / "t.parquet", other) == 1


# ---- the contact sheet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "PNG"])
def test_a_sheet(embedded: Path, folder: Path, other: Path, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / "new" / f"sheet.{suffix}"
    assert search(embedded, folder / "0.png", other, "-k", 3, "--save", target) == 0
    sheet = cv2.imread(str(target))
    assert sheet is not None
    assert sheet.shape[1] > sheet.shape[0]


@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_opencv_has_nothing_to_say(
    embedded: Path, folder: Path, tmp_path: Path, suffix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert search(embedded, folder / "0.png", "--save", tmp_path / f"sheet.{suffix}") == 0
    assert capfd.readouterr().err == ""


def _greys(path: Path) -> int:
    """Tiles of a sheet that show no image."""
    sheet = cv2.imread(str(path))
    return round(np.count_nonzero((sheet == 200).all(axis=2)) / 160**2)


def test_images_are_below_the_folder_that_was_embedded_or_another(
    embedded: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "sheet.png"
    monkeypatch.chdir(tmp_path)  # not where they are
    assert search(embedded, folder / "0.png", "-k", 5, "--save", target) == 0
    assert _greys(target) == 0
    moved = tmp_path / "moved" / "embeddings.parquet"
    moved.parent.mkdir()
    shutil.copy(embedded, moved)
    assert search(moved, folder / "0.png", "-k", 5, "--save", target) == 0
    assert _greys(target) == 5
    where = moved.parent / "photos"
    told = f"visionfast: 5 of 5 pictures not found below {where}; --images says where they are\n"
    assert capsys.readouterr().err == told
    assert search(moved, folder / "0.png", "-k", 5, "--save", target, "--images", folder) == 0
    assert _greys(target) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", [b"../secret.png", b"/{folder}/secret.png", b"a/../../secret.png", b"with\\x00"])
def test_a_table_from_elsewhere_opens_nothing_outside(
    embedder: Embedder, folder: Path, tmp_path: Path, name: bytes
) -> None:
    shutil.copy(folder / "0.png", tmp_path / "secret.png")
    (tmp_path / "images" / "a").mkdir(parents=True)
    path = name.replace(b"{folder}", os.fsencode(tmp_path).lstrip(b"/"))
    info = TableInfo("small", "", "", "?", "?", embedder.spec.preprocess, DecodeLimits(), 2, False, None, "images", "0")
    query = tmp_path / "query.png"
    shutil.copy(folder / "1.png", query)
    sha256 = hashlib.sha256(query.read_bytes()).hexdigest()
    write_table(tmp_path / "t.parquet", info, [Row(path, 1, 1, sha256, None, np.ones(2, np.float32))])
    assert search(tmp_path / "t.parquet", query, "--save", tmp_path / "sheet.png") == 0
    assert _greys(tmp_path / "sheet.png") == 1


def test_names_that_are_no_text(home: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = tmp_path / os.fsdecode(b"\xff photos")
    photos.mkdir()
    odd = os.fsdecode(b"caf\xe9 \\xe9.png")
    shutil.copy(folder / "0.png", photos / odd)
    table = tmp_path / "t.parquet"
    assert not app(["embed", "small", str(photos), "-o", str(table)], standalone_mode=False)
    capsys.readouterr()
    assert search(table, photos / odd, "--json", "-", "--save", tmp_path / "sheet.png") == 0
    (record,) = _records(capsys.readouterr().out)
    assert record["nearest"][0]["similarity"] == 1
    assert _greys(tmp_path / "sheet.png") == 0


# ---- options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-k", "0"), "^-k 0: expected at least 1"),
        (("--save", "sheet.txt"), r"^--save sheet.txt: expected a file that ends in \.png"),
        (("--save", "sheet"), "^--save sheet: expected a file that ends in"),
        (("--json", ""), "^--json '': expected a file to write"),
        (("--engine", "detector"), "^detector: "),
        (("--threads", "0"), "threads"),
    ],
)
def test_bad_options(embedded: Path, other: Path, options: tuple[str, ...], words: str) -> None:
    with pytest.raises((OptionError, ArtifactError), match=words):
        search(embedded, other, *options)


def test_nothing_that_is_read_is_overwritten(embedded: Path, folder: Path, tmp_path: Path) -> None:
    query = tmp_path / "query.png"
    shutil.copy(folder / "0.png", query)
    before = embedded.read_bytes(), query.read_bytes()
    for option, target in (("--save", query), ("--json", query), ("--json", embedded)):
        with pytest.raises(OptionError, match=f"^{option} .*: would overwrite what is read"):
            search(embedded, query, option, target)
    assert (embedded.read_bytes(), query.read_bytes()) == before


def test_no_image_of_the_table_is_overwritten(embedded: Path, folder: Path, other: Path, tmp_path: Path) -> None:
    shutil.copytree(folder.parent, tmp_path / "moved", symlinks=True)
    table, photos = tmp_path / "moved" / embedded.name, tmp_path / "moved" / "photos"
    before = {path.name: path.read_bytes() for path in photos.iterdir()}
    (tmp_path / "soft.png").symlink_to(photos / "3.png")
    os.link(photos / "3.png", tmp_path / "hard.png")
    for target in (photos / "5.png", photos / ".." / "photos" / "0.png", tmp_path / "soft.png", tmp_path / "hard.png"):
        for option in ("--save", "--json"):
            with pytest.raises(OptionError, match=f"^{option} .*: would overwrite an image of the table; name another"):
                search(table, other, option, target)
    (photos / "2.png").write_bytes(b"changed since")  # by its name
    with pytest.raises(OptionError, match="would overwrite an image of the table"):
        search(table, other, "--save", photos / "2.png")
    with pytest.raises(OptionError, match="would overwrite an image of the table"):
        search(table, other, "--save", folder / "1.png", "--images", folder)
    assert {path.name: path.read_bytes() for path in photos.iterdir()} == before | {"2.png": b"changed since"}
    assert search(table, other, "--save", photos / "new.png") == 0  # a name that is free is free
    assert search(table, other, "--save", photos / "new.png") == 0  # and may be written again


def test_no_engine_is_overwritten(embedded: Path, home: Path, other: Path) -> None:
    engine = home / "engines" / "small" / VARIANT
    before = {path: path.read_bytes() for path in engine.rglob("*") if path.is_file()}
    assert {path.relative_to(engine).parts[0] for path in before} > {"engine.json", "cache"}
    for path in before:
        with pytest.raises(OptionError, match=r"^--json .*: would overwrite a file of an engine; name another file$"):
            search(embedded, other, "--json", path)
    assert {path: path.read_bytes() for path in engine.rglob("*") if path.is_file()} == before


def test_no_journal_is_overwritten_and_nothing_twice(embedded: Path, other: Path, tmp_path: Path) -> None:
    shutil.copy(embedded, tmp_path / "t.parquet")
    journal = tmp_path / "t.parquet.journal"
    journal.write_bytes(b"of a run that was stopped")
    with pytest.raises(OptionError, match="would overwrite what is read"):
        search(tmp_path / "t.parquet", other, "--json", journal)
    both = tmp_path / "both.png"
    with pytest.raises(OptionError, match=r"^--json .*both\.png: is what --save writes, too; name another file$"):
        search(embedded, other, "--save", both, "--json", both)
    assert not both.exists()


def test_a_terminal_only_shows_what_names_say(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    name = "a\x1b]0;title\x07\x1b[2J\u202egpj.png"
    shutil.copy(folder / "0.png", photos / name)
    (photos / "b\x9bad.png").write_bytes(b"no picture")
    table = tmp_path / "t\x1b[31m.parquet"
    assert app(["embed", "small", str(photos), "-o", str(table)], standalone_mode=False) == 1
    told = capsys.readouterr()
    assert search(table, photos / name, photos / "b\x9bad.png", "--save", tmp_path / "sheet.png") == 1
    asked = capsys.readouterr()
    for text in (told.out, told.err, asked.out, asked.err):
        assert all(line.isprintable() for line in text.splitlines())
        assert "\x1b" not in text
    assert r"b\x9bad.png: " in told.err
    assert r"a\x1b]0;title\x07\x1b[2J\u202egpj.png" in asked.out


def test_a_table_that_names_a_long_folder_and_files(
    embedded: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dataclasses.replace(row, path=row.path * 2000) for row in read_rows(embedded)]
    made = dataclasses.replace(read_info(embedded), folder="f" * 5000)
    write_table(tmp_path / "t.parquet", made, sorted(rows, key=lambda row: row.path))
    assert search(tmp_path / "t.parquet", folder / "0.png", "-k", "2", "--save", tmp_path / "sheet.png") == 0
    assert search(tmp_path / "t.parquet", folder / "0.png", "--exclude-self", "--save", tmp_path / "sheet.png") == 0
    assert "pictures not found below" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["e" * 5000, "../" * 900, "e\x1b[2J"])
def test_an_engine_of_any_name(embedded: Path, other: Path, tmp_path: Path, name: str) -> None:
    made = dataclasses.replace(read_info(embedded), engine_name=name)
    write_table(tmp_path / "t.parquet", made, read_rows(embedded))
    with pytest.raises((ArtifactError, OptionError), match=r"t\.parquet"):
        search(tmp_path / "t.parquet", other)


def test_no_table(other: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("gone.parquet", "pipe"):
        with pytest.raises(ArtifactError, match=f"{name}: "):
            search(tmp_path / name, other)


def test_a_picture_is_no_table(other: Path) -> None:
    with pytest.raises(ArtifactError, match="expected a table of `visionfast embed`"):
        search(other, other)


# ---- what is looked at ------------------------------------------------------------------------------------


def test_without_the_query_itself(home: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, table = tmp_path / "photos", tmp_path / "table.parquet"
    shutil.copytree(folder, photos)
    shutil.copy(photos / "0.png", photos / "copy of 0.png")
    assert not app(["embed", "small", str(photos), "-o", str(table)], standalone_mode=False)
    (photos / "1.png").write_bytes(
        (folder / "2.png").read_bytes()
    )  # changed since: known by its path, and 2 by its bytes
    queries = (photos / "0.png", photos / "1.png")
    for options, left_out in (
        ((), (set(), set())),
        (("--exclude-self",), ({"0.png", "copy of 0.png"}, {"1.png", "2.png"})),
    ):
        capsys.readouterr()
        assert search(table, *queries, "-k", 5, "--json", "-", *options) == 0
        for record, names in zip(_records(capsys.readouterr().out), left_out, strict=True):
            found = [hit["file"] for hit in record["nearest"]]
            assert len(found) == 5
            assert not names & set(found)
    assert search(table, photos / "0.png", "-k", 1, "--exclude-self", "--images", tmp_path / "elsewhere") == 0


def test_images_in_folders_below_are_not_looked_at(
    embedded: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queries = tmp_path / "queries [2]"
    (queries / "sub" / "deep").mkdir(parents=True)
    for name in ("sub/1.png", "sub/deep/2.png"):
        shutil.copy(folder / "0.png", queries / name)
    words = (
        f"2 images are in folders below {queries}, and not looked at; '{tmp_path}/queries [[]2]/**/*' takes them too"
    )
    with pytest.raises(OptionError) as caught:
        search(embedded, queries)
    assert str(caught.value) == f"{queries}: expected a directory with images, found none in it; {words}"
    shutil.copy(folder / "1.png", queries / "0.png")
    assert search(embedded, queries, "--json", "-") == 0
    out, said = capsys.readouterr()
    assert [record["file"] for record in _records(out)] == [f"{queries}/0.png"]
    assert said.splitlines()[0] == f"visionfast: {words}"
    assert search(embedded, f"{tmp_path}/queries [[]2]/**/*", "--json", "-") == 0
    assert len(_records(capsys.readouterr().out)) == 3
