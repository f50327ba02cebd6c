"""Does the engine still agree with eager FP32 PyTorch, on real images, in the task's own measure?

Both get the same letterboxed pixels and the same post-processing; only what computes in between differs. Objects
are matched greedily by IoU within a class. An object that only one side has counts as unmatched, unless its
confidence is so near the threshold that the allowed difference explains it. Raw tensors are compared too, so that
images without objects prove something.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from visionfast import artifacts, machine
from visionfast.agreement import TOLERANCES, compare_detections, compare_raw, verdict
from visionfast.backends import get_backend
from visionfast.backends.torch import TorchRunner
from visionfast.certify_embeddings import certify_embeddings, run_embeddings
from visionfast.certify_prompts import certify_prompts, eager_session, run_prompts
from visionfast.checkpoint import open_checkpoint
from visionfast.embedder import Embedder
from visionfast.errors import (
    ArtifactError,
    BackendUnavailableError,
    CertificateError,
    CheckpointError,
    ImageError,
    ManifestError,
)
from visionfast.families import LoadedModel, identify
from visionfast.pipeline import Detector, Segmenter, check_outputs
from visionfast.preprocess.decode import decode_image
from visionfast.prompt_segmenter import PromptSegmenter
from visionfast.types import Certificate, EngineManifest, Precision, Runner

__all__ = [
    "CONF",
    "IOU",
    "certify",
    "certify_engine",
    "certify_files",
    "default_images",
    "images_in",
    "load_reference",
    "run_eager",
    "weights_of",
]

CONF, IOU = 0.25, 0.7
"""What both sides' objects are found with."""


def default_images() -> list[Path]:
    """Two photographs that install with the build extra (they ship inside ultralytics).

    Raises:
        CertificateError: they are not there.
    """
    import importlib.util

    spec = importlib.util.find_spec("ultralytics")
    folder = Path(spec.origin).parent / "assets" if spec and spec.origin else Path()
    found = [folder / name for name in ("bus.jpg", "zidane.jpg")]
    if not all(path.is_file() for path in found):
        raise CertificateError("no photographs to certify on; give a folder of real images with --images")
    return found


