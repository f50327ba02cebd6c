"""Which GPU an engine runs on, and what is said where there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from visionfast import machine
from visionfast.cuda import CudaDevice, choose_gpu
from visionfast.errors import BackendUnavailableError, IncompatibleEngineError, OptionError
from visionfast.machine import Gpu
from visionfast.pipeline import open_engine

ADA, HOPPER, SECOND_ADA = Gpu(0, "NVIDIA L4", "sm89"), Gpu(1, "NVIDIA H100", "sm90"), Gpu(2, "NVIDIA L40S", "sm89")


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: (ADA, HOPPER, SECOND_ADA))


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize(
    ("compiled_for", "asked", "index"),
    [
        ("sm89", None, 0),
        ("sm90", None, 1),
        ("cuda", None, 0),
        ("sm89", "cuda", 0),
        ("sm90", "cuda", 1),
        ("sm89", "cuda:2", 2),
        ("cuda", "cuda:1", 1),
    ],
)
def test_the_first_that_fits_or_the_one_asked_for(compiled_for: str, asked: str | None, index: int) -> None:
    assert choose_gpu(compiled_for, asked) == index


@pytest.mark.usefixtures("three_gpus")
@pytest.mark.parametrize("asked", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA:0", "cuda:1 ", "cuda:٢", "", "0", "cpu"])
def test_other_words_are_refused(asked: str) -> None:
    with pytest.raises(OptionError, match="expected cuda or cuda:N"):
        choose_gpu("sm89", asked)


@pytest.mark.usefixtures("three_gpus")
def test_one_that_is_not_there() -> None:
    with pytest.raises(OptionError, match="cuda:3: this machine has 3, from cuda:0 to cuda:2"):
        choose_gpu("sm89", "cuda:3")


@pytest.mark.usefixtures("three_gpus")
def test_one_of_another_generation_names_both_sides() -> None:
    message = r"the engine is for sm89, cuda:1 is sm90 \(NVIDIA H100\); build it for sm90"
    with pytest.raises(IncompatibleEngineError, match=message):
        choose_gpu("sm89", "cuda:1")
    with pytest.raises(
        IncompatibleEngineError, match=r"for sm75, cuda:0 is sm89 .*, cuda:1 is sm90 .*build it for sm89"
    ):
        choose_gpu("sm75", None)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", tuple)
    with pytest.raises(
        BackendUnavailableError, match=r"needs an NVIDIA GPU .sm89. and its driver; this machine has none"
    ):
        choose_gpu("sm89", None)


@pytest.mark.skipif(bool(machine.gpus()), reason="this machine has a GPU")
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_device_says_what_torch_lacks() -> None:
    with pytest.raises(BackendUnavailableError, match="sees no CUDA device"):
        CudaDevice(0)


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
