"""The verb `bench`: how fast an engine is, and whether it has become slower."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visionfast.errors import OptionError
from visionfast.terminal import one_line

if TYPE_CHECKING:
    from visionfast.bench.records import Input, Record, Scenario
    from visionfast.bench.systems import SystemUnderTest

__all__ = ["bench_verb"]

_SECONDS = 20.0


def bench_verb(
    engine: Annotated[
        str | None,
        typer.Argument(
            metavar="ENGINE", help="A model's name under engines/, or NAME/VARIANT where it has several, or a folder."
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(help="single-stream, multi-stream, server or offline, once for each; default: all of them."),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="JPEG and PNG as they come; default: a mix of two photographs.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Of each scenario; at least 8 rounds. Default: 20.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="HTML", help="A page that stands by itself.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Every raw sample: a baseline for later.")] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A baseline. Exit code 1 if the engine has become slower or fails."),
    ] = None,
    tolerance: Annotated[
        str | None, typer.Option(help="That it may take longer than the baseline. Default: 5%.")
    ] = None,
    streams: Annotated[int | None, typer.Option(help="Requests at a time; default: one a processor.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second in server; default: the highest there is.")
    ] = None,
    bound_ms: Annotated[
        float | None, typer.Option(help="Latency of 99 % of them; default: three times P90 of single-stream.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Processors to use; default: all there are.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: what the engine is for.")] = None,
    seed: Annotated[int, typer.Option(help="Of the orders, the arrivals and the choice of images.")] = 0,
    null: Annotated[
        bool, typer.Option("--null", help="Only the harness itself, on a system that does nothing.")
    ] = False,
) -> None:
    """Latency and throughput of an engine, from image to result. In the four scenarios of MLPerf's LoadGen."""
    if null:
        _show_harness(_scenarios(scenario, None), streams)
        return
    if engine is None:
        raise OptionError("bench: expected an ENGINE, or --null; `visionfast list` shows the engines")
    from visionfast.artifacts import find_engine
    from visionfast.bench.records import read_record, write_record
    from visionfast.bench.render import show_record, show_verdict
    from visionfast.pipeline import runs_here

    _check_targets(json, report, against)
    allowed = _share(tolerance)
    baseline = None if against is None else read_record(against)
    if against is None and tolerance is not None:
        raise OptionError("--tolerance: expected together with --against, the baseline that it is about")
    names = _scenarios(scenario, baseline)
    if threads is None and baseline is not None:
        threads = _threads_in(baseline)
    folder = find_engine(engine, usable=runs_here)
    command = {
        "engine": "/".join(folder.resolve().parts[-2:]),
        "scenario": ", ".join(names),
        "seconds": f"{_seconds(seconds, baseline):g}",
        "images": "made" if images is None else images.name,
        "seed": str(seed),
        "streams": "default" if streams is None else str(streams),
        "rate": "looked for" if rate is None else f"{rate:g}",
        "bound_ms": "default" if bound_ms is None else f"{bound_ms:g}",
        "threads": "default" if threads is None else str(threads),
    }
    inputs = _inputs(images, seed, baseline)
    with _opened(folder, threads, device) as systems:

        def measure() -> Record:
            from visionfast.bench.run import measure as run

            options: dict[str, Any] = {"streams": streams, "rate_per_s": rate, "bound_ms": bound_ms}
            if baseline is not None:
                options |= _as_in(baseline, options)
            return run(
                systems,
                inputs,
                scenarios=names,
                seconds=_seconds(seconds, baseline),
                seed=seed,
                all_inputs=baseline is not None,
                command=command,
                progress=lambda text: _tell(f"{text} …"),
                **options,
            )

        if baseline is None:
            record, verdict = measure(), None
        else:
            from visionfast.bench.gate_run import decide

            _check_baseline(baseline, systems, inputs, command)
            verdict, record = decide(baseline, measure, tolerance=allowed, tell=_tell)
    if json is not None:
        write_record(json, record)
    if report is not None:
        from visionfast.bench.report import write_report

        write_report(report, record)
    show_record(record)
    if record.system("visionfast").details["certificate"] == "failed":
        _tell("the engine's certificate failed: it is not right, and is compared with nothing")
    if verdict is not None and against is not None:
        print()
        show_verdict(verdict, against.name)
        for reason in verdict.withheld:
            _tell(f"no verdict: {reason}")
        for finding in verdict.slower:
            _tell(str(finding))
        for reason in verdict.broken:
            _tell(f"the build is broken: {reason}")
        if verdict.status in ("slower", "broken"):
            raise typer.Exit(1)


def _tell(text: str) -> None:
    print(f"visionfast: {one_line(text)}", file=sys.stderr, flush=True)


def _show_harness(names: Sequence[Scenario], streams: int | None) -> None:
    from visionfast.bench.run import harness_ns

    for name, spent in harness_ns(streams, names).items():
        print(f"{name}: {spent / 1e3:.1f} µs a request")


def _scenarios(asked: Sequence[str] | None, baseline: Record | None) -> tuple[Scenario, ...]:
    """In the order of the table; as in the baseline where none are named."""
    from visionfast.bench.records import SCENARIOS

    if unknown := sorted(set(asked or ()) - set(SCENARIOS)):
        raise OptionError(f"--scenario {unknown[0]}: expected one of {', '.join(SCENARIOS)}")
    if not asked:
        return SCENARIOS if baseline is None else baseline.scenarios
    return tuple(scenario for scenario in SCENARIOS if scenario in asked)


