"""How fast is everything on this machine, beside everybody else who runs here? What `make bench` runs.

For each model: an FP32 engine, and a BF16 or FP16 one where the processor computes in it and its certificate passes;
visionfast on them and every baseline that is installed (`visionfast.bench.baselines`), by turns in one process; the
waterfall from naive PyTorch (`bench.steps`); how the cost grows (`bench.scaling`). Some 20 minutes on two processors;
leave the machine alone meanwhile.

    .venv/bin/python benchmarks/suite.py                                  # everything; weights are fetched
    .venv/bin/python benchmarks/suite.py --weights-dir DIR                # trained ones by their names: yolov8n*.pt, …
    .venv/bin/python benchmarks/suite.py --models yolov8n --seconds 5     # a glance

It writes benchmarks/results/suite-MACHINE.json with every raw sample, .html, a page that stands alone, and a folder
with its pictures. Where no trained weights can be had, seeded ones of the same architecture stand in: as fast, but what
they find means nothing; the report says which.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

# Importing ultralytics sets this to 1 where it is not set, which would slow its own rivals; so before torch.
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}

from rich.console import Console

from visionfast import machine
from visionfast.backends import get_backend
from visionfast.bench import scaling_runs
from visionfast.bench.agreements import add_agreement
from visionfast.bench.baselines import Absent, open_baselines
from visionfast.bench.dino_loop import DataLoaderLoop, measure_loop
from visionfast.bench.engine_systems import BareSystem, PromptSystem, open_visionfast
from visionfast.bench.inputs import folder_mix, made_mix
from visionfast.bench.load import OtherLoad
from visionfast.bench.records import Input, Record, Scenario, write_record
from visionfast.bench.report import Chapter, write_plots, write_report
from visionfast.bench.run import measure
from visionfast.bench.scaling import Curve
from visionfast.bench.steps import SeveralAtOnce, open_steps, per_image
from visionfast.bench.systems import SystemUnderTest
from visionfast.build import build
from visionfast.errors import OptionError, VisionfastError
from visionfast.fetch import fetch
from visionfast.types import EngineManifest, Precision

console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
T = TypeVar("T")
OFFLINE: Scenario = "offline"
_CHECKED = 2  # images that agreement is taken on


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured.

    Attributes:
        title: of its chapter.
        published: a name that `visionfast fetch` knows; empty where there is none.
        pattern: of its file in `--weights-dir`.
        seeded: what stands in where no trained weights can be had.
    """

    title: str
    published: str
    pattern: str
    seeded: str


MODELS = {
    "yolov8n": Model("YOLOv8n", "yolov8n", r"yolov8n(-coco)?\.pt", "yolov8n.yaml"),
    "yolov8s": Model("YOLOv8s", "yolov8s-people", r"yolov8s(-\w+)?\.pt", "yolov8s.yaml"),
    "yolov8n-seg": Model("YOLOv8n-seg", "yolov8n-seg", r"yolov8n-seg(-coco)?\.pt", "yolov8n-seg.yaml"),
    "mobile-sam": Model("MobileSAM", "", r"mobile_sam\.pt", "mobile_sam"),
    "dinov2": Model("DINOv2 ViT-S/14", "", r"dinov2_vits14(_pretrain)?\.pth", "dinov2_vits14"),
}


def find_weights(model: Model, folder: Path | None, scratch: Path) -> tuple[Path, list[str]]:
    """The checkpoint: from the folder, fetched, or seeded; and what the reader has to know about it."""
    for path in sorted(folder.iterdir()) if folder else []:
        if re.fullmatch(model.pattern, path.name):
            return path, []
    why = "its trained weights are not published where this can fetch them"
    if model.published:
        try:
            return fetch(model.published), []
        except VisionfastError as error:
            why = f"trained ones cannot be had ({error})"
    note = (
        f"the weights are seeded, not trained: {why}. They are as fast as trained ones; what they find means nothing."
    )
    return _seeded(model.seeded, scratch), [note]


def _seeded(name: str, scratch: Path) -> Path:
    if name.endswith(".yaml"):
        import torch
        from ultralytics import YOLO

        torch.manual_seed(0)
        path = scratch / f"{Path(name).stem}.pt"
        YOLO(name, verbose=False).save(path)
        return path
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    if name.startswith("dino"):
        from seeded_dino import save_checkpoint

        return save_checkpoint(name, scratch / f"{name}.pth")
    from seeded_sam import save_checkpoint as save_sam

    return save_sam(name, scratch / f"{name}.pt")


# ---- one model --------------------------------------------------------------------------------------------


