"""ultralytics' own ways to run a YOLOv8 checkpoint: its predictor on PyTorch, and on its own export to OpenVINO.

Importing ultralytics leaves torch one thread fewer and OpenCV a single one, for the whole process; that is set right,
so that it and all others have every processor. Its loaders run what a checkpoint's pickle says, so visionfast's
allow-list looks at the file first.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from unittest import mock

import cv2
import numpy as np

from visionfast import machine
from visionfast.backends.openvino import kept_core
from visionfast.bench.parts import DenseMasks
from visionfast.bench.records import System
from visionfast.bench.systems import Answer, Call, taking_turns
from visionfast.checkpoint import open_checkpoint
from visionfast.errors import BackendUnavailableError
from visionfast.results import Detections

if TYPE_CHECKING:
    import torch

__all__ = ["UltralyticsPredict", "ultralytics_module", "ultralytics_openvino", "ultralytics_pytorch"]

_CONF, _IOU, _MAX_DET = 0.25, 0.7, 300
_STAGES = {"preprocess": "preprocess", "inference": "engine", "postprocess": "postprocess"}  # its words: ours


def _yolo(path: Path, task: str | None = None) -> Any:
    """`ultralytics.YOLO` of a checkpoint or an export, with the process's threads as they were.

    Raises:
        CheckpointError: the checkpoint is refused.
        BackendUnavailableError: ultralytics is missing.
    """
    if path.is_file():
        open_checkpoint(path)
    cpus, cv2_threads = machine.usable_cpus(), cv2.getNumThreads()
    os.environ.setdefault("OMP_NUM_THREADS", str(cpus))  # else it sets 1, which torch reads when it is first imported
    for name in ("YOLO_OFFLINE", "YOLO_AUTOINSTALL", "YOLO_VERBOSE"):
        os.environ.setdefault(name, str(name == "YOLO_OFFLINE").lower())
    try:
        import torch
        from ultralytics.models import YOLO
        from ultralytics.utils import LOGGER
    except ImportError as error:
        raise BackendUnavailableError(
            f"ultralytics: expected the package, but {error}; `pip install 'visionfast[build]'`"
        ) from error
    LOGGER.setLevel(logging.ERROR)  # it tells of every step
    try:
        return YOLO(str(path), task=task)
    finally:
        torch.set_num_threads(cpus)
        cv2.setNumThreads(cv2_threads)


def ultralytics_module(weights: Path) -> torch.nn.Module:
    """The module as ultralytics loads it: eager, FP32, convolutions and batch normalisation apart.

    Raises:
        CheckpointError: the checkpoint is refused.
        BackendUnavailableError: ultralytics is missing.
    """
    module: torch.nn.Module = _yolo(weights).model.float().eval()
    return module


class UltralyticsPredict:
    """`model.predict` on a decoded image, as its documentation has it; masks at the picture's size.

    Args:
        system: who it is.
        yolo: `ultralytics.YOLO`.
        size_hw: of the input, pixels.
        rect: let it choose a smaller input that fits the picture, which it does where it is not told otherwise.
    """

    caches = False

    def __init__(self, system: System, yolo: Any, size_hw: tuple[int, int], *, rect: bool) -> None:
        self.system = system
        self._yolo = yolo
        self._options: dict[str, Any] = {"imgsz": list(size_hw), "conf": _CONF, "iou": _IOU, "max_det": _MAX_DET}
        self._options |= {"rect": rect, "device": "cpu", "verbose": False, "save": False}
        self._options["retina_masks"] = yolo.task == "segment"
        cv2_threads = cv2.getNumThreads()
        self.call(cv2.imencode(".jpg", np.full((*size_hw, 3), 114, np.uint8))[1].tobytes())  # loads what there is
        import torch

        torch.set_num_threads(machine.usable_cpus())
        cv2.setNumThreads(cv2_threads)

    def call(self, encoded: bytes) -> Answer:
        started = perf_counter_ns()
        pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)  # (H, W, 3) u8 BGR
        decoded = perf_counter_ns()
        result = self._yolo.predict(pixels, **self._options)[0]
        rows = result.boxes.data.numpy()  # (N, 6): xyxy, confidence, class
        detections = Detections(rows[:, :4], rows[:, 4], rows[:, 5].astype(np.int64), result.orig_shape)
        found: Any = detections
        if self._options["retina_masks"]:
            masks = np.zeros((0, *result.orig_shape), np.bool_)
            if result.masks is not None:
                masks = result.masks.data.numpy().astype(np.bool_, copy=False)  # (N, H, W)
            found = DenseMasks(detections, masks)
        stage_ns = {ours: int(result.speed[theirs] * 1e6) for theirs, ours in _STAGES.items()}
        return Answer(found, {"decode": decoded - started, **stage_ns})

    def parallel(self, n: int) -> Sequence[Call]:
        """Its predictor keeps what it works on in itself: who asks meanwhile waits."""
        return taking_turns([self.call], n)

    def close(self) -> None:
        pass


def ultralytics_pytorch(weights: Path, size_hw: tuple[int, int]) -> Iterator[UltralyticsPredict]:
    """Its predictor on PyTorch: with the whole input as everybody else here, and as it comes.

    Raises:
        CheckpointError: the checkpoint is refused.
        BackendUnavailableError: ultralytics is missing.
    """
    for key, name, rect in (
        ("ultralytics", "ultralytics on PyTorch, whole input", False),
        ("ultralytics-rect", "ultralytics on PyTorch, as it comes", True),
    ):
        details = {"ultralytics": machine.package_version("ultralytics"), "precision": "fp32", "rect": str(rect)}
        yield UltralyticsPredict(System(key, name, "peer", details), _yolo(weights), size_hw, rect=rect)


def ultralytics_openvino(weights: Path, size_hw: tuple[int, int], scratch: Path) -> Iterator[UltralyticsPredict]:
    """Its own export to OpenVINO, as it comes and where that is not FP32 also held to FP32.

    ultralytics 8.4 names no precision to OpenVINO, which then takes BF16 on processors that have it, unasked.

    Args:
        weights: the checkpoint.
        size_hw: of the input, pixels.
        scratch: an empty folder that the export is written into.

    Raises:
        CheckpointError: the checkpoint is refused.
        BackendUnavailableError: ultralytics or openvino is missing.
    """
    if missing := machine.missing_packages("openvino"):
        raise BackendUnavailableError(f"ultralytics on OpenVINO: expected {', '.join(missing)}; install it")
    import openvino

    core = kept_core()
    copied = Path(shutil.copy(weights, scratch))  # the export is written beside the weights
    exporting = _yolo(copied)
    with warnings.catch_warnings():  # ultralytics 8.4 exports by torch.jit, which torch 2.14 warns of line by line
        warnings.simplefilter("ignore")
        exported = Path(exporting.export(format="openvino", imgsz=list(size_hw), verbose=False))
    for pinned in (False, True):
        yolo = _yolo(exported, exporting.task)
        details = {"ultralytics": machine.package_version("ultralytics")}
        # A core of its own would take its signals' stack from whichever thread drops it last: see `kept_core`.
        with mock.patch.object(openvino, "Core", return_value=core):
            predict = UltralyticsPredict(System("", "", "peer", details), yolo, size_hw, rect=False)
        loaded = yolo.predictor.model.backend
        if pinned:
            hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
            model = core.read_model(next(exported.glob("*.xml")))
            loaded.ov_compiled_model = core.compile_model(model, "CPU", hints)
        hint = loaded.ov_compiled_model.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        precision = {"f32": "fp32", "f16": "fp16"}.get(hint, hint)
        how = "held to FP32" if pinned else f"as it comes ({precision.upper()})"
        key = "ultralytics-openvino" if precision == "fp32" else f"ultralytics-openvino-{precision}"
        name = f"ultralytics on OpenVINO, {how}"
        predict.system = System(key, name, "peer", {**details, "precision": precision})
        yield predict
        if precision == "fp32":
            break
