"""pipelines/<name>/: what deploy writes, what it refuses, versions and the way back, and that a crash costs nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from visionfast import artifacts
from visionfast.errors import ArtifactError, CertificateError, ManifestError, OptionError, ServerError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.serving.metadata import manifest_of
from visionfast.serving.scheduling import Scheduling

pytest.importorskip("tritonclient.grpc", reason="config.pbtxt is made with tritonclient: visionfast[triton]")

from visionfast.serving import repository as repository_module
from visionfast.serving.pbtxt import read_config
from visionfast.serving.repository import deploy, rollback, versions


@pytest.fixture
def engine(copied_engine: Path) -> Path:
    """One whose certificate is passed, for the tests' sake."""
    return with_status(copied_engine, "passed")


def with_status(folder: Path, status: Any) -> Path:
    manifest = artifacts.read_manifest(folder)
    certificate = replace(manifest.certificate, status=status, images=({"file": "a.jpg"},))
    artifacts.write_manifest(folder, replace(manifest, certificate=certificate))
    return folder


def config_of(folder: Path, model: str | None = None) -> Any:
    return read_config((folder / (model or folder.name) / "config.pbtxt").read_text())


def told(folder: Path, model: str | None = None) -> dict[str, str]:
    return {key: value.string_value for key, value in config_of(folder, model).parameters.items()}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def left_over() -> list[str]:
    return [path.name for path in artifacts.pipelines_home().glob(".*")]


def test_a_fused_pipeline_is_one_model_with_its_engine(engine: Path) -> None:
    folder = deploy(engine, name="small")
    assert folder == artifacts.pipelines_home() / "small"
    files = ["1/config.pbtxt", "1/engine/engine.json", "1/engine/model.bin", "1/engine/model.xml", "1/model.py"]
    assert sorted(tree(folder)) == sorted(f"small/{file}" for file in [*files, "config.pbtxt"])
    assert artifacts.read_manifest(folder / "small/1/engine", verify=True) == artifacts.read_manifest(engine)
    assert "from visionfast.serving.stages.fused import TritonPythonModel" in (folder / "small/1/model.py").read_text()
    assert left_over() == []


def test_an_ensemble_is_four_models_that_share_one_engine(engine: Path) -> None:
    folder = deploy(engine, name="small", layout="ensemble")
    models = ["small", "small_engine", "small_postprocess", "small_preprocess"]
    assert sorted(path.name for path in folder.iterdir()) == models
    assert [path.parents[2].name for path in folder.rglob("engine.json")] == ["small_engine"]
    for model in models:
        place = folder / model / "1"
        assert place.is_dir()
        assert (place / "model.py").is_file() == (model != "small")
        assert (place / told(folder, model)["engine"]).resolve() == (folder / "small_engine/1/engine").resolve()


def test_a_served_model_tells_the_manifest_and_the_certificate(engine: Path) -> None:
    parameters = told(deploy(engine, name="small"))
    manifest, original = manifest_of(parameters), artifacts.read_manifest(engine)
    assert manifest.spec == original.spec
    assert manifest.certificate == replace(original.certificate, images=())
    assert parameters["certificate"] == "passed"
    for wrong in ({}, {"manifest": "{}"}, {"manifest": "{"}, {"manifest": "[" * 100_000}):
        with pytest.raises(ServerError):
            manifest_of(wrong)


def test_what_is_asked_for_is_told_to_the_model(engine: Path) -> None:
    limits = DecodeLimits(max_pixels=5, max_bytes=6, allow_truncated=True)
    options = {"conf": 0.5, "classes": ["kind 2", 0]}
    folder = deploy(engine, name="small", scheduling=Scheduling(max_batch=3), options=options, limits=limits)
    parameters = told(folder)
    assert DecodeLimits(**json.loads(parameters["limits"])) == limits
    assert json.loads(parameters["options"]) == {
        "conf": 0.5,
        "iou": 0.7,
        "max_det": 300,
        "classes": [2, 0],
        "class_agnostic": False,
    }
    assert config_of(folder).max_batch_size == 3


