"""`make gpu-check` rehearsed without a GPU: every check really runs, and what is wrong is seen.

Its device is the host, its kernels run in Triton's interpreter: no figure is a measurement, and none is looked at.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from visionfast import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

pytest.importorskip("torch", reason="sessions on a GPU need torch: pip install 'visionfast[build]'")
pytest.importorskip("triton", reason="the kernels need triton")

import gpu_check
import torch
from gpu_checks import network
from gpu_checks.cuda_machine import _ALLOCATES, _WAITS
from gpu_checks.host_machine import HostMachine
from gpu_checks.kernel_results import check_detections, check_letterbox
from gpu_checks.prompt_checks import check_prompt_kernels
from gpu_checks.rows import Deadline, Ledger, Row, read_rows, show, timed
from gpu_checks.session_checks import check_frugality, check_graph
from gpu_checks.subjects import TINY, Context, Subjects

rehearsed = pytest.mark.skipif(bool(machine.gpus()), reason="on a machine with a GPU the kernels are not interpreted")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    host = HostMachine()
    return Context(host, TINY, Subjects(host, TINY, [], tmp_path_factory.mktemp("scratch")), 1, Deadline(600), 1e9)


@pytest.mark.slow  # a minute and a half
@rehearsed
def test_the_whole_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "rows.json"
    code = gpu_check.main(["--rehearse", "--seconds", "3000", "--json", str(target), "--seed", "1"])
    said = capsys.readouterr().out
    kept = json.loads(target.read_text())
    rows = read_rows(target)
    assert [(row.name, row.detail) for row in rows if row.verdict == "failed"] == []
    assert code == 0
    assert kept["rehearsal"] is True
    assert "no figure here is a measurement" in kept["note"]
    assert "no figure here is a measurement" in said
    assert max(map(len, said.splitlines())) <= 120
    assert {row.check for row in rows} == set(gpu_check.CHECKS)
    ran = {row.check for row in rows if row.verdict == "ok"}
    assert ran == set(gpu_check.CHECKS) - {"dali"}
    assert all(row.samples_ns for row in rows if row.unit == "ns")
    assert not list(tmp_path.glob(".rows*"))


# ---- what is wrong is seen ---------------------------------------------------------------------------------


@rehearsed
def test_a_wrong_box_fails(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from visionfast.postprocess.kernels.detections import DetectionKernels

    enqueue = DetectionKernels.enqueue

    def nudged(kernels: Any, predictions: Any, placement: Any) -> None:
        enqueue(kernels, predictions, placement)
        kernels.found[0, 1, 0] += 1  # one bit of one corner

    monkeypatch.setattr(DetectionKernels, "enqueue", nudged)
    (row,) = islice(check_detections(context), 1)
    assert row.verdict == "failed"
    assert "xyxy differs from the definition" in row.detail


@rehearsed
def test_a_wrong_pixel_fails(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from visionfast.preprocess.kernels import DeviceLetterbox

    rgb = DeviceLetterbox.rgb

    def nudged(kernels: Any, source: Any, out: Any) -> Any:
        where = rgb(kernels, source, out)
        out.view(-1)[0] += 1
        return where

    monkeypatch.setattr(DeviceLetterbox, "rgb", nudged)
    (row,) = islice(check_letterbox(context), 1)
    assert row.verdict == "failed"
    assert "1 of 6144 values" in row.detail


@rehearsed
@pytest.mark.parametrize("call", ["pack", "count"])
def test_a_wrong_mask_fails(context: Context, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    from visionfast.postprocess.kernels.enlarge import EnlargeKernels

    right = getattr(EnlargeKernels, call)

    def nudged(kernels: Any, *args: Any, **options: Any) -> Any:
        answer = right(kernels, *args, **options)
        if call == "pack":
            kernels.words[0] ^= 1 << 5  # one pixel of one mask
        else:
            kernels.counts[0, 1] += 1
        return answer

    monkeypatch.setattr(EnlargeKernels, call, nudged)
    (row,) = islice(check_prompt_kernels(context), 1)
    assert row.verdict == "failed"
    assert ("1 beyond" in row.detail) == (call == "pack")
    assert ("1 of 6 counts wrong" in row.detail) == (call == "count")


@rehearsed
def test_a_second_synchronisation_fails(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from visionfast.sessions.cuda import CudaSession

    answer = CudaSession.answer

    def hasty(session: Any, *args: Any, **options: Any) -> Any:
        session._device.synchronize()
        session._device.empty((1,), "uint8")
        return answer(session, *args, **options)

    monkeypatch.setattr(CudaSession, "answer", hasty)
    allocations, synchronisations, driver = islice(check_frugality(context), 3)
    assert (allocations.verdict, synchronisations.verdict, driver.verdict) == ("failed", "failed", "failed")
    assert synchronisations.figure == 2


@rehearsed
def test_a_graph_that_answers_otherwise_fails(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_checks.host_machine import HostDevice

    # What a replay of a stale graph would do: the work is not done again.
    monkeypatch.setattr(HostDevice, "capture", lambda device, work: lambda: None)
    (row,) = islice(check_graph(context), 1)
    assert row.verdict == "failed"


def _broken(context: Any) -> Iterator[Row]:
    yield Row("masks", "the first", "ok")
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")


def test_an_exception_is_a_row_and_stops_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.json", {})
    sys.modules["broken_check"] = sys.modules[__name__]
    try:
        gpu_check._check("broken_check:_broken", "masks", None, Deadline(5), ledger)
    finally:
        del sys.modules["broken_check"]
    assert [row.verdict for row in ledger.rows] == ["ok", "failed"]
    assert ledger.rows[1].detail.startswith("RuntimeError: CUDA error: an illegal memory access was encountered (")


@rehearsed
def test_a_dead_device_leaves_the_rest_to_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def instead(command: list[str], **_: Any) -> None:
        if command[0] != sys.executable:
            return
        commands.append(command)
        kept = Path(command[command.index("--json") + 1])
        Ledger(kept, {}, [*read_rows(kept), Row("masks", "afterwards", "ok")]).write()

    monkeypatch.setattr(HostMachine, "is_alive", lambda machine: False)
    monkeypatch.setattr(gpu_check, "_revision", lambda: "none")
    monkeypatch.setattr(gpu_check.subprocess, "run", instead)
    arguments = gpu_check.parsed(["--rehearse", "--only", "device", "masks", "--json", str(tmp_path / "rows.json")])
    ledger = gpu_check.run(arguments)
    (command,) = commands
    given = gpu_check.parsed(command[2:])
    assert given.only == ["masks"]
    assert given.seconds < 300
    assert ledger.rows[-1].name == "afterwards"
    assert any(row.name == "the device after this check" and row.verdict == "failed" for row in ledger.rows)
    assert [row.name for row in read_rows(tmp_path / "rows.json")] == [row.name for row in ledger.rows]


@rehearsed
def test_without_time_nothing_is_run_and_nothing_is_wrong(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    assert gpu_check.main(["--rehearse", "--seconds", "0", "--json", str(target)]) == 0
    assert {row.verdict for row in read_rows(target)} == {"not run"}


def test_a_rehearsal_is_not_kept_with_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    results = Path(gpu_check.__file__).parent / "results" / "gpu-nothing.json"
    with pytest.raises(SystemExit):
        gpu_check.parsed(["--rehearse", "--json", str(results)])
    assert "keep it out of benchmarks/results" in capsys.readouterr().err


# ---- its parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cudaMemcpy",
     "cuCtxSynchronize", "cuMemcpyDtoH_v2", "cudaMemcpyToSymbol", "cudaMemcpy2D"],
)  # fmt: skip
def test_calls_that_wait_are_known(name: str) -> None:
    assert _WAITS.fullmatch(name)
    assert not _ALLOCATES.fullmatch(name)


@pytest.mark.parametrize(
    "name",
    ["cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaMallocAsync", "cuMemAlloc_v2", "cuMemCreate", "cudaFreeHost"],
)
def test_calls_that_allocate_are_known(name: str) -> None:
    assert _ALLOCATES.fullmatch(name)
    assert not _WAITS.fullmatch(name)


@pytest.mark.parametrize(
    "name",
    ["cudaMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cudaGraphLaunch", "cuLaunchKernelEx", "cudaEventRecord",
     "cudaStreamIsCapturing", "cudaStreamWaitEvent", "cudaLaunchKernel", "cudaMemsetAsync", "cudaEventQuery"],
)  # fmt: skip
def test_other_calls_are_free(name: str) -> None:
    assert not _WAITS.fullmatch(name)
    assert not _ALLOCATES.fullmatch(name)


def test_rows_survive_json_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        timed("kernel times", "NMS [of] 8400 × 80", [41_000, 42_000, 55_000], goal_ns=60e3, beside="floor 0.6 µs"),
        timed("kernel times", "slow", [2_000_000], goal_ns=1e6),
        timed("kernel times", "nothing", []),
        Row("dali", "DALI", "absent", detail="not installed"),
    ]
    Ledger(tmp_path / "rows.json", {"benchmark": "gpu-check"}, rows).write()
    assert read_rows(tmp_path / "rows.json") == rows
    show(rows, "title")
    said = capsys.readouterr().out
    for words in ("42 / 53.7 / 54.7 µs", "NMS [of] 8400 × 80", "≤ 60 µs: met", "not run", "absent"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize("task", ["detect", "segment"])
def test_the_plain_network_is_the_official_one(task: Any, seeded_checkpoint: Any) -> None:
    from visionfast.checkpoint import open_checkpoint
    from visionfast.families import identify

    checkpoint = open_checkpoint(seeded_checkpoint(task, 3))
    official = identify(checkpoint).load(checkpoint, name="official", size_hw=(64, 96))
    plain = network.with_weights(checkpoint, size_hw=(64, 96), batch=1)
    assert plain.spec.graphs == official.spec.graphs
    assert plain.spec.architecture == official.spec.architecture
    image = torch.from_numpy(np.random.default_rng(0).random((1, 3, 64, 96), np.float32))
    with torch.inference_mode():
        expected, got = official.modules["model"](image), plain.modules["model"](image)
    for a, b in zip(expected if task == "segment" else [expected], got if task == "segment" else [got], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def test_seeded_scores_depend_on_the_picture() -> None:
    model = network.seeded("tiny", "detect", size_hw=(64, 96), batch=1, classes=3).modules["model"]
    again = network.seeded("tiny", "detect", size_hw=(64, 96), batch=1, classes=3).modules["model"]
    image = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        scores = model(image)[0, 4:]
        assert torch.equal(scores, again(image)[0, 4:])
        assert scores.std() > 1e-3
        assert (scores - model(1 - image)[0, 4:]).abs().max() > 1e-3
