"""pipelines/<name>/: a Triton model repository, written from an engine, one version after the other.

    pipelines/yolov8s/
      yolov8s/            config.pbtxt   of the version that is served
        1/                config.pbtxt, model.py, engine/ (engine.json, its certificate inside, and its files)
        2/                …
      yolov8s_engine/ …   the further models of an ensemble, the same way
      Dockerfile          for NVIDIA's container: what has to be added to it

Every change writes the whole folder anew beside the old one, sharing the files that stay as they are, and then the two
change places in one step: whatever happens, what stands there is the old repository or the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from visionfast import artifacts
from visionfast.errors import ArtifactError, CertificateError, OptionError
from visionfast.loading import check_outputs, runs_here
from visionfast.preprocess.limits import DecodeLimits
from visionfast.serving.container import DOCKERFILE, IMAGE, dockerfile
from visionfast.serving.ensemble import Layout, Pipeline, behind_a_cache
from visionfast.serving.metadata import parameters_of
from visionfast.serving.model_files import place_model, share
from visionfast.serving.options import deployed_options
from visionfast.serving.pbtxt import configs_of, read_config, served_version, text_of
from visionfast.serving.scheduling import Scheduling
from visionfast.serving.topology import pipeline_of
from visionfast.serving.topology_nvidia import check_engine_fits
from visionfast.types import EngineManifest

__all__ = ["deploy", "rollback", "versions"]

CONFIG = "config.pbtxt"
ENGINE = "engine"


def deploy(
    engine: str | os.PathLike[str],
    *,
    name: str | None = None,
    layout: Layout = "fused",
    target: str = "cpu",
    engine_backend: str = "python",
    image: str = IMAGE,
    scheduling: Scheduling | None = None,
    options: Mapping[str, Any] | None = None,
    limits: DecodeLimits | None = None,
    uncertified: bool = False,
) -> Path:
    """Writes an engine into pipelines/<name>/ as its next version, which is served from the server's next start on.

    Args:
        engine: its folder, or the name of a model that has one engine under engines/.
        name: that clients will ask for; default: the model's.
        layout: `fused`, one process for the whole way of an image, or `ensemble`, one for each step.
        target: `cpu`, or `nvidia`: NVIDIA's container on a GPU.
        engine_backend: as for `topology.pipeline_of`.
        image: NVIDIA's container, where it is to be served by that.
        scheduling: how requests wait and are put together.
        options: `conf`, `iou`, `max_det`, `classes`, `class_agnostic`, where a request says nothing.
        limits: what an image may cost.
        uncertified: also where the certificate is not there, or failed.

    Returns:
        pipelines/<name>.

    Raises:
        ArtifactError, ManifestError: there is no such engine, it is damaged, or pipelines/ cannot be written.
        BackendUnavailableError: tritonclient is not installed, or DALI, for an ensemble of target `nvidia`.
        CertificateError: the engine's certificate is not `passed`.
        OptionError: something that is not served, or out of its range.
    """
    # Which engine is meant by a model's name: one that runs where the pipeline will.
    folder = artifacts.find_engine(engine, usable=_for_a_gpu if target == "nvidia" else runs_here)
    manifest = artifacts.read_manifest(folder, verify=True)
    pipeline = pipeline_of(
        _checked_name(name or manifest.spec.name), manifest.spec, layout, target=target, engine_backend=engine_backend
    )
    if scheduling is not None and scheduling.cache:
        pipeline = behind_a_cache(pipeline)
    check_outputs(folder, manifest)
    if target == "nvidia":
        check_engine_fits(folder, manifest, layout)
    elif manifest.device != "cpu":
        raise OptionError(f"{folder}: an engine for {manifest.device}; target {target} runs those for the cpu")
    if (status := manifest.certificate.status) != "passed" and not uncertified:
        raise CertificateError(
            f"{folder}: its certificate: {status}; certify it with `visionfast certify`, or deploy it --uncertified"
        )
    told: dict[str, Any] = {
        "layout": layout,
        "options": deployed_options(options or {}, manifest.spec),
        "limits": limits or DecodeLimits(),
    }
    with _changed(pipeline.name, new=True) as (repository, partial):
        version = max(_numbers(repository), default=0) + 1
        _write_version(partial, pipeline, version, folder, manifest, scheduling or Scheduling(), told)
        _serve(partial, version)
        if (target, engine_backend) != ("cpu", "python"):
            (partial / DOCKERFILE).write_text(dockerfile(manifest, layout, image), "utf-8")
    return repository


def rollback(name: str, version: int | None = None) -> int:
    """Makes another version of a pipeline the one that is served, from the server's next start or reload on.

    Args:
        name: of the pipeline.
        version: default: the one before that which is served now.

    Returns:
        the version.

    Raises:
        ArtifactError: there is no such pipeline, or it cannot be written.
        OptionError: there is no such version, or none before this one.
    """
    with _changed(_checked_name(name), new=False) as (repository, partial):
        now, there = versions(repository)
        if version is None:
            version = max((number for number in there if number < now), default=None)
            if version is None:
                raise OptionError(f"{name}: version {now} is served, and there is none before it")
        if version not in there:
            raise OptionError(f"version {version}: expected one of {', '.join(map(str, there))} of {name}")
        _serve(partial, version)
    return version


def versions(repository: Path) -> tuple[int, tuple[int, ...]]:
    """The version of a pipeline that is served, and all that there are.

    Raises:
        ArtifactError: this is no pipeline of `deploy`'s.
    """
    try:
        now = served_version(read_config((repository / repository.name / CONFIG).read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{repository}: expected a pipeline that `visionfast deploy` wrote ({error})") from error
    return now, tuple(sorted(_numbers(repository)))


# ---- writing ------------------------------------------------------------------------------------------------------


def _write_version(
    target: Path,
    pipeline: Pipeline,
    version: int,
    folder: Path,
    manifest: EngineManifest,
    scheduling: Scheduling,
    told: Mapping[str, Any],
) -> None:
    """Every model's folder of this version: its configuration, what its backend runs, and the engine once."""
    holder = next(stage.name for stage in pipeline.stages if stage.role in ("fused", "engine"))
    foreign = {stage.name for stage in pipeline.stages if stage.backend != "python"}
    parameters = {
        model: parameters_of(
            manifest,
            pipeline=pipeline.name,
            engine=ENGINE if model == holder else f"../../{holder}/{version}/{ENGINE}",
            **told,
        )
        for model in pipeline.models
        if model not in foreign  # their backends have parameters of their own
    }
    configs = configs_of(pipeline, scheduling, version=version, parameters=parameters)
    kept = target / holder / str(version) / ENGINE
    kept.mkdir(parents=True)
    for file in (artifacts.MANIFEST_NAME, *manifest.sha256):
        share(folder / file, kept / file)
    for model, config in configs.items():
        place = target / model / str(version)
        place.mkdir(parents=True, exist_ok=True)
        (place / CONFIG).write_text(text_of(config), "utf-8")
    for stage in pipeline.stages:  # an ensemble itself runs nothing
        place_model(stage, target / stage.name / str(version), folder, manifest, max_batch=scheduling.max_batch)


