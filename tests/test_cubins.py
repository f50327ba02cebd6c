"""Every kernel compiled ahead of time; and kernels planted here that must be caught.

The compilers run as `python -m visionfast.cubins`, in processes of their own: here, without a GPU, kernels are
decorated for the interpreter.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="the kernels' compiler comes with torch: pip install 'visionfast[build]'")

import triton.language as tl  # noqa: E402

from visionfast import cubins  # noqa: E402
from visionfast.cubins import ARCHITECTURES, Cubin, KernelCase  # noqa: E402
from visionfast.errors import BuildError, OptionError  # noqa: E402

# ---- planted: this file is a module of kernels to the tool ---------------------------------------------


@triton.jit
def _scale(x_ptr, out_ptr, k, block: tl.constexpr):
    i = tl.arange(0, block)
    tl.store(out_ptr + i, tl.math.div_rn(tl.load(x_ptr + i) * k + 1.0, k))


@triton.jit
def _approximate(x_ptr, out_ptr, k, block: tl.constexpr):
    i = tl.arange(0, block)
    tl.store(out_ptr + i, tl.fma(tl.load(x_ptr + i), k, 1.0) / k)


@triton.jit
def _crowded(x_ptr, out_ptr, k, block: tl.constexpr):
    i = tl.arange(0, block)
    x = tl.load(x_ptr + i)  # all of it alive until the sum is known
    tl.store(out_ptr + i, x * tl.sum(x) * k)


@triton.jit
def _refused(x_ptr, out_ptr, k, block: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, block), tl.load(x_ptr + tl.arange(0, block - 1)))  # not a power of 2


SIGNATURE = {"x_ptr": "*fp32", "out_ptr": "*fp32", "k": "fp32"}


def ahead_of_time() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    yield "exact", _scale, SIGNATURE, {"block": 1024}, {"enable_fp_fusion": False}
    yield "contracted", _scale, SIGNATURE, {"block": 1024}, {}
    yield "approximate", _approximate, SIGNATURE, {"block": 1024}, {"enable_fp_fusion": False}
    yield "crowded", _crowded, SIGNATURE, {"block": 4096}, {"num_warps": 1, "maxnreg": 32}
    yield "refused", _refused, SIGNATURE, {"block": 1024}, {}


# ---- the tool ------------------------------------------------------------------------------------------


def _run(folder: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    figures = folder / "cubins.json"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(Path(__file__).parent)} | environment
    command = [sys.executable, "-m", "visionfast.cubins", "--json", str(figures), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    return done, json.loads(figures.read_text()) if figures.exists() else {}


@pytest.mark.timeout(1800)  # all of them are 250 compilations: a minute on two quiet cores, many on busy ones
@pytest.mark.parametrize(
    "architectures",
    [pytest.param((120,), id="one"), pytest.param(tuple(ARCHITECTURES), id="all", marks=pytest.mark.slow)],
)
def test_every_kernel_compiles_and_is_sound(tmp_path: Path, architectures: tuple[int, ...]) -> None:
    """What `make cubins` does, for every architecture."""
    done, compiled = _run(tmp_path, *(f"--sm={sm}" for sm in architectures))
    assert done.returncode == 0, done.stderr
    assert compiled["faults"] == []
    expected = {(case.name, sm) for case in cubins.cases() for sm in architectures}
    assert {(row["name"], row["sm"]) for row in compiled["cubins"]} == expected
    for row in compiled["cubins"]:
        assert row["spill_store_bytes"] == row["spill_load_bytes"] == 0, row
        assert 0 < row["registers"] <= 255, row
        assert row["cubin_bytes"] > 1000, row
        assert row["shared_bytes"] <= cubins.SHARED_LIMIT_KIB[row["sm"]] * 1024, row


def test_no_kernel_is_forgotten() -> None:
    """Every `triton.jit` function of the package is compiled, or is called by one that is."""
    written, called = set(), set()
    for file in Path(cubins.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and any("triton.jit" in _text(d) for d in function.decorator_list):
                written.add(function.name)
                called |= {_text(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    assert written - called == {case.kernel.__name__ for case in cubins.cases()}


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """This file's kernels, started from a process that runs the interpreter, as the tests' own does."""
    arguments = ("--sm", "90", "--sm", "120", "--module", Path(__file__).stem)
    return _run(tmp_path_factory.mktemp("planted"), *arguments, TRITON_INTERPRET="1")


def test_what_must_not_be_is_caught(planted: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    done, figures = planted
    assert done.returncode == 1
    faults = figures["faults"]
    for sm in (90, 120):
        by_kernel = {name: [f for f in faults if f.startswith(f"{name} for sm_{sm}:")] for name, *_ in ahead_of_time()}
        assert {name: len(found) for name, found in by_kernel.items()} == {
            "exact": 0,
            "contracted": 0,  # it does not promise NumPy's arithmetic
            "approximate": 1,
            "crowded": 1,
            "refused": 1,
        }
        assert "div.full.f32, fma.rn.f32" in by_kernel["approximate"][0]
        assert "no spilled registers" in by_kernel["crowded"][0]
        assert "power of 2" in by_kernel["refused"][0]
    assert all(fault in done.stderr for fault in faults)
    assert all("\n" not in fault for fault in faults)


def test_the_figures_are_of_the_kernels(planted: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    done, figures = planted
    rows = {(row["name"], row["sm"]): row for row in figures["cubins"]}
    assert len(rows) == 8  # four of five kernels on two architectures
    for sm in (90, 120):
        crowded = rows["crowded", sm]
        assert crowded["registers"] <= 32  # as maxnreg says
        assert crowded["spill_store_bytes"] > 0
        assert crowded["stack_bytes"] > 0
        assert rows["exact", sm]["exact"]
        assert not rows["contracted", sm]["exact"]
    assert figures["toolchain"]["triton"] == triton.__version__
    assert f"triton {triton.__version__}" in done.stdout
    assert f"{rows['crowded', 90]['cubin_bytes']:,}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--module", "visionfast.no_kernels"), "visionfast.no_kernels: expected kernels with ahead_of_time()"),
        (("--module", "visionfast.types"), "visionfast.types: expected kernels with ahead_of_time()"),
        (("--sm", "61", "--module", Path(__file__).stem), "sm_61: expected one of sm_75, sm_80"),
    ],
)
def test_a_wrong_question_is_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done, figures = _run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not figures


# ---- its parts -----------------------------------------------------------------------------------------


def _cubin(**changes: Any) -> Cubin:
    sound = Cubin("k", 90, True, 32, 0, 0, 0, 1024, 9000, "add.rn.f32 %r1, %r2, %r3;")
    return dataclasses.replace(sound, **changes)


@pytest.mark.parametrize(
    "instruction",
    [
        "fma.rn.f32", "fma.rn.ftz.f32", "fma.rn.f32x2", "fma.rn.f64", "fma.rn.f16x2", "mad.rn.f32",
        "div.full.f32", "div.approx.f32", "div.approx.ftz.f32", "rcp.approx.ftz.f32", "sqrt.approx.f32",
        "rsqrt.approx.f32", "ex2.approx.ftz.f32", "tanh.approx.f32", "mul.ftz.f32", "add.rn.ftz.f32",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "tcgen05.mma.cta_group::1.kind::tf32",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32",
    ],
)  # fmt: skip
def test_inexact_instructions_are_faults(instruction: str) -> None:
    (fault,) = cubins.faults(_cubin(ptx=f"\t@%p1 {instruction} \t%r1, %r2, %r3, %r4;\n"))
    assert f"got {instruction}: " in fault
    assert cubins.faults(_cubin(ptx=f"\t{instruction} \t%r1, %r2;\n", exact=False)) == []


@pytest.mark.parametrize(
    "instruction",
    [
        "mad.lo.s32", "mad.wide.u32", "div.rn.f32", "div.s32", "sqrt.rn.f32", "rcp.rn.f32", "mul.f32", "add.rn.f32x2",
        "cvt.rn.f16.f32", "max.NaN.f32", "ld.global.L1::evict_last.b32",
        "cvt.rmi.ftz.f32.f32", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    ],
)  # fmt: skip
def test_exact_instructions_are_not(instruction: str) -> None:
    assert cubins.faults(_cubin(ptx=f"\t{instruction} \t%r1, %r2, %r3;\n")) == []


def test_shared_memory_is_held_to_the_architecture() -> None:
    assert cubins.faults(_cubin(sm=90, shared_bytes=227 * 1024)) == []
    (fault,) = cubins.faults(_cubin(sm=89, shared_bytes=227 * 1024))
    assert "k for sm_89: expected at most 101376 bytes of shared memory, got 232448" in fault


@pytest.mark.parametrize("spill", ["spill_store_bytes", "spill_load_bytes"])
def test_either_spill_is_a_fault(spill: str) -> None:
    assert len(cubins.faults(_cubin(**{spill: 4}))) == 1


def test_a_log_without_figures_is_an_error_and_functions_add_up() -> None:
    with pytest.raises(BuildError, match="expected ptxas's figures"):
        cubins._resources("k", "ptxas info : 0 bytes gmem")
    log = (
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size\n"
        "    16 bytes stack frame, 0 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 24 registers\n"
    )
    assert cubins._resources("k", log) == {
        "registers": 40,
        "spill_store_bytes": 4,
        "spill_load_bytes": 20,
        "stack_bytes": 24,
    }


def test_a_kernel_for_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    case = KernelCase("k", triton.jit(_scale.fn), SIGNATURE, {"block": 64})
    with pytest.raises(OptionError, match="unset TRITON_INTERPRET"):
        cubins.compile_kernel(case, 90)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signature": {"x_ptr": "*fp32", "k": "fp32"}}, "got others or too few: out_ptr"),
        ({"signature": SIGNATURE | {"y_ptr": "*fp32"}}, "got others or too few: y_ptr"),
        ({"constexprs": {}}, "got others or too few: block"),
        ({"options": {"num_warp": 4}}, "would drop num_warp"),
    ],
)
def test_a_case_that_does_not_fit_its_kernel(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = KernelCase("k", triton.jit(_scale.fn), SIGNATURE, {"block": 64})
    with pytest.raises(OptionError, match=message):
        cubins.compile_kernel(dataclasses.replace(case, **changes), 90)


def test_names_are_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    twice = list(ahead_of_time())[:1] * 2
    monkeypatch.setattr(module, "ahead_of_time", lambda: twice)
    with pytest.raises(OptionError, match="'exact' twice"):
        cubins.cases([__name__])
