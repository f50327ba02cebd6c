"""Ctrl-C while TensorRT-RTX compiles: it drops exceptions that arise in its callbacks, visionfast does not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from visionfast.backends import get_backend, tensorrt
from visionfast.build import build_all

rtx = pytest.mark.skipif(
    not get_backend("tensorrt-rtx").availability().can_build,
    reason="TensorRT-RTX is not installed: pip install 'visionfast[tensorrt-rtx]'",
)


@rtx
@pytest.mark.parametrize("second", [False, True])
def test_it_ends_the_build_and_leaves_no_half(
    second: bool, seeded_checkpoint: Callable[..., Path], engine_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tensorrt._monitor
    builds: list[int] = []  # of each build the steps that came after the signal

    def interrupting(trt: Any, cancelled: Callable[[], bool]) -> Any:
        builds.append(0)
        real = original(trt, cancelled)
        nth = len(builds)

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)

            def phase_start(self, name: str, parent: str | None, steps: int) -> None:
                real.phase_start(name, parent, steps)

            def step_complete(self, name: str, step: int) -> bool:
                if nth == 1 + second and not builds[-1]:
                    signal.raise_signal(signal.SIGINT)
                builds[-1] += cancelled()
                return bool(real.step_complete(name, step))

            def phase_finish(self, name: str) -> None:
                real.phase_finish(name)

        return Monitor()

    monkeypatch.setattr(tensorrt, "_monitor", interrupting)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        build_all(seeded_checkpoint("detect", 3), gpus=["sm75", "sm86", "sm89"], size_hw=(64, 64))
    assert signal.getsignal(signal.SIGINT) is before
    assert len(builds) == 1 + second
    assert 1 <= builds[-1] < 10  # the compiler was told to stop, and did
    folders = sorted(path.name for path in engine_home.rglob("*") if path.name.startswith(("tensorrt", ".")))
    assert folders == (["tensorrt-rtx-fp16-sm75-64x64-b1"] if second else [])


def test_another_thread_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        with tensorrt._interruptible() as interrupted:
            seen.extend([signal.getsignal(signal.SIGINT) is before, interrupted()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True, False]


def test_a_handler_of_the_caller_s_own_is_called_once_and_kept() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with tensorrt._interruptible() as interrupted:
            signal.raise_signal(signal.SIGINT)
            assert interrupted()
            assert not calls
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
