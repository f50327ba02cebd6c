"""What a certificate looks like on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from visionfast import artifacts, machine, render
from visionfast.types import Certificate


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    from rich.console import Console

    monkeypatch.setattr(render, "_out", Console(highlight=False, soft_wrap=True, width=200))
    return lambda: capsys.readouterr().out


def test_what_is_kept_in_fp32_and_why(copied_engine: Path, shown: Callable[[], str]) -> None:
    manifest = artifacts.read_manifest(copied_engine)
    render.certificate(manifest)
    assert "kept in FP32" not in shown()
    kept = {"blocks.4": "its values reach 1.5e+05 [of 65504]", "blocks.9": "relative error 0.2 in float16"}
    proof = dataclasses.replace(manifest.certificate, kept=kept, search="4 of at most 24 builds")
    render.certificate(dataclasses.replace(manifest, certificate=proof))
    lines = shown().splitlines()
    assert "kept in FP32: blocks.4: its values reach 1.5e+05 [of 65504]" in lines
    assert "kept in FP32: blocks.9: relative error 0.2 in float16" in lines
    assert "search for modules to keep in FP32: 4 of at most 24 builds" in lines


def test_an_engine_that_has_not_run(copied_engine: Path, shown: Callable[[], str]) -> None:
    manifest = artifacts.read_manifest(copied_engine)
    manifest = dataclasses.replace(manifest, device="sm89", certificate=Certificate("not yet run on a device"))
    render.certificate(manifest)
    assert "`visionfast certify` on one that can" in shown()
    render.manifest(copied_engine, manifest)
    assert f"for sm89, on {machine.platform_name()}" in shown()
    render.manifest(copied_engine, dataclasses.replace(manifest, platform=""))
    assert ", on " not in shown()


def test_a_manifest_s_words_are_words(copied_engine: Path, shown: Callable[[], str]) -> None:
    manifest = artifacts.read_manifest(copied_engine)
    proof = Certificate("passed", "[red]eager[/nope]", measures={"a_[/x]": 1.0}, images=({"error": "[/y]"},))
    render.manifest(copied_engine, dataclasses.replace(manifest, certificate=proof))
    text = shown()
    for words in ("[red]eager[/nope]", "a [/x]", "left out: None: [/y]"):
        assert words in text


def test_a_home_with_brackets(shown: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISIONFAST_HOME", str(tmp_path / "[red]"))
    render.inventory()
    assert shown().count(str(tmp_path / "[red]")) == 3


def test_the_versions_of_pipelines(
    copied_engine: Path, shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tritonclient.grpc")
    from visionfast.serving.repository import deploy, rollback

    monkeypatch.chdir(artifacts.home())
    render.inventory()
    assert "no pipelines under" in shown()
    for _ in range(2):
        deploy(copied_engine, name="both", uncertified=True)
    rollback("both")
    (artifacts.pipelines_home() / "other").mkdir()
    render.inventory()
    lines = [" ".join(line.split()) for line in shown().splitlines()]
    assert "pipelines/both 1 1, 2" in lines
    (other,) = [line for line in lines if line.startswith("pipelines/other ")]
    assert other.startswith("pipelines/other no: ")
    assert "expected a pipeline that `visionfast deploy` wrote" in other


def test_the_driver_is_named_where_there_is_one(shown: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    for version, line in ((13010, "driver   serves CUDA up to 13.1"), (0, "")):
        monkeypatch.setattr(machine, "driver_version", lambda version=version: version)
        render.doctor()
        assert [text for text in shown().splitlines() if text.startswith("driver")] == ([line] if line else [])


def test_the_licence_on_the_card_beside_the_checkpoint_s(copied_engine: Path, shown: Callable[[], str]) -> None:
    engine = artifacts.read_manifest(copied_engine)
    engine = dataclasses.replace(engine, spec=dataclasses.replace(engine.spec, license="AGPL-3.0"))
    folder = artifacts.models_home() / "small"
    folder.mkdir(parents=True)
    (folder / "small.pt").touch()
    both = "the checkpoint claims AGPL-3.0; its card says Apache-2.0"
    for sha256, says, named in (
        (engine.weights_sha256, "Apache-2.0", both),
        (engine.weights_sha256, "AGPL-3.0", "AGPL-3.0"),
        ("0" * 64, "Apache-2.0", "AGPL-3.0"),  # the card of other weights
    ):
        (folder / "card.json").write_text(json.dumps({"license": says, "sha256": sha256}))
        render.manifest(copied_engine, engine)
        (line,) = [line for line in shown().splitlines() if line.strip().startswith("licence")]
        assert line.split("licence", 1)[1].strip() == named
