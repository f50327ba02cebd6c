"""Every GPU kernel compiled ahead of time, with no GPU: what it costs on each architecture, and what must not be.

Triton lowers a kernel to PTX, and the `ptxas` that it carries turns that into the cubin that a GPU runs. Both work on
any machine, so that spilled registers, too much shared memory and arithmetic that is no longer NumPy's to the bit are
found here and not on the first card::

    python -m visionfast.cubins --sm 80 --sm 90 --json cubins.json

A kernel's module offers `ahead_of_time()`, which yields `(name, kernel, signature, constexprs, options)`; a new module
is entered in `KERNEL_MODULES`. Kernels are compiled as a launch from torch tensors has them: pointers aligned to 16
bytes, integers not specialised.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from visionfast import machine
from visionfast.errors import BuildError, OptionError, VisionfastError

__all__ = [
    "ARCHITECTURES",
    "KERNEL_MODULES",
    "Cubin",
    "KernelCase",
    "cases",
    "compile_all",
    "compile_kernel",
    "faults",
    "main",
]

KERNEL_MODULES = (
    "visionfast.preprocess.kernels",
    "visionfast.postprocess.kernels.detections",
    "visionfast.postprocess.kernels.enlarge",
    "visionfast.postprocess.kernels.masks",
)
ARCHITECTURES = (80, 86, 89, 90, 100, 120)

# Shared memory that one block may use, KiB, for each compute capability: CUDA C++ Programming Guide, technical
# specifications. ptxas does not object to more, for it is asked for at the launch.
SHARED_LIMIT_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}

# What does not round as NumPy does: a multiply and an add in one (on Blackwell of two floats at once: `fma.rn.f32x2`),
# tensor cores, and all that is only near the right value or drops subnormal numbers. Excepted is what Triton makes of
# tl.floor, `cvt.rmi.ftz`: it is wrong for negative subnormals alone, and right with enable_reflect_ftz=False.
INEXACT = re.compile(
    r"\b(?:fma|mad)\.r[nzmp][\w.]*\.(?:f16|f16x2|f32|f32x2|f64)\b"
    r"|\b(?:mma|wgmma|tcgen05\.mma)\.[\w.:]*f(?:16|32|8)[\w.:]*"
    r"|(?<![\w.])(?!cvt\.r[nzmp]i\.)[a-z]\w*(?:\.\w+)*\.(?:approx|full|ftz)(?:\.\w+)*\.b?f(?:16|32|64)(?:x2)?\b"
)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel with all that fixes its machine code but the architecture.

    Attributes:
        name: unique among the cases.
        kernel: a `triton.jit` function, decorated in a process without `TRITON_INTERPRET`.
        signature: argument name → Triton's type: `*fp32`, `i32`, `fp32`; constexpr arguments may be left out.
        constexprs: argument name → value.
        options: of `triton.compile`; `enable_fp_fusion=False` promises that the arithmetic is NumPy's to the bit.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cubin:
    """A kernel's machine code for one architecture, as `ptxas` reports it.

    Attributes:
        name: the case's.
        sm: compute capability × 10.
        exact: the kernel promises NumPy's arithmetic to the bit.
        registers: 32-bit registers a thread, at most 255.
        spill_store_bytes, spill_load_bytes: a thread's traffic to local memory for want of registers.
        stack_bytes: a thread's stack frame, spilled registers included.
        shared_bytes: shared memory a block.
        cubin_bytes: size of the file.
        ptx: the assembly that `ptxas` was given.
    """

    name: str
    sm: int
    exact: bool
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    cubin_bytes: int
    ptx: str = field(repr=False)


def cases(modules: Sequence[str] = KERNEL_MODULES) -> list[KernelCase]:
    """What the modules' `ahead_of_time()` yield; imports them, and with them Triton.

    Raises:
        OptionError: a module cannot be imported or has no `ahead_of_time`, or two cases have one name.
    """
    found: dict[str, KernelCase] = {}
    for module in modules:
        try:
            listed = importlib.import_module(module).ahead_of_time
        except (ImportError, AttributeError) as error:
            raise OptionError(f"{module}: expected kernels with ahead_of_time(), got: {error}") from error
        for entry in listed():
            case = KernelCase(*entry)
            if case.name in found:
                raise OptionError(f"{module}: expected a name for each kernel, got {case.name!r} twice")
            found[case.name] = case
    return list(found.values())


def compile_kernel(case: KernelCase, sm: int) -> Cubin:
    """Compiles for compute capability `sm` / 10; no GPU and no driver are needed.

    Raises:
        OptionError: an architecture that is not known here, an option that Triton does not have, a signature that
            does not fit its kernel, or a kernel that was decorated for the interpreter.
        BuildError: Triton or `ptxas` refused it.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDAOptions
    from triton.compiler import ASTSource

    if sm not in SHARED_LIMIT_KIB:
        raise OptionError(f"sm_{sm}: expected one of {', '.join(f'sm_{known}' for known in SHARED_LIMIT_KIB)}")
    if not isinstance(case.kernel, triton.JITFunction):
        raise OptionError(
            f"{case.name}: expected a triton.jit function, got {type(case.kernel).__name__}: "
            "unset TRITON_INTERPRET before the kernel's module is imported"
        )
    if unknown := case.options.keys() - CUDAOptions.__dataclass_fields__.keys():
        raise OptionError(
            f"{case.name}: Triton would drop {', '.join(sorted(unknown))} without a word: no such options"
        )
    source = ASTSource(case.kernel, _signature(case), dict(case.constexprs), _aligned_pointers(case))
    log = io.StringIO()
    try:
        # Triton runs `ptxas -v` itself; its own log is of this very cubin, whatever flags it was given.
        with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            knobs.compilation.always_compile = True
            knobs.nvidia.dump_ptxas_log = True
            built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=dict(case.options))
    except Exception as error:  # whatever a compiler may raise, down to an assertion of its own
        reason = " ".join(str(error).split())[:300]
        raise BuildError(f"{case.name} for sm_{sm}: Triton refused it: {type(error).__name__}: {reason}") from error
    return Cubin(
        name=case.name,
        sm=sm,
        exact=case.options.get("enable_fp_fusion") is False,
        shared_bytes=built.metadata.shared,
        cubin_bytes=len(built.asm["cubin"]),
        ptx=built.asm["ptx"],
        **_resources(case.name, log.getvalue()),
    )


