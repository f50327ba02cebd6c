"""What stands in a model's version folder beside its configuration: what its backend runs."""

from __future__ import annotations

import shutil
from pathlib import Path

from visionfast.preprocess.dali_graph import input_pipeline
from visionfast.serving.ensemble import Stage
from visionfast.serving.pbtxt import WARM_UP
from visionfast.types import EngineManifest

__all__ = ["place_model", "share"]

_MODEL = '''"""Written by `visionfast deploy`; config.pbtxt says what it is told."""
from visionfast.serving.stages.{module} import TritonPythonModel as TritonPythonModel
'''
_MODEL_IN_LINE = '''"""Written by `visionfast deploy`; config.pbtxt says what it is told."""
from visionfast.serving.stages.in_line import in_line
from visionfast.serving.stages.{module} import TritonPythonModel as Stage

TritonPythonModel = in_line(Stage)
'''


def place_model(stage: Stage, place: Path, engine: Path, manifest: EngineManifest, *, max_batch: int) -> None:
    """Writes the files of one stage.

    Args:
        stage: the model.
        place: its version's folder.
        engine: the engine's folder, with the files that a backend loads itself.
        manifest: the engine's.
        max_batch: images of one request at most.

    Raises:
        BackendUnavailableError: DALI is not installed, and the stage is its graph.
    """
    if stage.backend == "python":
        text = _MODEL_IN_LINE if stage.in_line else _MODEL
        (place / "model.py").write_text(text.format(module=stage.module or stage.role), "utf-8")
    elif stage.backend == "dali":
        (place / "model.dali").write_bytes(dali_graph(manifest, batch=max_batch))
    elif stage.backend == "tensorrt":
        share(engine / _file(manifest), place / "model.plan")
    else:
        weights = Path(_file(manifest)).with_suffix(".bin").name  # OpenVINO looks for it beside the .xml
        share(engine / _file(manifest), place / "model.xml")
        share(engine / weights, place / "model.bin")
    for tensor, sample in stage.samples.items():
        folder = place.parent / WARM_UP
        folder.mkdir(exist_ok=True)
        file = folder / tensor
        file.unlink(missing_ok=True)  # it may be shared with the repository that this one replaces
        file.write_bytes(sample)


def dali_graph(manifest: EngineManifest, *, batch: int, device: str = "mixed") -> bytes:
    """The graph of the session's own preprocessing, serialised: no GPU is needed for that.

    Args:
        manifest: of the engine that it feeds.
        batch: images at most.
        device: `mixed`, or `cpu` for the same on DALI's CPU operators.

    Raises:
        BackendUnavailableError: DALI is not installed.
    """
    spec = manifest.spec
    graph = input_pipeline(
        spec.preprocess,
        batch=batch,
        device=device,  # type: ignore[arg-type]
        dtype=spec.graphs[0].inputs[0].dtype,  # type: ignore[arg-type]
        with_trailer=True,
    )
    serialised: bytes = graph.serialize()
    return serialised


def _file(manifest: EngineManifest) -> str:
    (graph,) = manifest.spec.graphs
    return manifest.files[graph.name]


def share(source: Path, target: Path) -> None:
    """One file under two names where the file system can, else a copy."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