@pytest.mark.parametrize(
    "options",
    [
        {"conf": 2},
        {"conf": float("nan")},
        {"iou": "0.5"},
        {"conf": True},
        {"max_det": 0},
        {"max_det": 1.5},
        {"max_det": True},
        {"classes": []},
        {"classes": "kind 1"},
        {"classes": ["nobody"]},
        {"classes": [3]},
        {"classes": [-1]},
        {"classes": [True]},
        {"classes": [1.0]},
        {"class_agnostic": 1},
        {"confidence": 0.5},
    ],
)
def test_an_option_out_of_range_is_refused_and_nothing_is_written(engine: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        deploy(engine, name="small", options=options)
    assert not artifacts.pipelines_home().exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".a", "-a", "a b", "é", "a" * 101, "a\n"])
def test_a_name_that_is_no_file_s_is_refused(engine: Path, name: str) -> None:
    if name:  # an empty one is none
        with pytest.raises(OptionError, match="name"):
            deploy(engine, name=name)
    with pytest.raises(OptionError, match="name"):
        rollback(name)


@pytest.mark.parametrize("status", ["failed", "not yet run on a device"])
def test_an_engine_without_a_passed_certificate_needs_a_word(engine: Path, status: str) -> None:
    with_status(engine, status)
    with pytest.raises(CertificateError, match=f"its certificate: {status}; .* --uncertified"):
        deploy(engine, name="small")
    assert told(deploy(engine, name="small", uncertified=True))["certificate"] == status


def test_an_engine_that_was_changed_is_refused(engine: Path) -> None:
    with (engine / "model.bin").open("r+b") as file:
        file.write(b"\1\2\3\4")
    with pytest.raises(ManifestError, match="it was changed"):
        deploy(engine, name="small")


def test_later_changes_of_the_engine_s_folder_leave_the_pipeline_alone(engine: Path) -> None:
    folder = deploy(engine, name="small")
    before = tree(folder)
    with_status(engine, "failed")
    shutil.rmtree(engine)
    assert tree(folder) == before


# ---- versions -----------------------------------------------------------------------------------------------------


def test_deploying_again_adds_a_version_and_rollback_goes_back(engine: Path) -> None:
    folder = deploy(engine, name="small", options={"conf": 0.1})
    first = tree(folder)
    deploy(engine, name="small", options={"conf": 0.2})
    deploy(engine, name="small", options={"conf": 0.3})
    assert versions(folder) == (3, (1, 2, 3))

    def served() -> float:
        conf: float = json.loads(told(folder)["options"])["conf"]
        return conf

    assert served() == 0.3
    assert (rollback("small"), served()) == (2, 0.2)
    assert (rollback("small"), served()) == (1, 0.1)
    assert {name: tree(folder)[name] for name in first} == first
    with pytest.raises(OptionError, match="version 1 is served, and there is none before it"):
        rollback("small")
    with pytest.raises(OptionError, match="version 4: expected one of 1, 2, 3"):
        rollback("small", 4)
    assert (rollback("small", 3), served()) == (3, 0.3)
    rollback("small", 1)
    deploy(engine, name="small")
    assert versions(folder) == (4, (1, 2, 3, 4))
    assert left_over() == []


def test_a_layout_may_change_from_version_to_version(engine: Path) -> None:
    folder = deploy(engine, name="small")
    deploy(engine, name="small", layout="ensemble")
    deploy(engine, name="small")
    for version, models in ((3, 1), (2, 4), (1, 1)):
        rollback("small", version)
        # A model without a configuration is one that the server does not load.
        served = [path.parent.name for path in folder.glob("*/config.pbtxt")]
        assert len(served) == models
        assert all(config_of(folder, model).version_policy.specific.versions == [version] for model in served)