def _signature(case: KernelCase) -> dict[str, str]:
    """In the kernel's own order, with its constexprs, as `ASTSource` wants it."""
    expected = case.kernel.arg_names
    given = dict(case.signature) | dict.fromkeys(case.constexprs, "constexpr")
    if given.keys() != set(expected):
        wrong = ", ".join(sorted(given.keys() ^ set(expected)))
        raise OptionError(f"{case.name}: expected the arguments {', '.join(expected)}, got others or too few: {wrong}")
    return {name: given[name] for name in expected}


def _aligned_pointers(case: KernelCase) -> dict[tuple[int, ...], list[list[str | int]]]:
    """What a launch finds out about torch's allocations: their addresses are multiples of 16 bytes."""
    return {
        (position,): [["tt.divisibility", 16]]
        for position, parameter in enumerate(case.kernel.params)
        if case.signature.get(parameter.name, "").startswith("*")
        and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    }


def _resources(name: str, log: str) -> dict[str, int]:
    """From what `ptxas -v` says of each function: the kernel, and those that it calls."""
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    if not frames or not registers:
        raise BuildError(f"{name}: expected ptxas's figures in its log, got {log.strip()[:200]!r}: has Triton changed?")
    stack, stores, loads = (sum(map(int, column)) for column in zip(*frames, strict=True))
    return {
        "registers": max(map(int, registers)),
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
        "stack_bytes": stack,
    }


def faults(cubin: Cubin) -> list[str]:
    """What is wrong with it, a line each; empty when it is as a kernel should be."""
    where = f"{cubin.name} for sm_{cubin.sm}"
    found = []
    if spilled := cubin.spill_store_bytes + cubin.spill_load_bytes:
        # Unasked, ptxas may spill a little so that more blocks fit on a multiprocessor; maxnreg tells it not to.
        mend = "use smaller blocks, more warps or maxnreg=255"
        found.append(f"{where}: expected no spilled registers, got {spilled} bytes: {mend}")
    limit = SHARED_LIMIT_KIB[cubin.sm] * 1024
    if cubin.shared_bytes > limit:
        found.append(f"{where}: expected at most {limit} bytes of shared memory, got {cubin.shared_bytes}")
    if cubin.exact and (inexact := sorted(set(INEXACT.findall(cubin.ptx)))):
        found.append(
            f"{where}: expected NumPy's arithmetic to the bit (enable_fp_fusion=False), got {', '.join(inexact)}: "
            "use tl.math.div_rn and sqrt_rn, and neither tl.fma nor tl.dot"
        )
    return found


