"""A checkpoint → compiled engines with their certificates."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visionfast.build_plan import MAX_BUILDS, Plan, best_backend
from visionfast.errors import VisionfastError
from visionfast.types import EngineManifest, Precision, Resize

__all__ = ["MAX_BUILDS", "Built", "best_backend", "build", "build_all"]


def build(
    model: Path,
    *,
    backend: str | None = None,
    size_hw: tuple[int, int] | None = None,
    batch: int = 1,
    resize: Resize | None = None,
    precision: Precision | None = None,
    gpu: str | None = None,
    images: Sequence[Path] | None = None,
    keep_fp32: Sequence[str] = (),
    trust_checkpoint: bool = False,
    name: str | None = None,
    search: bool = True,
    max_builds: int = MAX_BUILDS,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[Path, EngineManifest]:
    """Compiles a checkpoint, certifies the engine on this machine where it can run, and writes it under engines/.

    Args:
        model: the weights file.
        backend: key in `BACKENDS`; default: the best of this machine, or TensorRT-RTX when a `gpu` is named.
        size_hw: of the input, pixels; default: what the checkpoint was trained with.
        batch: images a call.
        resize: of a DINO model: `centre-crop`, or `stretch` to squash whole images; default: `centre-crop`.
        precision: default: the backend's own (FP16 on GPUs, FP32 on CPUs).
        gpu: the GPU generation to compile for, e.g. `sm89`.
        images: real ones to certify on; default: two photographs.
        keep_fp32: modules that stay FP32 in an FP16 graph; of a model with several graphs, `encoder.blocks.3`.
        trust_checkpoint: load a pickle without the allow-list.
        name: of the engine's folder; default: the weights file's name.
        search: where an FP16 engine's certificate fails, find the modules that drift, keep them in FP32, and say in
            the certificate which and why (`visionfast.precision`).
        max_builds: engines that the search may build.
        progress: is told each stage as it begins.

    Returns:
        The engine's folder and its manifest. An engine whose certificate failed is written, and says so.

    Raises:
        CheckpointError, OptionError, BackendError, BuildError, CertificateError, ArtifactError: nothing is written.
    """
    plan = Plan.make(
        model,
        (gpu,),
        backend=backend,
        size_hw=size_hw,
        batch=batch,
        resize=resize,
        precision=precision,
        images=images,
        keep_fp32=keep_fp32,
        trust_checkpoint=trust_checkpoint,
        name=name,
        search=search,
        max_builds=max_builds,
        progress=progress,
    )
    with tempfile.TemporaryDirectory(prefix="visionfast-") as scratch:
        return plan.build(plan.devices[0], plan.export(Path(scratch)))


@dataclass(frozen=True, slots=True)
class Built:
    """What became of one target of `build_all`: `folder` and `manifest`, or the `error`."""

    device: str
    folder: Path | None = None
    manifest: EngineManifest | None = None
    error: VisionfastError | None = None


def build_all(model: Path, *, gpus: Sequence[str], **options: Any) -> tuple[Built, ...]:
    """As `build`, for several GPU generations: the checkpoint is read once, and exported once.

    Args:
        model: the weights file.
        gpus: e.g. `sm75`, `sm86`; each once.
        options: as for `build`.

    Returns:
        One outcome for each, in their order. A target that fails does not take the others with it.

    Raises:
        CheckpointError, OptionError, BackendError, BuildError: what concerns all of them, a name that the backend does
            not know among it; nothing is written.
    """
    plan = Plan.make(model, gpus, **options)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="visionfast-") as scratch:
        exported = plan.export(Path(scratch))
        for device in plan.devices:
            try:
                outcomes.append(Built(device, *plan.build(device, exported)))
            except VisionfastError as error:
                outcomes.append(Built(device, error=error))
    return tuple(outcomes)
