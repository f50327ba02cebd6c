"""The batch job: dense features beside the table, and what does not go together with one that is there."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the small engine is exported with torch: pip install 'visionfast[build]'")
pytest.importorskip("openvino", reason="the small engine runs in openvino: pip install 'visionfast[openvino]'")

from embed_folders import StoppedError, beside, rows_of, stop_at, write_photos
from small_embedder import build_small

from visionfast import embed_job
from visionfast.backends.fake import FakeRunner
from visionfast.embed_patches import PatchFolder
from visionfast.embed_table import engine_identity, read_info
from visionfast.embedder import Embedder
from visionfast.errors import ArtifactError, OptionError
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


# ---- dense features ---------------------------------------------------------------------------------------


def _npz(output: Path) -> dict[str, bytes]:
    folder = output.with_name("table.parquet.patches")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("dtype", "normalise"), [("float32", False), ("float32", True), ("float16", False)])
def test_dense_features(embedder: Embedder, photos: Path, output: Path, dtype: Any, normalise: bool) -> None:
    report = embed_job.embed_folder(embedder, photos, output, patches=dtype, normalise=normalise)
    assert report.embedded == 11
    assert _npz(output).keys() == {f"{name}.npz" for name in rows_of(output)}
    found = np.load(output.parent / "table.parquet.patches" / "sub" / "deep" / "d.jpg.npz")
    expected = embedder(photos / "sub" / "deep" / "d.jpg", normalise=normalise)
    assert expected.patches is not None
    assert found["patches"].dtype == dtype
    np.testing.assert_array_equal(found["patches"], expected.patches[0].astype(dtype))
    np.testing.assert_array_equal(found["cls"], expected.cls[0])
    np.testing.assert_array_equal(found["cls"], rows_of(output)["sub/deep/d.jpg"].vector)
    assert read_info(output).patches == dtype


def test_dense_features_of_a_stopped_run(embedder: Embedder, photos: Path, output: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole" / "table.parquet"
    embed_job.embed_folder(embedder, photos, whole, patches="float16")
    with pytest.raises(StoppedError):
        embed_job.embed_folder(embedder, photos, output, patches="float16", progress=stop_at(5))
    (output.parent / "table.parquet.patches" / "a.png.npz").unlink()
    (output.parent / "table.parquet.patches" / ".partial").write_bytes(b"of a writer that was killed")
    report = embed_job.embed_folder(embedder, photos, output, patches="float16")
    assert (report.embedded, report.kept) == (7, 4)
    assert output.read_bytes() == whole.read_bytes()
    assert _npz(output) == _npz(whole)


def test_dense_features_that_are_missing_changed_or_gone(embedder: Embedder, photos: Path, output: Path) -> None:
    embed_job.embed_folder(embedder, photos, output, patches="float32")
    before, table = _npz(output), output.read_bytes()
    (output.parent / "table.parquet.patches" / "b.jpg.npz").unlink()
    report = embed_job.embed_folder(embedder, photos, output, patches="float32")
    assert (report.embedded, report.kept) == (1, 10)
    assert (_npz(output), output.read_bytes()) == (before, table)
    (photos / "sub" / "deep" / "d.jpg").unlink()
    (photos / "b.jpg").write_bytes(b"no picture")
    embed_job.embed_folder(embedder, photos, output, patches="float32")
    assert _npz(output).keys() == before.keys() - {"sub/deep/d.jpg.npz", "b.jpg.npz"}
    assert not (output.parent / "table.parquet.patches" / "sub" / "deep").exists()
    assert not embed_job.embed_folder(embedder, photos, output, patches="float32").written


def test_names_that_dense_features_cannot_have(embedder: Embedder, photos: Path, output: Path) -> None:
    long = f"{'l' * 250}.jpg"
    shutil.copy(photos / "b.jpg", photos / long)
    target = output.parent / "table.parquet.patches" / "b.jpg.npz"
    target.mkdir(parents=True)
    report = embed_job.embed_folder(embedder, photos, output, patches="float16")
    assert report.bad_files == (
        ("b.jpg", "its patches cannot be written (Is a directory)"),
        (long, "its patches cannot be written (File name too long)"),
    )
    assert not embed_job.embed_folder(embedder, photos, output, patches="float16").written
    target.rmdir()
    report = embed_job.embed_folder(embedder, photos, output, patches="float16")
    assert (report.embedded, report.bad) == (1, 1)
    assert target.is_file()


def test_patches_of_a_file_that_is_gone_after_a_stop(embedder: Embedder, photos: Path, output: Path) -> None:
    with pytest.raises(StoppedError):
        embed_job.embed_folder(embedder, photos, output, patches="float16", progress=stop_at(11))
    assert len(_npz(output)) == 11
    shutil.rmtree(photos / "sub")
    assert embed_job.embed_folder(embedder, photos, output, patches="float16").kept == 9
    assert _npz(output).keys() == {f"{name}.npz" for name in rows_of(output)}


def test_a_name_for_patches_is_tried_again_after_a_stop(embedder: Embedder, photos: Path, output: Path) -> None:
    target = output.parent / "table.parquet.patches" / "a.png.npz"
    target.mkdir(parents=True)
    with pytest.raises(StoppedError):
        embed_job.embed_folder(embedder, photos, output, patches="float16", progress=stop_at(5))
    target.rmdir()
    assert not embed_job.embed_folder(embedder, photos, output, patches="float16").bad
    assert target.is_file()


def test_no_two_images_have_one_file_of_patches(embedder: Embedder, photos: Path, output: Path) -> None:
    names = ["b.jpg.npz/c.jpg", "b.jpg.npz_/c.jpg", "b.jpg.NPZ__/c.jpg", ".partial/c.jpg", "sub/.partial_/c.jpg"]
    names += ["b.jpg.npz.jpg", "b.jpg.npz/b.jpg.npz/c.jpg"]
    for name in names:
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / "b.jpg", photos / name)
    report = embed_job.embed_folder(embedder, photos, output, patches="float16")
    assert report.bad_files == ()
    assert len(_npz(output)) == 11 + len(names)
    assert {"b.jpg.npz", "b.jpg.npz_/c.jpg.npz", "b.jpg.npz__/c.jpg.npz", ".partial_/c.jpg.npz"} < _npz(output).keys()
    assert not embed_job.embed_folder(embedder, photos, output, patches="float16").written
    shutil.rmtree(photos / "b.jpg.npz")
    embed_job.embed_folder(embedder, photos, output, patches="float16")
    assert len(_npz(output)) == 11 + len(names) - 2


_PARTS = st.sampled_from(
    [b"a.jpg", b"a.jpg.npz", b"a.jpg.npz_", b"A.JPG.NPZ", b".partial", b".partial_", b".npz", b"_"]
)


@given(st.lists(st.lists(_PARTS, min_size=1, max_size=3).map(b"/".join), max_size=8, unique=True))
def test_places_of_patches_are_apart(paths: list[bytes]) -> None:
    folder = PatchFolder(Path("table.parquet"), "float16")
    files = [folder.file(path + b".jpg") for path in paths]
    assert len(set(files)) == len(files)
    taken = {*files, folder.path / ".partial"}
    assert taken.isdisjoint(parent for file in files for parent in file.parents)


def test_tables_of_almost_one_name_have_patches_of_their_own(embedder: Embedder, photos: Path, output: Path) -> None:
    outputs = [output.with_name(name) for name in ("a.x", "a.y", "a", "a.parquet")]
    for each in outputs:
        embed_job.embed_folder(embedder, photos, each, patches="float16", normalise=each.name == "a.y")
    assert beside(output) == sorted([f"{each.name}{end}" for each in outputs for end in ("", ".patches")])
    lengths = [np.linalg.norm(np.load(f"{each}.patches/b.jpg.npz")["cls"]) for each in outputs]
    assert [bool(abs(length - 1) < 1e-4) for length in lengths] == [False, True, False, False]


def test_half_precision_has_an_end(embedder: Embedder, photos: Path, output: Path) -> None:
    graph = embedder.spec.graphs[0]
    runner = FakeRunner(graph, lambda feeds: {"cls": 1e6, "patches": -1e6})
    with Embedder(embedder.spec, [runner], manifest=embedder.manifest) as loud:
        embed_job.embed_folder(loud, photos, output, patches="float16")
    found = np.load(output.parent / "table.parquet.patches" / "b.jpg.npz")
    assert (found["patches"] == -65504).all()
    assert (found["cls"] == 1e6).all()


# ---- what does not go together ----------------------------------------------------------------------------


@pytest.mark.parametrize("unfinished", [False, True])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"normalise": True}, "made without --normalise, this is with it"),
        ({"patches": "float16"}, "made without --features patch, this is with it"),
        (
            {"limits": DecodeLimits(allow_truncated=True)},
            "made without --allow-truncated, this is with it",
        ),
        ({"limits": DecodeLimits(max_pixels=5000)}, "made with max_pixels 100000000, this is with max_pixels 5000"),
    ],
)
def test_other_options(
    embedder: Embedder, photos: Path, output: Path, options: dict[str, Any], words: str, unfinished: bool
) -> None:
    there = _half_done(embedder, photos, output, unfinished)
    before = there.read_bytes()
    with pytest.raises(OptionError) as caught:
        embed_job.embed_folder(embedder, photos, output, **options)
    assert str(caught.value) == f"{there}: {words}; name another output, or delete it"
    assert there.read_bytes() == before
    assert beside(output) == [there.name]


def _half_done(embedder: Embedder, photos: Path, output: Path, unfinished: bool) -> Path:
    """A table, or the journal of one that was stopped."""
    if not unfinished:
        embed_job.embed_folder(embedder, photos, output, engine_name="small/openvino")
        return output
    with pytest.raises(StoppedError):
        embed_job.embed_folder(embedder, photos, output, engine_name="small/openvino", progress=stop_at(5))
    return output.with_name("table.parquet.journal")


def test_fewer_options(embedder: Embedder, photos: Path, output: Path) -> None:
    limits = DecodeLimits(allow_truncated=True)
    made: dict[str, Any] = {"normalise": True, "patches": "float16", "limits": limits}
    embed_job.embed_folder(embedder, photos, output, **made)
    for options, words in (
        (made | {"normalise": False}, "made with --normalise, this is without it"),
        (made | {"patches": None}, "made with --features patch, this is without it"),
        (made | {"patches": "float32"}, "made with patches in float16, this is with float32"),
        (made | {"limits": DecodeLimits()}, "made with --allow-truncated, this is without it"),
    ):
        with pytest.raises(OptionError, match=f": {words}; name another output"):
            embed_job.embed_folder(embedder, photos, output, **options)


@pytest.mark.parametrize("name", ["table.csv", "TABLE.JSON", "table.npz", "photo.jpg"])
def test_a_name_of_another_format(embedder: Embedder, photos: Path, tmp_path: Path, name: str) -> None:
    better = Path(name).with_suffix(".parquet")
    with pytest.raises(OptionError, match=f"{name}: the table is a Parquet file; call it .*{better}$"):
        embed_job.embed_folder(embedder, photos, tmp_path / name)


def test_a_keyword_that_is_spelled_another_way(embedder: Embedder, photos: Path, output: Path) -> None:
    options: dict[str, Any] = {"normalize": True}
    with pytest.raises(TypeError, match="unexpected keyword argument 'normalize'; expected normalise, "):
        embed_job.embed_folder(embedder, photos, output, **options)


@pytest.mark.parametrize("unfinished", [False, True])
def test_what_was_begun(embedder: Embedder, photos: Path, output: Path, unfinished: bool) -> None:
    assert embed_job.begun(output) is None
    _half_done(embedder, photos, output, unfinished)
    found = embed_job.begun(output)
    assert found is not None
    assert embedder.manifest is not None
    assert found.engine == engine_identity(embedder.manifest)
    assert not embed_job.embed_folder(embedder, photos, output, engine_name="small/openvino").bad


@pytest.mark.parametrize("name", ["table.parquet", "table.parquet.journal"])
def test_what_was_begun_by_another_program(output: Path, name: str) -> None:
    output.parent.mkdir()
    output.with_name(name).write_bytes(b"neither a table nor a journal")
    assert embed_job.begun(output) is None
    assert output.with_name(name).read_bytes() == b"neither a table nor a journal"


@pytest.mark.parametrize("name", ["small/openvino", "other/openvino"])
@pytest.mark.parametrize("unfinished", [False, True])
def test_another_engine(embedder: Embedder, photos: Path, output: Path, unfinished: bool, name: str) -> None:
    there = _half_done(embedder, photos, output, unfinished)
    assert embedder.manifest is not None
    other = dataclasses.replace(embedder.manifest, weights_sha256="1" * 64)
    with (
        Embedder(embedder.spec, [FakeRunner(embedder.spec.graphs[0])], manifest=other) as another,
        pytest.raises(OptionError) as caught,
    ):
        embed_job.embed_folder(another, photos, output, engine_name=name)
    was, asked = "small/openvino", name
    if name == was:
        was, asked = (f"{name} ({engine_identity(manifest):.12}…)" for manifest in (embedder.manifest, other))
    assert str(caught.value) == (
        f"{there}: made with the engine {was}, this is with {asked}; name another output, or delete it"
    )


def test_the_same_engine_elsewhere_is_the_same(
    embedder: Embedder, photos: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed_job.embed_folder(embedder, photos, output, engine_name="here/openvino")
    assert embedder.manifest is not None
    later = dataclasses.replace(embedder.manifest, created="2027-01-01T00:00:00+00:00", visionfast_version="9")
    monkeypatch.setattr(embed_job, "__version__", "9")
    with Embedder(embedder.spec, [FakeRunner(embedder.spec.graphs[0])], manifest=later) as moved:
        assert not embed_job.embed_folder(moved, photos, output, engine_name="there/openvino").written


def test_another_folder(embedder: Embedder, photos: Path, output: Path, tmp_path: Path) -> None:
    embed_job.embed_folder(embedder, photos, output)
    shutil.copytree(photos, tmp_path / "copy")
    with pytest.raises(OptionError) as caught:
        embed_job.embed_folder(embedder, tmp_path / "copy", output)
    assert str(caught.value) == (
        f"{output}: made of {photos}, this is another folder; name another output, or delete it"
    )
    link = tmp_path / "link"
    link.symlink_to(photos)
    assert not embed_job.embed_folder(embedder, link, output).written
    link.unlink()
    photos.rename(tmp_path / "moved")
    report = embed_job.embed_folder(embedder, tmp_path / "moved", output)
    assert (report.embedded, report.kept, report.written) == (0, 11, True)
    assert read_info(output).folder == "../moved"


def test_the_output_may_stand_among_the_images(embedder: Embedder, photos: Path) -> None:
    report = embed_job.embed_folder(embedder, photos, photos / "table.parquet", patches="float16")
    assert report.files == 11
    assert read_info(photos / "table.parquet").folder == "."
    assert not embed_job.embed_folder(embedder, photos, photos / "table.parquet", patches="float16").written


def test_a_link_stays_one(embedder: Embedder, photos: Path, output: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.parquet"
    link.symlink_to(output)
    embed_job.embed_folder(embedder, photos, link)
    assert link.is_symlink()
    assert beside(output) == ["table.parquet"]


def test_no_images(embedder: Embedder, output: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").write_text("")
    with pytest.raises(OptionError, match=r"none: expected a folder with images, found none in it$"):
        embed_job.embed_folder(embedder, tmp_path / "none", output)
    with pytest.raises(OptionError, match=r"nothing: cannot be read \(No such file or directory\)$"):
        embed_job.embed_folder(embedder, tmp_path / "nothing", output)
    assert not output.parent.exists()


@pytest.mark.parametrize(("length", "more"), [(300, 61), (247, 8), (240, 1)])
def test_an_output_whose_name_is_too_long(
    embedder: Embedder, photos: Path, output: Path, length: int, more: int
) -> None:
    long = output.with_name("t" * length)
    with pytest.raises(OptionError, match=f"the name is too long, .*; make it shorter by {more} bytes$"):
        embed_job.embed_folder(embedder, photos, long)
    assert not output.parent.exists()
    embed_job.embed_folder(embedder, photos, output.with_name("t" * 239), patches="float16")
    assert beside(output) == ["t" * 239, f"{'t' * 239}.patches"]
    nested = output.parent / ("d" * 300) / "table.parquet"
    with pytest.raises(ArtifactError, match=r": cannot be written \(File name too long\)$"):
        embed_job.embed_folder(embedder, photos, nested)


def test_an_image_is_no_output(embedder: Embedder, photos: Path, output: Path) -> None:
    before = (photos / "b.jpg").read_bytes()
    output.parent.mkdir()
    os.link(photos / "b.jpg", output.with_name("hard.parquet"))
    output.with_name("soft.parquet").symlink_to(photos / "b.jpg")
    for name in ("hard.parquet", "soft.parquet"):
        with pytest.raises(ArtifactError, match=r"expected a table of `visionfast embed`, got something else$"):
            embed_job.embed_folder(embedder, photos, output.with_name(name))
    assert (photos / "b.jpg").read_bytes() == before
    assert beside(output) == ["hard.parquet", "soft.parquet"]


def test_outputs_that_cannot_be(embedder: Embedder, photos: Path, tmp_path: Path) -> None:
    for output in ("", tmp_path, os.devnull):
        with pytest.raises(OptionError, match=r"expected a file to write the table to$"):
            embed_job.embed_folder(embedder, photos, output)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"file: cannot be written \((File exists|Not a directory)\)$"):
        embed_job.embed_folder(embedder, photos, tmp_path / "file" / "table.parquet")
    (tmp_path / "other.parquet.patches").write_text("no folder")
    with pytest.raises(OptionError, match=r"other\.parquet\.patches: expected a folder for the patches, got a file; "):
        embed_job.embed_folder(embedder, photos, tmp_path / "other.parquet", patches="float16")
    with pytest.raises(OptionError, match=r"patches: expected 'float32', 'float16' or None, got 'int8'$"):
        embed_job.embed_folder(embedder, photos, tmp_path / "table.parquet", patches="int8")  # type: ignore[arg-type]
    with (
        Embedder(embedder.spec, [FakeRunner(embedder.spec.graphs[0])]) as nameless,
        pytest.raises(OptionError, match=r"expected an embedder of an engine's folder; Embedder\.open makes one$"),
    ):
        embed_job.embed_folder(nameless, photos, tmp_path / "table.parquet")
    (tmp_path / "table.parquet").write_text("something of the user's")
    with pytest.raises(ArtifactError, match=r"expected a table of `visionfast embed`, got something else"):
        embed_job.embed_folder(embedder, photos, tmp_path / "table.parquet")
    assert (tmp_path / "table.parquet").read_text() == "something of the user's"
    assert not (tmp_path / "table.parquet.journal").exists()