# ---- all of them, in several processes -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """What came of every kernel on every architecture.

    Attributes:
        toolchain: versions: `triton`, `ptxas` (to sm_90), `ptxas_blackwell` (from sm_100).
        cubins: by kernel, then by architecture; those that a compiler refused are absent.
        faults: what must not be, a line each.
    """

    toolchain: Mapping[str, str]
    cubins: tuple[Cubin, ...]
    faults: tuple[str, ...]


def compile_all(architectures: Sequence[int] = ARCHITECTURES, modules: Sequence[str] = KERNEL_MODULES) -> Report:
    """Every kernel for every architecture, in a fresh process for each usable processor.

    So it does not matter whether this one runs Triton's interpreter; Triton's cache is left as it was.

    Raises:
        OptionError: from `cases` or `compile_kernel`.
    """
    cubins, found = [], []
    with tempfile.TemporaryDirectory(prefix="visionfast-cubins-") as cache:
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(machine.usable_cpus(), fresh, _become_a_compiler, (cache,)) as pool:
            toolchain, names = pool.submit(_survey, modules).result()
            jobs = [pool.submit(_compile_named, modules, name, sm) for name in names for sm in architectures]
            try:
                for job in track(jobs, "compiling", console=_err, transient=True, disable=not _err.is_terminal):
                    try:
                        cubins.append(job.result())
                        found += faults(cubins[-1])
                    except BuildError as error:
                        found.append(str(error))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return Report(toolchain, tuple(cubins), tuple(found))


def _become_a_compiler(cache: str) -> None:
    """Before Triton is first imported in a worker: kernels are decorated for the compiler, not for the interpreter."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache


def _survey(modules: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The toolchain's versions and the kernels' names."""
    names = [case.name for case in cases(modules)]
    import triton
    from triton import knobs

    versions = {
        "triton": triton.__version__,
        "ptxas": knobs.nvidia.ptxas.version,
        "ptxas_blackwell": knobs.nvidia.ptxas_blackwell.version,
    }
    return versions, names


def _compile_named(modules: Sequence[str], name: str, sm: int) -> Cubin:
    return compile_kernel(next(case for case in cases(modules) if case.name == name), sm)


# ---- the command ---------------------------------------------------------------------------------------

_out, _err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
if not _out.is_terminal:
    _out.width = 200  # a pipe or a file has no edge to wrap at


def _table(report: Report) -> Table:
    versions = ", ".join(f"{tool} {version}" for tool, version in report.toolchain.items())
    columns = ("kernel", "arch", "registers", "spills", "stack", "shared", "bytes", "exact")
    table = Table(title=versions, title_justify="left", box=None)
    for name in columns:
        table.add_column(name, justify="left" if name in ("kernel", "exact") else "right")
    previous = ""
    for cubin in report.cubins:
        spills = cubin.spill_store_bytes + cubin.spill_load_bytes
        figures = (cubin.registers, spills, cubin.stack_bytes, cubin.shared_bytes, cubin.cubin_bytes)
        table.add_row(
            "" if cubin.name == previous else escape(cubin.name),
            f"sm_{cubin.sm}",
            *(f"{figure:,}" for figure in figures),
            "yes" if cubin.exact else "",
            style="red" if faults(cubin) else None,
        )
        previous = cubin.name
    return table


def _json(report: Report) -> str:
    rows = [{key: value for key, value in asdict(cubin).items() if key != "ptx"} for cubin in report.cubins]
    return json.dumps({"toolchain": report.toolchain, "cubins": rows, "faults": report.faults}, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m visionfast.cubins`: 0 when every kernel is as it should be, 1 when not, 2 when asked wrongly."""
    parser = argparse.ArgumentParser(prog="python -m visionfast.cubins", description=(__doc__ or "").split("\n\n")[0])
    add = functools.partial(parser.add_argument, action="append", default=[])
    add("--sm", type=int, metavar="NN", help="an architecture; repeatable (default: the six that are tested)")
    add("--module", help="kernels' module; repeatable (default: visionfast's own)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    try:
        report = compile_all(options.sm or ARCHITECTURES, options.module or KERNEL_MODULES)
    except VisionfastError as error:
        _err.print(f"error: {error}", markup=False)
        return 2
    if options.json is not None:
        options.json.write_text(_json(report))
    _out.print(_table(report))
    for fault in report.faults:
        _err.print(fault, markup=False, style="red")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
