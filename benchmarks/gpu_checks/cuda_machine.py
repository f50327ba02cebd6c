"""A CUDA device in torch's words: the only module of the checks that says `torch.cuda`.

Read against torch 2.14: `cuda/streams.py` (Event), `cuda/memory.py` (memory_stats, host_memory_stats), Kineto's trace
categories. Nothing here changes a setting of the device.
"""

from __future__ import annotations

import collections
import importlib.metadata
import json
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_checks.machine import Calls
from gpu_checks.rows import Deadline
from visionfast.cuda import CudaDevice, Device

__all__ = ["CudaMachine"]

_REQUEST = "gpu_check request"
_IN_FLIGHT = 40  # timed runs that are put on the stream before it is waited for
_WARM_UP = 10
# Of the CUDA runtime and driver, as Kineto names them. A memcpy that is not Async waits.
_WAITS = re.compile(
    r"cu(da)?((Stream|Device|Event|Ctx|Context)Synchronize|Memcpy(?!.*(Async|Batch|GetAttr)).*)(_v\d+)?"
)
_ALLOCATES = re.compile(
    r"cu(da)?(Malloc|MemAlloc|HostAlloc|HostRegister|MemHostAlloc|MemHostRegister|MemCreate|MemMap|MemAddressReserve"
    r"|Free|MemFree|HostUnregister|MemRelease|MemUnmap|ArrayCreate).*"
)
_FACTS = (
    "driver_version", "pstate", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit",
    "power.draw", "temperature.gpu", "persistence_mode", "ecc.mode.current", "mig.mode.current",
)  # fmt: skip
_PACKAGES = (
    "torch", "triton", "torchvision", "numpy", "opencv-python", "simplejpeg", "pillow", "pycocotools", "ultralytics",
    "nvidia-dali-cuda130", "tensorrt-cu13", "tensorrt-rtx-cu13", "visionfast",
)  # fmt: skip


class CudaMachine:
    """See `gpu_checks.machine.Machine`. Raises `BackendUnavailableError` where there is no CUDA device."""

    is_rehearsal = False

    def __init__(self, index: int = 0) -> None:
        CudaDevice(index)  # says what is missing
        torch.cuda.set_device(index)
        self._index = index
        self._properties: Any = torch.cuda.get_device_properties(index)
        # Several times the L2 cache: what was in it is not in it afterwards.
        l2_bytes = int(getattr(self._properties, "L2_cache_size", 0))
        self._flush = torch.empty(max(4 * l2_bytes, 256 << 20), dtype=torch.uint8, device=f"cuda:{index}")
        torch.cuda.synchronize(index)

    @property
    def name(self) -> str:
        return str(self._properties.name)

    def device(self) -> Device:
        return CudaDevice(self._index)

    def facts(self) -> dict[str, str]:
        properties = self._properties
        found = {
            "card": self.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
            "memory_bytes": str(properties.total_memory),
            "l2_bytes": str(getattr(properties, "L2_cache_size", "unknown")),
            "cuda_of_torch": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "cudnn_allow_tf32": str(torch.backends.cudnn.allow_tf32),
        }
        for package in _PACKAGES:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "not installed"
        return found | self._from_nvidia_smi()

    def is_alive(self) -> bool:
        try:
            torch.cuda.synchronize(self._index)
            return int(torch.ones(1, device=f"cuda:{self._index}").item()) == 1
        except RuntimeError:
            return False

    def time(self, device: Device, work: Callable[[], None], *, repeats: int, until: Deadline) -> list[int]:
        with device.current():
            work()  # kernels are compiled before the capture
        device.synchronize()
        replay = device.capture(work)
        samples: list[int] = []
        with device.current():
            for _ in range(_WARM_UP):
                replay()
            device.synchronize()
            while len(samples) < repeats and until.left() > 0:
                pairs = []
                for _ in range(min(_IN_FLIGHT, repeats - len(samples))):
                    # It takes the device longer than the host to launch the graph, so the graph begins at once.
                    self._flush.zero_()
                    before = self.mark(device)
                    replay()
                    pairs.append((before, self.mark(device)))
                device.synchronize()
                samples += [self.between_ns(before, after) for before, after in pairs]
        return samples

    def mark(self, device: Device) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(device.stream)
        return event

    def between_ns(self, first: Any, second: Any) -> int:
        return round(float(first.elapsed_time(second)) * 1e6)  # from milliseconds

    def calls(self, device: Device, request: Callable[[], Any], *, repeats: int) -> Calls | None:
        from torch.profiler import record_function

        def annotated() -> None:
            for _ in range(repeats):
                with record_function(_REQUEST):
                    request()

        events = self._trace(device, annotated)
        requests = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == _REQUEST]
        spans = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in requests]
        names: collections.Counter[str] = collections.Counter()
        for event in events:
            of_driver = event.get("cat") in ("cuda_runtime", "cuda_driver")
            if of_driver and any(begin <= float(event["ts"]) <= end for begin, end in spans):
                names[str(event["name"])] += 1
        if not names:
            return None
        waits = sum(n for name, n in names.items() if _WAITS.fullmatch(name))
        allocations = sum(n for name, n in names.items() if _ALLOCATES.fullmatch(name))
        return Calls(len(spans), waits, allocations, dict(names))

    def allocations(self) -> int | None:
        of_device = torch.cuda.memory_stats(self._index)
        count = int(of_device.get("allocation.all.allocated", 0)) + int(of_device.get("num_device_alloc", 0))
        host_stats = getattr(torch.cuda, "host_memory_stats", None)
        return count if host_stats is None else count + int(host_stats().get("num_host_alloc", 0))

    def kernels_ns(self, device: Device, work: Callable[[], None], *, repeats: int) -> dict[str, list[int]]:
        def repeated() -> None:
            with device.current():
                for _ in range(repeats):
                    work()
            device.synchronize()

        found: dict[str, list[int]] = {}
        for event in self._trace(device, repeated):
            if event.get("cat") == "kernel":
                found.setdefault(str(event["name"]), []).append(round(float(event["dur"]) * 1e3))
        return found

    def _trace(self, device: Device, work: Callable[[], None]) -> list[dict[str, Any]]:
        """The complete events of the profiler's trace; `ts` and `dur` in microseconds."""
        from torch.profiler import ProfilerActivity, profile

        device.synchronize()
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the profiler's own
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                work()
                device.synchronize()
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            content = json.loads(path.read_text("utf-8", errors="replace"), strict=False)
        return [event for event in content["traceEvents"] if event.get("ph") == "X"]

    def _from_nvidia_smi(self) -> dict[str, str]:
        """One query for each fact: an old driver refuses all of them for one that it does not know."""
        uuid = str(getattr(self._properties, "uuid", ""))
        which = ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"] if uuid else ["-i", str(self._index)]
        found = {}
        for fact in _FACTS:
            query = ["nvidia-smi", *which, f"--query-gpu={fact}", "--format=csv,noheader"]
            try:
                answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            except (OSError, subprocess.SubprocessError):
                continue
            found[fact] = answer.splitlines()[0] if answer else "unknown"
        return found or {"nvidia-smi": "absent"}
