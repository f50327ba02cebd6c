"""What the checks work on: sizes, networks, pictures, and sessions of a network on the machine."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from gpu_checks import network
from gpu_checks.machine import Machine
from gpu_checks.rows import Deadline
from visionfast import artifacts
from visionfast._version import __version__
from visionfast.backends import CompileRequest, DeviceEngine, get_backend
from visionfast.cuda import Device
from visionfast.errors import VisionfastError
from visionfast.families import LoadedModel
from visionfast.preprocess.decode import decode_image
from visionfast.preprocess.reference import letterbox, normalise
from visionfast.types import Certificate, EngineManifest, Letterbox, Task

__all__ = ["FULL", "TINY", "Context", "Picture", "Scale", "Subjects", "has"]


def has(*packages: str) -> str:
    """The first of the packages that is not installed, in words; empty where all are."""
    missing = [p for p in packages if not _found(p)]
    return f"{missing[0]} is not installed" if missing else ""


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is.

    Attributes:
        networks: scales of YOLOv8 whose latency is measured, the smallest first.
        size_hw: of the networks' input.
        classes: of seeded networks.
        batches: of the latency.
        anchors, many_anchors: of the kernels' input, and of its large case.
        many_classes: of the large case.
        many_slots: batch of the large case.
        max_det: objects an image at most.
        survivors: objects whose masks are timed.
        frame_hw: of the raw frames and the synthetic JPEG.
        repeats: of a timed kernel.
        rounds: of the latency comparison, at most.
        threads: of the concurrent sessions.
        thread_seconds: that they go on for, at most.
        warm_up: requests before one is looked at.
        requests: that are counted together.
    """

    networks: tuple[str, ...]
    size_hw: tuple[int, int]
    classes: int
    batches: tuple[int, ...]
    anchors: int
    many_anchors: int
    many_classes: int
    many_slots: int
    max_det: int
    survivors: int
    frame_hw: tuple[int, int]
    repeats: int
    rounds: int
    threads: int
    thread_seconds: float
    warm_up: int
    requests: int