def _seconds(asked: float | None, baseline: Record | None) -> float:
    if asked is not None:
        if not 0 < asked < 1e6:
            raise OptionError(f"--seconds {asked:g}: expected more than 0")
        return asked
    with contextlib.suppress(KeyError, ValueError, AttributeError):
        return float(baseline.command["seconds"])  # type: ignore[union-attr]
    return _SECONDS


def _share(text: str | None) -> float:
    """`5%` or `0.05` → 0.05."""
    if text is None:
        from visionfast.bench.gate import TOLERANCE

        return TOLERANCE
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(%?)", text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < share < 1:
        raise OptionError(f"--tolerance {text}: expected a share above 0 and below 100 %, such as 5% or 0.05")
    return share


def _check_targets(json: Path | None, report: Path | None, against: Path | None) -> None:
    """Raises `OptionError` where an output would take the place of another, of the baseline, an image or an engine."""
    from visionfast.artifacts import MODEL_SUFFIXES, is_of_an_engine
    from visionfast.image_files import IMAGE_SUFFIXES, same_file

    for option, target in (("--json", json), ("--report", report)):
        if target is None:
            continue
        if target.suffix.lower() in {*IMAGE_SUFFIXES, *MODEL_SUFFIXES}:
            raise OptionError(f"{option} {target}: expected a file for it, got the name of an image or of weights")
        if is_of_an_engine(target):
            raise OptionError(f"{option} {target}: expected a file elsewhere, got one in an engine's folder")
        if against is not None and same_file(target, against):
            raise OptionError(f"{option} {target}: would overwrite the baseline; name another file")
    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"--report {report}: expected a name that ends in .html; it is a page for a browser")
    if json is not None and json == report:
        raise OptionError(f"--json and --report: expected two files, got {json} for both")


def _inputs(folder: Path | None, seed: int, baseline: Record | None) -> tuple[Input, ...]:
    """The baseline's images, in its order, where there is one."""
    from visionfast.bench.inputs import folder_mix, found_again, made_mix

    if folder is None:
        return made_mix() if baseline is None else _those_of(baseline, made_mix())
    if baseline is not None:
        return found_again(folder, baseline.inputs)
    found, left_out = folder_mix(folder, seed=seed)
    if left_out:
        shown = ", ".join(left_out[:5]) + (", …" if len(left_out) > 5 else "")
        _tell(f"{len(left_out)} images are left out, not to be read or neither JPEG nor PNG: {shown}")
    return found


def _those_of(baseline: Record, inputs: Sequence[Input]) -> tuple[Input, ...]:
    """Those that are the baseline's, in its order; what is missing is found by the gate."""
    here = {made.sha256: made for made in inputs}
    return tuple(here[old.sha256] for old in baseline.inputs if old.sha256 in here) or tuple(inputs)


def _threads_in(baseline: Record) -> int | None:
    """As the baseline was measured; `None` where it does not tell, or had all processors."""
    said = baseline.command.get("threads", "default")
    return int(said) if said.isdecimal() else None


def _check_baseline(
    baseline: Record, systems: Sequence[SystemUnderTest], inputs: Sequence[Input], command: Mapping[str, str]
) -> None:
    """Raises what `gate.compare` would, before minutes are spent."""
    from visionfast.bench.environment import environment
    from visionfast.bench.gate import check_comparable
    from visionfast.bench.records import Record

    asked = tuple(system.system for system in systems)
    check_comparable(baseline, Record(baseline.version, "", command, environment(), asked, tuple(inputs), {}, None, {}))


def _as_in(baseline: Record, asked: dict[str, Any]) -> dict[str, Any]:
    """How the baseline was asked, where nothing else is said."""
    key = next((system.key for system in baseline.systems if system.kind == "visionfast"), "")
    found: dict[str, Any] = {}
    for scenario in baseline.scenarios:
        settings = dict(baseline.samples[key, scenario].settings) if (key, scenario) in baseline.samples else {}
        if scenario != "single-stream" and "parallel" in settings:
            found["streams"] = int(settings["parallel"])
        found |= {name: settings[name] for name in ("rate_per_s", "bound_ms") if name in settings}
    return {name: value for name, value in found.items() if asked[name] is None}


@contextlib.contextmanager
def _opened(folder: Path, threads: int | None, device: str | None) -> Iterator[list[SystemUnderTest]]:
    """visionfast on the engine, the engine by itself, and the control."""
    from visionfast.bench.engine_systems import BareSystem, PromptSystem, open_visionfast
    from visionfast.bench.systems import ControlSystem

    with contextlib.ExitStack() as closing:
        opened: list[SystemUnderTest] = [open_visionfast(folder, threads=threads, device=device)]
        closing.callback(opened[0].close)
        if isinstance(opened[0], PromptSystem):
            opened.append(opened[0].repeated())
        opened.append(BareSystem(folder, threads=threads, device=device))
        closing.callback(opened[-1].close)
        opened.append(ControlSystem())
        yield opened
