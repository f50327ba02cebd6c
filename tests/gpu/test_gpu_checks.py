"""The correctness checks of `make gpu-check` on a CUDA device; their functions are the same."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from visionfast import machine

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="no CUDA device on this machine"),
]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch = pytest.importorskip("torch", reason="sessions on a GPU need torch")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device")
    from gpu_checks.cuda_machine import CudaMachine
    from gpu_checks.rows import Deadline
    from gpu_checks.subjects import FULL, Context, Subjects

    cuda = CudaMachine()
    subjects = Subjects(cuda, FULL, [], tmp_path_factory.mktemp("engines"))
    return Context(cuda, FULL, subjects, seed=1, until=Deadline(300), copy_bytes_per_s=0.0)


@pytest.mark.parametrize(
    "check",
    [
        "detections",
        "masks",
        "letterbox",
        "prompt kernels",
        "certificate",
        "graph",
        "requests",
        "threads",
        "prompt session",
    ],
)
def test_is_right_on_this_card(context: Any, check: str) -> None:
    from dataclasses import replace

    from gpu_check import CHECKS
    from gpu_checks.rows import Deadline

    module, function = CHECKS[check][0].split(":")
    # Each has its own time: one that is slow does not take it from the next.
    rows = list(getattr(importlib.import_module(module), function)(replace(context, until=Deadline(60))))
    assert rows
    assert [(row.name, row.detail) for row in rows if row.verdict == "failed"] == []