def certify(
    model: LoadedModel,
    runner: Runner,
    images: Sequence[Path],
    *,
    precision: Precision,
    candidate: Detector | None = None,
) -> Certificate:
    """Compares an engine with the eager module, image by image.

    Args:
        model: the eager FP32 modules that the engine was made from.
        runner: of the engine, for its raw tensors; it is not closed.
        images: real ones; those that cannot be decoded are named in the certificate and left out.
        precision: picks the tolerances.
        candidate: the engine as it is served, opened with `conf=CONF, iou=IOU`: what it finds is what is compared.
            Default: the runner with the host's decoding and post-processing. It is not closed.

    Raises:
        CertificateError: no image could be used.
    """
    engine = _Recorder(runner)
    kind = _kind(model)
    entries: list[dict[str, Any]] = []
    measured: list[dict[str, float]] = []
    with _eager(model) as (reference, eager), kind(model.spec, engine, conf=CONF, iou=IOU) as on_host:
        for path in images:
            try:
                (expected,), (got,) = reference([path]), on_host([path])
                if candidate is not None:
                    (got,) = candidate([path])
            except ImageError as error:
                entries.append({"file": path.name, "error": error.reason})
                continue
            measures = compare_detections(
                expected, got, conf=CONF, slack=TOLERANCES[precision]["max_confidence_difference"]
            )
            measures |= compare_raw(eager.last, engine.last, len(model.spec.class_names))
            measured.append(measures)
            entries.append({"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), **measures})
    return verdict(
        measured, entries, tolerances=TOLERANCES[precision], reference=f"eager FP32 PyTorch, conf {CONF}, iou {IOU}"
    )


def certify_files(model: LoadedModel, folder: Path, manifest: EngineManifest, images: Sequence[Path]) -> Certificate:
    """`certify` for an engine's folder, on this machine, through the path that serves it.

    Raises:
        BackendError: this machine cannot run the engine.
        CertificateError: no image could be used.
    """
    if manifest.spec.task == "prompt-segment":
        with PromptSegmenter.from_folder(folder, manifest) as segmenter:
            return certify_prompts(model, segmenter.session, images, precision=manifest.precision)
    if manifest.spec.task == "embed":
        with Embedder.from_folder(folder, manifest) as embedder:
            return certify_embeddings(model, embedder.session, images, precision=manifest.precision)
    with contextlib.ExitStack() as opened:
        backend = get_backend(manifest.backend)
        runner = opened.enter_context(backend.load(folder, manifest, manifest.spec.graphs[0]))
        candidate = None
        if manifest.device != "cpu":  # where decoding and suppressing are other code than the host's
            candidate = opened.enter_context(_kind(model).open(folder, conf=CONF, iou=IOU))
        return certify(model, runner, images, precision=manifest.precision, candidate=candidate)


def certify_engine(
    folder: Path,
    *,
    model: Path | None = None,
    images: Sequence[Path] | None = None,
    trust_checkpoint: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> EngineManifest:
    """Certifies on this device an engine that was built before, and records the outcome, good or bad, in engine.json.

    Args:
        folder: the engine's.
        model: the weights that it was built from; default: found under models/ by their sha256.
        images: real ones; default: two photographs.
        trust_checkpoint: load a pickle without the allow-list.
        progress: is told each stage as it begins.

    Raises:
        ManifestError: the engine is damaged: its files are not those that it was built with.
        ArtifactError: the weights are not under models/, or engine.json cannot be written.
        CheckpointError: the weights are not those that the engine was built from, or cannot be used.
        BackendError: this machine cannot run the engine, or has no PyTorch to compare with.
        CertificateError: no image could be used.
    """
    progress("checking the engine's files")
    manifest = artifacts.read_manifest(folder, verify=True)
    get_backend(manifest.backend).check_runnable(manifest)
    loaded = load_reference(folder, manifest, model=model, trust_checkpoint=trust_checkpoint, progress=progress)
    progress("certifying")
    samples = list(images) if images is not None else default_images()
    certificate = certify_files(loaded, folder, manifest, samples)
    # Why modules are kept in FP32 was found when it was built, and is as true as before.
    before = manifest.certificate
    manifest = replace(manifest, certificate=replace(certificate, kept=before.kept, search=before.search))
    artifacts.write_manifest(folder, manifest)
    return manifest


def load_reference(
    folder: Path,
    manifest: EngineManifest,
    *,
    model: Path | None = None,
    trust_checkpoint: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
    option: str = "--model",
) -> LoadedModel:
    """The eager FP32 modules of the checkpoint that an engine was built from: what it has to agree with.

    Args:
        folder: the engine's, with its manifest.
        model, trust_checkpoint, progress: as for `certify_engine`.
        option: what names the weights, for messages.

    Raises:
        ManifestError: the engine is served with other settings than its checkpoint says.
        ArtifactError: the weights are not under models/.
        CheckpointError: the weights are not those that the engine was built from, or cannot be used.
        BackendUnavailableError: there is no PyTorch here.
    """
    if missing := machine.missing_packages("torch", "ultralytics"):
        raise BackendUnavailableError(
            f"comparing with PyTorch needs {', '.join(missing)}; `pip install 'visionfast[build]'`"
        )
    progress("reading the checkpoint")
    checkpoint = open_checkpoint(weights_of(manifest, model, option=option), trust=trust_checkpoint)
    loaded = identify(checkpoint).load(
        checkpoint,
        name=manifest.spec.name,
        size_hw=manifest.spec.preprocess.size_hw,
        batch=manifest.spec.batch,
        resize=manifest.spec.preprocess.resize if manifest.spec.task == "embed" else None,
    )
    check_outputs(folder, manifest)
    _check_spec(folder, manifest, loaded)
    return loaded


def weights_of(manifest: EngineManifest, named: Path | None, *, option: str = "--model") -> Path:
    """The file that the engine was built from: the named one, checked, or the one under models/ with its sha256.

    Raises:
        ArtifactError: it is not under models/; the message has the `option` that names it.
        CheckpointError: the named one is another.
    """
    expected = manifest.weights_sha256
    if named is not None:
        try:
            got = artifacts.sha256_file(named)
        except OSError as error:
            raise CheckpointError(f"{named}: cannot be read ({error.strerror})") from error
        if got != expected:
            raise CheckpointError(
                f"{named}: expected the weights that the engine was built from, sha256 {expected}, got {got}; "
                "name those, or build an engine from these"
            )
        return named
    for path in artifacts.model_files():
        with contextlib.suppress(OSError):  # one that may not be read is not the one
            if artifacts.sha256_file(path) == expected:
                return path
    raise ArtifactError(
        f"{manifest.spec.name}: no file under {artifacts.models_home()} has the sha256 {expected} of the weights that "
        f"the engine was built from; name it with {option}"
    )


def _check_spec(folder: Path, manifest: EngineManifest, loaded: LoadedModel) -> None:
    """Raises `ManifestError` unless the engine is served with what its checkpoint says: the proof is for both."""
    for name in ("family", "architecture", "task", "preprocess", "class_names", "strides"):
        expected, got = getattr(loaded.spec, name), getattr(manifest.spec, name)
        if got != expected:
            raise ManifestError(
                f"{folder / artifacts.MANIFEST_NAME}: spec.{name}: expected what the weights say, {_short(expected)}, "
                f"got {_short(got)}; build the engine again"
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def run_eager(model: LoadedModel, images: Sequence[Path]) -> None:
    """Runs the eager module on images, for those that watch it.

    Raises:
        ImageError: one cannot be decoded.
    """
    if model.spec.task == "prompt-segment":
        session = eager_session(model)
        for path in images:
            run_prompts(model, session, decode_image(path))
        return
    if model.spec.task == "embed":
        run_embeddings(model, images)
        return
    with _eager(model) as (reference, _):
        reference(list(images))


def _kind(model: LoadedModel) -> type[Detector]:
    return Segmenter if model.spec.task == "segment" else Detector


@contextlib.contextmanager
def _eager(model: LoadedModel) -> Iterator[tuple[Detector, _Recorder]]:
    """The reference, and what it last computed."""
    graph = model.spec.graphs[0]
    recorder = _Recorder(TorchRunner(model.modules[graph.name], graph))
    with _kind(model)(model.spec, recorder, conf=CONF, iou=IOU) as reference:
        yield reference, recorder


class _Recorder:
    """A runner that remembers what it last answered, and leaves closing to its owner."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.inputs = runner.inputs
        self.outputs = runner.outputs
        self.last: dict[str, npt.NDArray[Any]] = {}

    def infer(self, feeds: Any, *, copy: bool = True) -> dict[str, npt.NDArray[Any]]:
        self.last = self._runner.infer(feeds, copy=True)
        return self.last

    def close(self) -> None:
        self.last = {}

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def images_in(folder: Path) -> list[Path]:
    """The files of a folder that have an image's suffix, sorted.

    Raises:
        CertificateError: there is none.
    """
    suffixes = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
    try:
        found = sorted(p for p in folder.iterdir() if p.suffix.lower() in suffixes and p.is_file())
    except OSError as error:
        raise CertificateError(f"{folder}: expected a folder with images to certify on ({error.strerror})") from error
    if not found:
        raise CertificateError(f"{os.fspath(folder)}: expected a folder with images to certify on")
    return found
