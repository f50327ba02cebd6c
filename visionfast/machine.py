"""What this machine has: processors it may use, NVIDIA GPUs and their driver. Nothing is changed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Gpu",
    "cpu_flags",
    "cpu_name",
    "cuda_release",
    "driver_version",
    "environment",
    "gpus",
    "missing_packages",
    "package_version",
    "platform_name",
    "usable_cpus",
]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device. `sm` is its compute capability as compilers write it: `sm89`."""

    index: int
    name: str
    sm: str


def usable_cpus() -> int:
    """Processors that this process may really use: its affinity, cut by a container's quota; at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: no quota to obey
    return max(1, count)


@functools.cache
def _cpuinfo() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """The kernel's names of the processor's instruction sets, e.g. `avx512f`, `amx_bf16`."""
    return frozenset(_cpuinfo().get("flags", "").split())


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The CUDA devices that the driver shows, through `libcuda` alone; none where there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        major, minor = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        # 75 and 76: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR in cuda.h
        cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        found.append(Gpu(index, name.value.decode(errors="replace"), f"sm{major.value}{minor.value}"))
    return tuple(found)


@functools.cache
def driver_version() -> int:
    """The newest CUDA that the NVIDIA driver serves, as CUDA counts: 13010 is 13.1; 0 where there is no driver."""
    version = ctypes.c_int(0)
    try:
        # Needs no cuInit: it answers on a machine whose driver is there and whose GPU is not.
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0
    except OSError:
        return 0
    return 0 if failed else version.value


def cuda_release(version: int) -> str:
    """As people write it: 13010 is `13.1`."""
    return f"{version // 1000}.{version % 1000 // 10}"


def missing_packages(*names: str) -> list[str]:
    """Those of these top-level packages that are not installed; nothing is imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def package_version(*names: str) -> str:
    """Of the first of these distributions that is installed, as PyPI spells them; empty where none is."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def platform_name() -> str:
    """Operating system and processor architecture, in one spelling for each: `linux-x86_64`, `linux-aarch64`."""
    architecture = platform.machine().lower()
    same = {"amd64": "x86_64", "arm64": "aarch64"}
    return f"{platform.system().lower()}-{same.get(architecture, architecture)}"


def environment() -> dict[str, str]:
    """The facts that a measurement or a certificate should carry."""
    here = gpus()
    return {
        "cpu": cpu_name(),
        "cpus": str(usable_cpus()),
        "gpu": ", ".join(gpu.name for gpu in here) or "none",
        **({"cuda driver": cuda_release(driver_version())} if here else {}),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
