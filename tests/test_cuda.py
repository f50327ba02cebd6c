"""Which GPU an engine runs on, and what is said where there is none."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from visionfast import artifacts, machine
from visionfast.cuda import CudaDevice, _own_stream, gpu_index
from visionfast.errors import BackendError, BackendUnavailableError, OptionError
from visionfast.machine import Gpu
from visionfast.pipeline import open_engine


@pytest.mark.parametrize(("asked", "index"), [(None, None), ("cuda", None), ("cuda:0", 0), ("cuda:12", 12)])
def test_the_words_for_a_gpu(asked: str | None, index: int | None) -> None:
    assert gpu_index(asked) == index


@pytest.mark.parametrize(
    "asked", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA:0", "cuda:1 ", "cuda:٢", "", "0", "cpu", 1]
)
def test_other_words_are_refused(asked: str) -> None:
    with pytest.raises(OptionError, match="expected cuda or cuda:N"):
        gpu_index(asked)


@pytest.fixture
def engine_for_a_gpu(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]) -> Path:
    return built_engine(seeded_checkpoint("detect", 3), backend="torch", gpu="cuda", size_hw=(64, 96))


def test_the_gpu_that_is_asked_for_is_checked_first(engine_for_a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: (Gpu(0, "NVIDIA L4", "sm89"), Gpu(1, "NVIDIA H100", "sm90")))
    monkeypatch.setattr(machine, "driver_version", lambda: 13010)
    with pytest.raises(BackendUnavailableError, match=r"cuda:2: this machine has cuda:0 sm89 .*, cuda:1 sm90"):
        open_engine(engine_for_a_gpu, device="cuda:2")
    with pytest.raises(OptionError, match="expected cuda or cuda:N"):
        open_engine(engine_for_a_gpu, device="gpu1")


def test_pytorch_on_a_gpu_builds_fp16_unasked(engine_for_a_gpu: Path) -> None:
    manifest = artifacts.read_manifest(engine_for_a_gpu)
    assert (manifest.device, manifest.precision) == ("cuda", "fp16")


@pytest.mark.skipif(bool(machine.gpus()), reason="this machine has a GPU")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_device_says_what_torch_lacks() -> None:
    with pytest.raises(BackendUnavailableError, match="sees no CUDA device"):
        CudaDevice(0)


class _Owner:
    """Of a stream."""


def _pool(size: int = 32) -> Callable[[], SimpleNamespace]:
    """As torch has it: so many streams, handed out in turns."""
    handles = itertools.cycle(range(1, size + 1))
    return lambda: SimpleNamespace(cuda_stream=next(handles))


def test_no_two_sessions_share_a_stream() -> None:
    draw = _pool()
    owners = [_Owner() for _ in range(32)]
    handles = [_own_stream(owner, 7, draw).cuda_stream for owner in owners[:20]]
    draw()  # someone else's
    handles += [_own_stream(owner, 7, draw).cuda_stream for owner in owners[20:]]
    assert sorted(handles) == list(range(1, 33))
    with pytest.raises(BackendError, match="cuda:7: expected a stream that no session has, all 32 are taken"):
        _own_stream(_Owner(), 7, draw)
    _own_stream(other := _Owner(), 8, _pool())  # another device has its own
    assert other is not None


def test_a_stream_is_free_when_its_session_is_gone() -> None:
    draw = _pool()
    owners = [_Owner() for _ in range(32)]
    handles = [_own_stream(owner, 9, draw).cuda_stream for owner in owners]
    gone: Any = owners.pop(5)
    gone.itself = gone  # a cycle, which only the collector ends
    del gone
    assert _own_stream(newcomer := _Owner(), 9, draw).cuda_stream == handles[5]
    assert newcomer is not None


def test_one_capture_at_a_time() -> None:
    """Beginning one waits for the whole device, which ends every capture that another thread has begun."""
    inside, most = [0], [0]

    @contextlib.contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        yield
        inside[0] -= 1

    def device() -> CudaDevice:
        made: Any = CudaDevice.__new__(CudaDevice)
        made._torch = SimpleNamespace(cuda=SimpleNamespace(CUDAGraph=lambda: SimpleNamespace(replay=None), graph=graph))
        made._stream = None
        assert isinstance(made, CudaDevice)
        return made

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: device().capture(lambda: time.sleep(0.02)), range(4)))
    assert most == [1]


@pytest.mark.skipif(bool(machine.gpus()), reason="this machine has a GPU")
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_torch_engine_for_cuda_is_built_anywhere_and_opened_where_there_is_one(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path], precision: str
) -> None:
    folder = built_engine(seeded_checkpoint("detect", 3), backend="torch", gpu="cuda", precision=precision)
    assert folder.name.startswith(f"torch-{precision}-cuda-")
    with pytest.raises(BackendUnavailableError, match="this machine has none"):
        open_engine(folder)
    with pytest.raises(OptionError, match="device cpu: this engine is for cuda"):
        open_engine(folder, device="cpu")


def test_a_host_engine_stays_on_the_host(
    built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]
) -> None:
    folder = built_engine(seeded_checkpoint("detect", 3))
    with pytest.raises(OptionError, match="device cuda: this engine is for the cpu"):
        open_engine(folder, device="cuda")
    with pytest.raises(OptionError, match="graph: expected an engine on a GPU, this one is on the host"):
        open_engine(folder, graph=True)
    with open_engine(folder, device="cpu", graph=False) as detector:
        assert detector.manifest is not None
