"""What figures depend on: machine, clocks, versions, revision."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from visionfast import machine

__all__ = ["environment"]

_PACKAGES = (
    "visionfast",
    "numpy",
    "opencv-python",
    "simplejpeg",
    "pillow",
    "openvino",
    "tensorrt-cu13",
    "tensorrt-rtx-cu13",
    "nvidia-dali-cuda130",
    "torch",
    "torchvision",
    "ultralytics",
    "onnxruntime",
)
_CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")
_GPU_CLOCKS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "persistence_mode")


def environment() -> dict[str, str]:
    """As text, name → value; what this machine does not tell is absent."""
    facts = machine.environment()
    facts["load_average"] = " ".join(f"{load:.2f}" for load in os.getloadavg())
    for name, file in (("governor", "scaling_governor"), ("max_khz", "cpuinfo_max_freq")):
        if text := _read(_CPUFREQ / file):
            facts[name] = text
    facts |= _gpu_clocks()
    facts |= {package: version for package in _PACKAGES if (version := machine.package_version(package))}
    if revision := _revision():
        facts["revision"] = revision
    return facts


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gpu_clocks() -> dict[str, str]:
    """Of the first GPU, now, as nvidia-smi has them."""
    if not machine.gpus() or not shutil.which("nvidia-smi"):
        return {}
    asked = ["nvidia-smi", f"--query-gpu={','.join(_GPU_CLOCKS)}", "--format=csv,noheader", "--id=0"]
    values = _said(asked).split(", ")
    return {f"gpu {name}": value for name, value in zip(_GPU_CLOCKS, values, strict=False) if value}


def _revision() -> str:
    """Of the checkout that this module is in, with a mark where something in it was changed since."""
    folder = Path(__file__).parent
    if not any((parent / ".git").exists() for parent in folder.parents[:2]):
        return ""  # installed: its version says it
    return _said(["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"])


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
