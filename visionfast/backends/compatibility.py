"""Whether an engine fits this machine, decided from facts before anything of it is loaded.

TensorRT's own answer to an engine of another release, GPU or system is a line in a log and `None`, after the file
was read whole. Here every mismatch names both sides and what mends it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from visionfast import machine
from visionfast.errors import BackendUnavailableError, IncompatibleEngineError
from visionfast.machine import Gpu, cuda_release
from visionfast.types import EngineManifest

__all__ = ["MachineFacts", "build_command", "check_engine", "cuda_major", "machine_facts"]

# Their plans are read by exactly the release that wrote them, on the system that it wrote them on.
_BOUND_TO_RELEASE = ("tensorrt", "tensorrt-rtx")
_ANY_GPU = "cuda"
# The oldest driver series of each CUDA major, from NVIDIA's CUDA compatibility guide.
_DRIVER_SERIES = {12: 525, 13: 580}


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What decides whether an engine runs.

    Attributes:
        gpus: as the driver shows them.
        driver_version: the newest CUDA that the driver serves, 13010 for 13.1; 0 where there is none.
        platform: `linux-x86_64`.
        runtime_version: of the backend's package; empty where it is not installed.
        runtime_cuda: the CUDA major that the package was made for, `13`; 0 where it does not say.
    """

    gpus: tuple[Gpu, ...]
    driver_version: int
    platform: str
    runtime_version: str
    runtime_cuda: int = 0


def machine_facts(runtime_version: str, runtime_cuda: int = 0) -> MachineFacts:
    """This machine's facts, with those of the backend's package."""
    return MachineFacts(
        machine.gpus(), machine.driver_version(), machine.platform_name(), runtime_version, runtime_cuda
    )


def cuda_major(package: str) -> int:
    """The CUDA major in a package's name, `tensorrt-rtx-cu13` → 13; 0 where there is none."""
    match = re.search(r"-cu(\d{2})(?!\d)", package, re.ASCII)
    return int(match[1]) if match else 0


def check_engine(manifest: EngineManifest, *, here: MachineFacts, device_index: int | None = None) -> int | None:
    """Raises unless this machine can run the engine.

    Args:
        manifest: the engine's.
        here: the machine's facts; nothing else is looked at.
        device_index: the GPU to run on, as CUDA counts them; `None`: the first that the engine was compiled for.

    Returns:
        The index of the GPU to run on; `None` for an engine for the CPU.

    Raises:
        BackendUnavailableError: the GPU, its driver or the backend's package is missing, or the driver too old.
        IncompatibleEngineError: the engine was made for another system, release or GPU.
    """
    if manifest.device == "cpu":
        return None
    _check_present(manifest, here)
    if manifest.backend in _BOUND_TO_RELEASE:
        _check_release(manifest, here)
    _check_driver(manifest, here)
    return _chosen_gpu(manifest, here, device_index)


def build_command(manifest: EngineManifest, *, gpu: str | None = None) -> str:
    """The command that makes such an engine again, for `gpu`; default: for the GPU that it was made for."""
    h, w = manifest.spec.preprocess.size_hw
    target = gpu or manifest.device
    parts = [f"visionfast build --model {manifest.spec.name} --backend {manifest.backend}"]
    # TensorRT itself builds for the GPU that is there, and takes no other name.
    if target not in ("", "cpu") and manifest.backend != "tensorrt":
        parts.append(f"--gpu {target}")
    parts.append(f"--precision {manifest.precision} --imgsz {h if h == w else f'{h}x{w}'}")
    if manifest.spec.batch != 1:
        parts.append(f"--batch {manifest.spec.batch}")
    return " ".join(parts)


def _check_present(manifest: EngineManifest, here: MachineFacts) -> None:
    name = manifest.backend
    if not here.gpus:
        found = (
            f"its driver serves CUDA {cuda_release(here.driver_version)} and shows no GPU (CUDA_VISIBLE_DEVICES?)"
            if here.driver_version
            else "this machine has none"
        )
        raise BackendUnavailableError(
            f"{name}: the engine needs an NVIDIA GPU ({manifest.device}) and its driver; {found}"
        )
    if not here.runtime_version:
        extra = "build" if name == "torch" else name
        raise BackendUnavailableError(
            f"{name}: the engine needs {name} {manifest.runtime_version}, which is not installed; "
            f"`pip install 'visionfast[{extra}]'`"
        )


def _check_release(manifest: EngineManifest, here: MachineFacts) -> None:
    name = manifest.backend
    if manifest.platform and manifest.platform != here.platform:
        raise IncompatibleEngineError(
            f"platform: the engine was built on {manifest.platform}, this machine is {here.platform}; build it here: "
            f"`{build_command(manifest)}`"
        )
    if manifest.runtime_version != here.runtime_version:
        raise IncompatibleEngineError(
            f"{name}: the engine needs exactly {manifest.runtime_version}, here is {here.runtime_version}; build it "
            f"again: `{build_command(manifest)}`"
        )


def _check_driver(manifest: EngineManifest, here: MachineFacts) -> None:
    if here.driver_version >= here.runtime_cuda * 1000:
        return
    series = _DRIVER_SERIES.get(here.runtime_cuda)
    newer = f"of the {series} series or newer" if series else f"that serves CUDA {here.runtime_cuda}"
    raise BackendUnavailableError(
        f"driver: {manifest.backend} {here.runtime_version} needs one for CUDA {here.runtime_cuda}.0 or newer, this "
        f"machine's serves {cuda_release(here.driver_version)}; install an NVIDIA driver {newer}"
    )


def _chosen_gpu(manifest: EngineManifest, here: MachineFacts, index: int | None) -> int:
    by_index = {gpu.index: gpu for gpu in here.gpus}
    if index is not None and index not in by_index:
        raise BackendUnavailableError(f"cuda:{index}: this machine has {_named(here.gpus)}")
    candidates = here.gpus if index is None else (by_index[index],)
    for gpu in candidates:
        if manifest.device in (_ANY_GPU, gpu.sm):
            return gpu.index
    raise IncompatibleEngineError(
        f"device: the engine is for {manifest.device}, here is {_named(candidates)}; build one for it: "
        f"`{build_command(manifest, gpu=candidates[0].sm)}`"
    )


def _named(gpus: tuple[Gpu, ...]) -> str:
    return ", ".join(f"cuda:{gpu.index} {gpu.sm} ({gpu.name})" for gpu in gpus)