def _for_a_gpu(manifest: EngineManifest) -> bool:
    return manifest.device != "cpu"


def _serve(repository: Path, version: int) -> None:
    """Every model that has this version gets its configuration; one that another layout left behind has none."""
    for model in filter(Path.is_dir, repository.iterdir()):
        (model / CONFIG).unlink(missing_ok=True)
        if (config := model / str(version) / CONFIG).is_file():
            shutil.copyfile(config, model / CONFIG)


def _numbers(repository: Path) -> list[int]:
    """Versions of the model that clients ask for."""
    model = repository / repository.name
    return [int(path.name) for path in model.glob("*") if re.fullmatch("[1-9][0-9]*", path.name)]


def _checked_name(name: str) -> str:
    """Names of files, of URLs and of metrics, all at once."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise OptionError(
            f"name {name!r}: expected up to 100 letters, digits, '.', '_' and '-', a letter or digit first"
        )
    return name


# ---- the old and the new one --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _changed(name: str, *, new: bool) -> Iterator[tuple[Path, Path]]:
    """A pipeline's folder, and a copy of it beside, to change, that takes its place when the block ends well.

    One caller at a time: others wait.

    Raises:
        ArtifactError: it cannot be written, or is not there and not to be `new`.
    """
    home = artifacts.pipelines_home()
    repository = home / name
    partial: Path | None = None
    try:
        if not new and not repository.is_dir():
            here = ", ".join(sorted(path.name for path in home.glob("[!.]*") if path.is_dir())) or "none yet"
            raise ArtifactError(f"{name}: no such pipeline in {home} (there: {here})")
        home.mkdir(parents=True, exist_ok=True)
        with _alone(home):
            for stale in home.glob(f".{name}.*"):  # of a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
            if new and repository.exists():
                versions(repository)  # what somebody else put there stays
            partial = Path(tempfile.mkdtemp(dir=home, prefix=f".{name}."))
            if repository.exists():
                # Compiled blobs and bytecode are made again where they are missed.
                skipped = shutil.ignore_patterns("cache", "__pycache__")
                shutil.copytree(repository, partial, copy_function=_shared, ignore=skipped, dirs_exist_ok=True)
            yield repository, partial
            partial.chmod(0o755)
            _swap(partial, repository)
    except OSError as error:
        raise ArtifactError(f"{repository}: cannot be written ({error.strerror or error}); it is as it was") from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _shared(source: str, target: str) -> str:
    # A version's own files never change; config.pbtxt of the version that is served does, and is a file of its own, and
    # so does what is written for all versions.
    if Path(source).name in (CONFIG, DOCKERFILE):
        shutil.copyfile(source, target)
    else:
        share(Path(source), Path(target))
    return target


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


_RENAME_EXCHANGE = 2  # linux/fs.h


def _swap(partial: Path, place: Path) -> None:
    """`partial` takes `place`, in one step; what was there is at `partial` then."""
    if not place.exists():
        partial.rename(place)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    here = -100  # AT_FDCWD
    exchange = getattr(libc, "renameat2", None)
    if exchange is not None and exchange(here, os.fsencode(partial), here, os.fsencode(place), _RENAME_EXCHANGE) == 0:
        return
    # A system that cannot: for a moment there is nothing at `place`.
    old = partial.with_name(f"{partial.name}.old")
    place.rename(old)
    try:
        partial.rename(place)
    except OSError:
        old.rename(place)
        raise
    old.rename(partial)