def chapter(name: str, arguments: argparse.Namespace, inputs: tuple[Input, ...], scratch: Path) -> Chapter:
    """Everything about one model."""
    model = MODELS[name]
    weights, notes = find_weights(model, arguments.weights_dir, scratch)
    tell(name, f"building {weights.name}")
    engine, manifest = build(weights, backend="openvino", name=name)
    absent: list[Absent] = []
    reduced = _reduced(weights, name, absent)
    command = {"benchmark": "suite", "model": name, "weights": weights.name, "seconds": f"{arguments.seconds:g}"}
    with contextlib.ExitStack() as opened:
        own = _own(engine, reduced, opened)
        try:
            add_agreement(own, weights, manifest, inputs[:_CHECKED])
        except VisionfastError as error:  # the reference is somebody else's package
            absent.append(Absent("agreement", str(error)))
        tell(name, "opening the others")
        others, missing = opened.enter_context(open_baselines(weights, engine, inputs=inputs[:_CHECKED]))
        bare = BareSystem(engine)
        opened.callback(bare.close)
        record = measure(
            [*own, bare, *others],
            inputs,
            scenarios=arguments.scenarios,
            seconds=arguments.seconds,
            command=command,
            seed=arguments.seed,
            progress=lambda what: tell(name, what),
        )
        shares = [record.others_cpu_share]
        if manifest.spec.task == "embed" and OFFLINE in arguments.scenarios:
            tell(name, "DataLoader loop")
            record = watched(shares, lambda: _with_loop(record, weights, manifest, own[0], arguments))
        curves = list(_curves(own[0], weights, engine, inputs[0], arguments, name, shares))
        record = replace(record, others_cpu_share=most(shares))
    steps = None
    if manifest.spec.task != "prompt-segment" and manifest.certificate.status != "failed":
        tell(name, "waterfall")
        steps = _waterfall(weights, engine, reduced, inputs[:_CHECKED], arguments, command)
    return Chapter(model.title, record, steps, (*absent, *missing), curves, notes)


def _with_loop(
    record: Record, weights: Path, manifest: EngineManifest, own: SystemUnderTest, arguments: argparse.Namespace
) -> Record:
    """The record with a PyTorch DataLoader loop in `offline`, and visionfast as it was beside that."""
    loop = DataLoaderLoop(weights, manifest)
    found = measure_loop(loop, own, record.inputs, seconds=arguments.seconds, seed=arguments.seed)
    samples = {**record.samples, **{(system.key, OFFLINE): taken for system, taken in found}}
    return replace(record, systems=(*record.systems, *(system for system, _ in found)), samples=samples)


def watched(shares: list[float | None], work: Callable[[], T]) -> T:
    """Does it, and adds the share of the processors that others took meanwhile."""
    load = OtherLoad(children=True)  # a DataLoader's workers and a compiler are part of what is measured
    found = work()
    shares.append(load.share())
    return found


def most(shares: Sequence[float | None]) -> float | None:
    """The largest of those that are known: one disturbed part is enough to say so."""
    return max((share for share in shares if share is not None), default=None)


def tell(name: str, what: str) -> None:
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {name}: {what}")


def _reduced(weights: Path, name: str, absent: list[Absent]) -> Path | None:
    """An engine in the lowest precision that the processor computes in, if its certificate passes."""
    able = get_backend("openvino").availability().precisions
    precisions: list[Precision] = [precision for precision in ("bf16", "fp16") if precision in able]
    if not precisions:
        absent.append(Absent("lower precision", "this processor computes in FP32 only"))
        return None
    tell(name, f"building in {precisions[0].upper()}")
    folder, manifest = build(weights, backend="openvino", name=name, precision=precisions[0])
    if manifest.certificate.status != "passed":
        absent.append(Absent(precisions[0].upper(), f"its certificate {manifest.certificate.status}"))
        return None
    return folder


def _own(engine: Path, reduced: Path | None, opened: contextlib.ExitStack) -> list[SystemUnderTest]:
    """visionfast in FP32, and in lower precision beside it."""
    systems = []
    for folder in filter(None, (engine, reduced)):
        system = open_visionfast(folder)
        opened.callback(system.close)
        precision = system.system.details["precision"]
        key = "visionfast" if folder is engine else f"visionfast-{precision}"
        system.system = replace(system.system, key=key, name=f"{system.system.name}, {precision.upper()}")
        systems.append(system)
    return systems


def _waterfall(
    weights: Path,
    engine: Path,
    reduced: Path | None,
    inputs: tuple[Input, ...],
    arguments: argparse.Namespace,
    command: dict[str, str],
) -> Record:
    single: tuple[Scenario, ...] = ("single-stream",)
    with open_steps(weights, engine, reduced, inputs=inputs) as systems:
        options: dict[str, Any] = {"seconds": arguments.seconds, "seed": arguments.seed, "command": command}
        record = measure(systems, inputs, scenarios=single, all_inputs=True, **options)
        samples = dict(record.samples)
        for system in systems:
            if isinstance(system, SeveralAtOnce):
                key = (system.system.key, single[0])
                samples[key] = per_image(samples[key], system.images)
    return replace(record, samples=samples)


