"""Ctrl-C while TensorRT-RTX compiles: it drops exceptions that arise in its callbacks, visionfast does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from visionfast.backends import get_backend, tensorrt

rtx = pytest.mark.skipif(
    not get_backend("tensorrt-rtx").availability().can_build,
    reason="TensorRT-RTX is not installed: pip install 'visionfast[tensorrt-rtx]'",
)


# In a process of its own: what the compiler does with a signal must not be able to end the tests.
_INTERRUPTED = """
import signal, sys
from pathlib import Path
from visionfast.backends import tensorrt
from visionfast.build import build_all

checkpoint, second = Path(sys.argv[1]), int(sys.argv[2])
original = tensorrt._monitor
builds = []  # of each build the steps that came after the signal

def interrupting(trt, cancelled):
    builds.append(0)
    real = original(trt, cancelled)
    nth = len(builds)

    class Monitor(trt.IProgressMonitor):
        def __init__(self):
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name, parent, steps):
            real.phase_start(name, parent, steps)

        def step_complete(self, name, step):
            if nth == 1 + second and not builds[-1]:
                signal.raise_signal(signal.SIGINT)
            builds[-1] += cancelled()
            return bool(real.step_complete(name, step))

        def phase_finish(self, name):
            real.phase_finish(name)

    return Monitor()

tensorrt._monitor = interrupting
before = signal.getsignal(signal.SIGINT)
try:
    build_all(checkpoint, gpus=["sm75", "sm86", "sm89"], size_hw=(64, 64))
except KeyboardInterrupt:
    assert signal.getsignal(signal.SIGINT) is before
    print(len(builds), builds[-1])
"""


@rtx
@pytest.mark.parametrize("second", [False, True])
def test_it_ends_the_build_and_leaves_no_half(
    second: bool, seeded_checkpoint: Callable[..., Path], engine_home: Path
) -> None:
    command = [sys.executable, "-c", _INTERRUPTED, str(seeded_checkpoint("detect", 3)), str(int(second))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    builds, steps_after = map(int, done.stdout.split())
    assert builds == 1 + second
    assert 1 <= steps_after < 10  # the compiler was told to stop, and did
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