FULL = Scale(("n", "s"), (640, 640), 80, (1, 8), 8400, 33600, 1000, 32, 300, 100, (1080, 1920), 200, 100, 8, 30, 3, 20)
TINY = Scale(("tiny",), (32, 64), 3, (1, 2), 42, 300, 40, 2, 9, 4, (18, 32), 1, 1, 2, 0.1, 1, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """`source` is what a session is given: an encoded JPEG, or where nothing here can decode one, `pixels`."""

    name: str
    source: bytes | npt.NDArray[np.uint8]
    pixels: npt.NDArray[np.uint8]


class Subjects:
    """Makes each thing once.

    Args:
        machine: that the sessions run on.
        scale: of everything.
        weights: YOLOv8 checkpoints; a network that none of them is of is seeded.
        scratch: a folder for compiled engines.
    """

    def __init__(self, machine: Machine, scale: Scale, weights: Sequence[Path], scratch: Path) -> None:
        self._machine = machine
        self._scale = scale
        self._scratch = scratch
        self._weights, self.notes = _by_architecture(weights)
        self._models: dict[tuple[str, Task, int], LoadedModel] = {}
        self._compiled: dict[tuple[str, int, str], tuple[Path, EngineManifest]] = {}
        self._conf: dict[str, float] = {}
        self._pictures: list[Picture] | None = None

    def model(self, network_scale: str, task: Task = "detect", batch: int = 1) -> LoadedModel:
        key = (network_scale, task, batch)
        if key not in self._models:
            name = f"yolov8{network_scale}{'-seg' if task == 'segment' else ''}"
            size_hw, path = self._scale.size_hw, self._weights.get(name)
            if path is not None:
                self._models[key] = _load(path, size_hw, batch)
            else:
                self._models[key] = network.seeded(
                    network_scale, task, size_hw=size_hw, batch=batch, classes=self._scale.classes
                )
        return self._models[key]

    def is_trained(self, model: LoadedModel) -> bool:
        return model.spec.architecture in self._weights

    def origin(self, model: LoadedModel) -> str:
        return f"{model.spec.architecture} {'trained' if self.is_trained(model) else 'seeded weights'}"

    def conf(self, model: LoadedModel) -> float:
        """The usual threshold; for seeded weights one that some hundred anchors of the first picture pass."""
        if self.is_trained(model):
            return 0.25
        name = model.spec.architecture
        if name not in self._conf:
            one = self.model(name.removeprefix("yolov8").removesuffix("-seg"), model.spec.task)
            raw = eager_outputs(one, self.pictures()[0].pixels)[0]
            best = np.sort(raw["predictions"][0, 4 : 4 + len(one.spec.class_names)].max(axis=0))
            self._conf[name] = float(best[-min(len(best) // 4, 100) - 1])
        return self._conf[name]

    def engine(self, model: LoadedModel, device: Device, backend: str = "torch") -> DeviceEngine:
        """The model in FP16 with its islands, as the backend compiles and loads it."""
        key = (model.spec.architecture, model.spec.batch, backend)
        if key not in self._compiled:
            self._compiled[key] = self._compile(model, backend)
        folder, manifest = self._compiled[key]
        return get_backend(backend).load_on(device, folder, manifest, manifest.spec.graphs[0])

    def open(
        self,
        model: LoadedModel,
        *,
        device: Device | None = None,
        engine: DeviceEngine | None = None,
        backend: str = "torch",
        graph: bool | None = None,
        conf: float | None = None,
        decoder: Literal["dali", "cpu"] = "cpu",
    ) -> Any:
        """A `Detector` or `Segmenter` of its own stream; closed by the caller."""
        from visionfast.pipeline import Detector, Segmenter

        kind = Segmenter if model.spec.task == "segment" else Detector
        engine = engine or self.engine(model, device or self._machine.device(), backend)
        options: dict[str, Any] = {
            "decoder": decoder,
            "conf": self.conf(model) if conf is None else conf,
            "max_det": self._scale.max_det,
        }
        return kind(model.spec, engine, graph=graph, **options)

    def pictures(self) -> list[Picture]:
        """A synthetic one of the scale's frame, and the photographs where they are; never none."""
        if self._pictures is None:
            self._pictures = [_synthetic(self._scale.frame_hw), *([] if self._machine.is_rehearsal else _photographs())]
        return self._pictures

    def _compile(self, model: LoadedModel, backend_name: str) -> tuple[Path, EngineManifest]:
        backend, spec, graph = get_backend(backend_name), model.spec, model.spec.graphs[0]
        folder = self._scratch / f"{spec.architecture}-{spec.batch}-{backend_name}"
        folder.mkdir(parents=True)
        islands, onnx_path = model.fp32_islands[graph.name], folder / "model.onnx"
        if backend_name == "torch":
            device, typed = "cuda", _typed(graph)
        else:
            from visionfast.export import export_onnx

            device = backend.resolve_device(None)
            typed = export_onnx(model.modules[graph.name], graph, onnx_path, precision="fp16", keep_fp32=islands)
        module = model.modules[graph.name]
        compiled = backend.compile(
            CompileRequest(typed, onnx_path, module, spec.preprocess, "fp16", islands, device, folder)
        )
        manifest = EngineManifest(
            spec=replace(spec, graphs=(compiled.graph,)),
            backend=backend_name,
            precision="fp16",
            device=device,
            runtime_version=backend.availability().version,
            files={graph.name: compiled.file},
            sha256={},
            onnx_sha256={},
            weights_sha256="",
            keep_fp32=islands,
            certificate=Certificate("not yet run on a device"),
            created="",
            visionfast_version=__version__,
        )
        return folder, manifest


@dataclass(frozen=True, slots=True)
class Context:
    """What a check is given.

    Attributes:
        until: when it should be done.
        copy_bytes_per_s: of the device's memory, reading and writing together; 0 before it was measured.
    """

    machine: Machine
    scale: Scale
    subjects: Subjects
    seed: int
    until: Deadline
    copy_bytes_per_s: float


def eager_outputs(model: LoadedModel, pixels: npt.NDArray[np.uint8]) -> tuple[dict[str, npt.NDArray[Any]], Letterbox]:
    """Of the module in FP32 on the CPU, for one image by the definition's letterbox; the model's batch is 1."""
    graph = model.spec.graphs[0]
    canvas, where = letterbox(pixels, model.spec.preprocess)
    with torch.inference_mode():
        tensor = torch.from_numpy(normalise(canvas, model.spec.preprocess))[None]  # (1, 3, h, w)
        made = model.modules[graph.name](tensor)
    made = made if isinstance(made, tuple) else (made,)
    return {spec.name: tensor.numpy() for spec, tensor in zip(graph.outputs, made, strict=True)}, where


def _typed(graph: Any) -> Any:
    """The tensors of the FP16 graph: boxes and scores come out of its FP32 island, prototypes do not."""
    inputs = tuple(replace(spec, dtype="float16") for spec in graph.inputs)
    outputs = tuple(replace(spec, dtype="float16") if spec.name == "prototypes" else spec for spec in graph.outputs)
    return replace(graph, inputs=inputs, outputs=outputs)


# ---- checkpoints -------------------------------------------------------------------------------------------


def _by_architecture(weights: Sequence[Path]) -> tuple[dict[str, Path], list[str]]:
    """The named files, or those under models/, by their architecture; and what is wrong with the others."""
    found: dict[str, Path] = {}
    notes = []
    for path in weights or _model_files():
        try:
            found.setdefault(_load(path, (64, 64), 1).spec.architecture, path)
        except (VisionfastError, ImportError) as error:
            notes.append(f"{path.name}: {error}")
    return found, notes


def _model_files() -> list[Path]:
    return sorted(artifacts.model_files())


def _load(path: Path, size_hw: tuple[int, int], batch: int) -> LoadedModel:
    from visionfast.checkpoint import open_checkpoint
    from visionfast.families import identify

    checkpoint = open_checkpoint(path)
    if has("ultralytics"):
        return network.with_weights(checkpoint, size_hw=size_hw, batch=batch)
    return identify(checkpoint).load(checkpoint, name=path.stem, size_hw=size_hw, batch=batch)


# ---- pictures ----------------------------------------------------------------------------------------------


def _photographs() -> list[Picture]:
    spec = importlib.util.find_spec("ultralytics") if _found("ultralytics") else None
    folder = Path(spec.origin).parent / "assets" if spec and spec.origin else Path("assets of nobody")
    paths = [folder / name for name in ("bus.jpg", "zidane.jpg")]
    return [_picture(path.name, path.read_bytes()) for path in paths if path.is_file() and _decodes()]


def _decodes() -> bool:
    return not has("simplejpeg")


def _picture(name: str, encoded: bytes) -> Picture:
    return Picture(name, encoded, decode_image(encoded))


def _synthetic(image_hw: tuple[int, int]) -> Picture:
    """Smooth shapes with edges and some noise, so that its JPEG has a photograph's size."""
    height, width = image_hw
    rng = np.random.default_rng(7)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    pixels = np.empty((height, width, 3), np.float32)
    for channel in range(3):
        a, b, c = rng.uniform(20, 90, 3)
        pixels[..., channel] = 120 + 60 * np.sin(x / a + channel) + 50 * np.cos(y / b) + 20 * np.sin((x + y) / c)
    for _ in range(40):
        top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
        h, w = int(rng.integers(2, height // 3)), int(rng.integers(2, width // 4))
        pixels[top : top + h, left : left + w] += rng.uniform(-80, 80, 3)
    pixels += rng.normal(0, 4, pixels.shape)
    image = pixels.clip(0, 255).astype(np.uint8)
    name = f"synthetic {width}×{height}"
    encoded = _encode_jpeg(image)
    return Picture(name, image, image) if encoded is None or not _decodes() else _picture(name, encoded)


def _encode_jpeg(image: npt.NDArray[np.uint8]) -> bytes | None:
    """By whichever package there is."""
    if not has("simplejpeg"):
        import simplejpeg

        return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=90, colorsubsampling="420"))
    if not has("PIL"):
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=90)
        return buffer.getvalue()
    return None
