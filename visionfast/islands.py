"""An engine whose FP16 certificate failed → one that keeps in FP32 what drifts, and says what and why."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from visionfast.agreement import shortfall
from visionfast.certify import run_eager
from visionfast.drift import measure_drift
from visionfast.errors import BackendError, BuildError
from visionfast.families import LoadedModel
from visionfast.precision import WHOLE, Verdict, find_islands
from visionfast.types import EngineManifest

if TYPE_CHECKING:
    from torch import nn

__all__ = ["with_islands"]

_IMAGES = 4  # are enough to rank the modules by; the certificates look at all of them


def with_islands(
    model: LoadedModel,
    images: Sequence[Path],
    failed: EngineManifest,
    folder: Path,
    *,
    make: Callable[[tuple[str, ...], Path], EngineManifest],
    keep_fp32: Sequence[str],
    max_builds: int,
    progress: Callable[[str], None],
) -> EngineManifest:
    """Looks for the modules that have to stay FP32 and puts the engine that keeps them into `folder`.

    Args:
        model: eager.
        images: that were certified on.
        failed: the engine that is in `folder`, with its certificate.
        folder: the engine's; changed only where one that passes was found.
        make: builds and certifies an engine with these modules in FP32, in that empty folder. Of a model with several
            graphs they are named `graph.path`, and a graph's name alone is all of it.
        keep_fp32: modules that stay FP32 in any case, named as below.
        max_builds: calls of `make` at most.
        progress: is told each stage as it begins.

    Returns:
        The manifest of the engine that is in `folder` afterwards. Its certificate says how the search went.
    """
    progress("measuring what FP16 does to each module")
    network = _network(model)
    entries = zip(images, failed.certificate.images, strict=True)
    usable = [path for path, entry in entries if "error" not in entry]
    drifts = measure_drift(network, lambda: run_eager(model, usable[:_IMAGES]), keep_fp32=keep_fp32)
    passed: dict[tuple[str, ...], tuple[Path, EngineManifest]] = {}
    with tempfile.TemporaryDirectory(prefix="visionfast-") as scratch:

        def attempt(keep: tuple[str, ...]) -> Verdict:
            trial = Path(tempfile.mkdtemp(dir=scratch))
            try:
                made = make(_graphs_of(model) if keep == (WHOLE,) else keep, trial)
            except (BuildError, BackendError) as error:  # one set may be refused and another taken
                return Verdict(False, str(error))
            if made.certificate.status == "passed":
                passed[keep] = trial, made
                return Verdict(True)
            shutil.rmtree(trial, ignore_errors=True)
            return Verdict(False, shortfall(made.certificate))

        found = find_islands(
            drifts,
            attempt,
            failed=Verdict(False, shortfall(failed.certificate)),
            max_builds=max_builds,
            progress=progress,
        )
        if not found.kept:
            return replace(failed, certificate=replace(failed.certificate, search=found.says))
        trial, engine = passed[tuple(found.kept)]
        shutil.rmtree(folder)
        shutil.copytree(trial, folder)
    return replace(engine, certificate=replace(engine.certificate, kept=found.kept, search=found.says))


def _network(model: LoadedModel) -> nn.Module:
    """What is measured: the model's one graph, or all of them as parts of one module."""
    from torch import nn

    if len(model.spec.graphs) == 1:
        return model.modules[model.spec.graphs[0].name]
    return nn.ModuleDict({graph.name: model.modules[graph.name] for graph in model.spec.graphs})


def _graphs_of(model: LoadedModel) -> tuple[str, ...]:
    """Everything, as `keep_fp32` names it."""
    return (WHOLE,) if len(model.spec.graphs) == 1 else tuple(graph.name for graph in model.spec.graphs)