def test_a_pipeline_that_is_not_there_lists_those_that_are(engine: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nobody: no such pipeline .*there: none yet"):
        rollback("nobody")
    deploy(engine, name="small")
    with pytest.raises(ArtifactError, match="there: small"):
        rollback("nobody")


def test_what_somebody_else_put_there_stays(engine: Path) -> None:
    mine = artifacts.pipelines_home() / "small" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(ArtifactError, match="expected a pipeline that `visionfast deploy` wrote"):
        deploy(engine, name="small")
    assert mine.read_text() == "mine"
    assert left_over() == []


# ---- crashes ------------------------------------------------------------------------------------------------------


def test_an_error_halfway_leaves_the_old_version(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = deploy(engine, name="small")
    before = tree(folder)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(repository_module, "share", full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        deploy(engine, name="small")
    assert tree(folder) == before
    assert left_over() == []


@pytest.mark.parametrize("victim", ["_write_version", "_serve", "_swap"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_killed_process_leaves_the_old_version_or_the_new(engine: Path, victim: str, when: str) -> None:
    folder = deploy(engine, name="small", layout="ensemble")
    before = tree(folder)
    kill = f"""
import os, signal
from visionfast.serving import repository
done = repository.{victim}
def killed(*args):
    {"done(*args)" if when == "after" else "pass"}
    os.kill(os.getpid(), signal.SIGKILL)
repository.{victim} = killed
repository.deploy({str(engine)!r}, name="small", layout="ensemble")
"""
    done = subprocess.run([sys.executable, "-c", kill], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL, done.stderr
    if (victim, when) == ("_swap", "after"):
        assert versions(folder) == (2, (1, 2))
    else:
        assert tree(folder) == before
    deploy(engine, name="small", layout="ensemble")
    assert left_over() == []


def test_a_system_that_cannot_exchange_folders_renames_them(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = deploy(engine, name="small")
    monkeypatch.setattr(repository_module.ctypes, "CDLL", lambda *args, **kwargs: object())
    deploy(engine, name="small")
    assert versions(folder) == (2, (1, 2))
    assert left_over() == []


def test_a_file_system_without_hard_links_gets_copies(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(self: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", cannot)
    folder = deploy(engine, name="small")
    assert (folder / "small/1/engine/model.bin").stat().st_nlink == 1
    artifacts.read_manifest(folder / "small/1/engine", verify=True)


def test_two_at_once_are_two_versions(engine: Path) -> None:
    errors: list[BaseException] = []

    def one() -> None:
        try:
            deploy(engine, name="small")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert versions(artifacts.pipelines_home() / "small") == (4, (1, 2, 3, 4))


# ---- the verbs ----------------------------------------------------------------------------------------------------


def visionfast(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "visionfast.cli", *words], capture_output=True, text=True)


def test_the_verbs_say_what_they_did(engine: Path, tmp_path: Path) -> None:
    named = ["--name", "small", "--online", "5:600", "--offline", "7", "--classes", "kind 1,0", "--max-pixels", "9"]
    for version in (1, 2):
        done = visionfast("deploy", str(engine), *named)
        folder = artifacts.pipelines_home() / "small"
        assert done.stdout == f"{folder}: version {version}; `visionfast serve small` starts it\n", done.stderr
    line = json.loads(told(folder)["line"])
    assert line["online"] == {"requests": 5, "timeout_ms": 600}
    assert line["offline"] == {"requests": 7, "timeout_ms": 60_000}
    assert json.loads(told(folder)["options"])["classes"] == [1, 0]
    assert json.loads(told(folder)["limits"])["max_pixels"] == 9
    done = visionfast("rollback", "small")
    assert done.stdout == "small: version 1 is served from the server's next start on\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--online", "x"], "--online x: expected requests, or requests:milliseconds"),
        (["--max-batch", "0"], "max_batch: expected a whole number"),
        (["--max-bytes", "0"], "--max-bytes: expected at least 1, got 0"),
        (["--target", "tpu"], "target 'tpu': expected cpu or nvidia"),
    ],
)
def test_a_wrong_word_is_one_line(engine: Path, words: list[str], message: str) -> None:
    done = visionfast("deploy", str(engine), *words)
    assert done.returncode == 1
    assert done.stderr.startswith(f"visionfast: {message}")
    assert done.stderr.count("\n") == 1


def test_deploying_imports_nothing_that_builds(engine: Path, built_engine: Callable[..., Path]) -> None:
    code = f"""
import sys
from visionfast.serving.repository import deploy
deploy({str(engine)!r}, name="small")
print([m for m in ("torch", "ultralytics", "onnx", "timm", "transformers") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