def _curves(
    system: SystemUnderTest,
    weights: Path,
    engine: Path,
    image: Input,
    arguments: argparse.Namespace,
    name: str,
    shares: list[float | None],
) -> Iterator[Curve]:
    """How the cost grows; to `shares` is added what others took of the processors during each."""
    seconds, photograph = arguments.seconds / 6, image.encoded
    tell(name, "scaling")
    found: list[Curve | None] = []

    def measure_curve(make: Callable[..., Curve | None], of: Any) -> None:
        found.append(watched(shares, lambda: make(of, photograph, seconds=seconds)))

    measure_curve(scaling_runs.image_size_curve, system)
    if not isinstance(system, PromptSystem):
        measure_curve(scaling_runs.at_once_curve, system)
        engines = {1: engine}
        for batch in (2, 4):
            engines[batch], _ = build(weights, backend="openvino", name=name, batch=batch)
        measure_curve(scaling_runs.batch_curve, engines)
    if system.system.details["task"] in ("detect", "segment"):
        measure_curve(scaling_runs.object_curve, system)
    measure_curve(scaling_runs.thread_curve, engine)
    yield from filter(None, found)


# ---- the whole --------------------------------------------------------------------------------------------


def machine_name() -> str:
    """Short, of its processor: `xeon-amx-2cpu`."""
    words = re.sub(r"\((R|TM)\)|Intel|AMD|CPU|Processor|@.*", " ", machine.cpu_name()).lower()
    parts = [re.sub(r"[^a-z0-9]+", "-", words.strip()).strip("-") or machine.platform_name()]
    parts += ["amx"] if "amx_bf16" in machine.cpu_flags() else []
    return "-".join([*parts, f"{machine.usable_cpus()}cpu"])


def as_json(chapters: list[Chapter]) -> dict[str, Any]:
    """Every raw sample; a chapter's records are as `visionfast bench --json` writes them."""

    def content(record: Record | None) -> Any:
        if record is None:
            return None
        with tempfile.TemporaryDirectory(prefix="visionfast-") as folder:
            write_record(path := Path(folder) / "record.json", record)
            return json.loads(path.read_text("utf-8"))

    return {
        "benchmark": "suite",
        "chapters": [
            {
                "title": one.title,
                "notes": list(one.notes),
                "absent": [asdict(absent) for absent in one.absent],
                "record": content(one.record),
                "steps": content(one.steps),
                "curves": [asdict(curve) for curve in one.curves],
            }
            for one in chapters
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="of them, with commas between")
    parser.add_argument("--weights-dir", type=Path, help="trained checkpoints, found by their usual names")
    parser.add_argument("--images", type=Path, help="a folder; default: a mix made of two photographs")
    parser.add_argument("--scenarios", default="single-stream,offline", help="with commas between")
    parser.add_argument("--seconds", type=float, default=40, help="of each measurement: a scenario, the waterfall")
    parser.add_argument("--seed", type=int, default=0, help="of the order within the rounds")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder")
    parser.add_argument("--name", default=machine_name(), help="of this machine, in the files' names")
    arguments = parser.parse_args()
    arguments.models = arguments.models.split(",")
    arguments.scenarios = tuple(arguments.scenarios.split(","))
    if unknown := [name for name in arguments.models if name not in MODELS]:
        parser.error(f"--models: no {unknown[0]}; there are {', '.join(MODELS)}")
    if arguments.weights_dir and not arguments.weights_dir.is_dir():
        parser.error(f"--weights-dir {arguments.weights_dir}: expected a folder")
    return arguments


def main() -> int:
    arguments = _arguments()
    inputs = folder_mix(arguments.images)[0] if arguments.images else made_mix()
    chapters: list[Chapter] = []
    began = time.monotonic()
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / f"suite-{arguments.name}"
    with tempfile.TemporaryDirectory(prefix="visionfast-") as scratch:
        if "VISIONFAST_HOME" not in os.environ:  # fetched weights stay in the checkout; engines are made anew
            os.environ["VISIONFAST_HOME"] = scratch
            with contextlib.suppress(OSError):
                (Path(scratch) / "models").symlink_to(Path(__file__).parents[1] / "models")
        for name in arguments.models:
            try:
                chapters.append(chapter(name, arguments, inputs, Path(scratch)))
            except VisionfastError as error:
                console.print(f"[yellow]left out: {name}: {error}[/]")
                continue
            # After every model: a run that is stopped keeps what it had.
            stem.with_name(f"{stem.name}.json").write_text(
                json.dumps(as_json(chapters), ensure_ascii=False) + "\n", "utf-8"
            )
            title = f"visionfast beside the others on {arguments.name}"
            write_report(stem.with_name(f"{stem.name}.html"), chapters, title=title)
    if not chapters:
        raise OptionError(f"none of {', '.join(arguments.models)} could be measured")
    stem.mkdir(exist_ok=True)
    write_plots(stem, chapters)
    console.print(f"{stem}.html, .json and pictures, after {(time.monotonic() - began) / 60:.0f} minutes")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VisionfastError as error:
        sys.exit(f"error: {error}")
