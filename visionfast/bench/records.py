"""What a measuring run leaves: every raw sample, and all that the figures depend on. Figures are derived from it.

Times are nanoseconds of one monotonic clock within a record; only their differences mean anything.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from visionfast.artifacts import atomic_write
from visionfast.errors import ArtifactError, ManifestError, ShapeError
from visionfast.strict_json import decode

__all__ = [
    "SCENARIOS",
    "Input",
    "Record",
    "Samples",
    "Scenario",
    "System",
    "SystemKind",
    "read_record",
    "write_record",
]

Scenario: TypeAlias = Literal["single-stream", "multi-stream", "server", "offline"]
"""How requests arrive; see `visionfast.bench.scenarios`."""

SystemKind: TypeAlias = Literal["null", "control", "bare", "visionfast", "naive", "peer", "served", "step"]
"""`null` answers at once, `control` does fixed work that no build of visionfast changes, `bare` is an engine without
anything around it, `naive` and `peer` are what others would use, `step` is one of `visionfast.bench.waterfall`'s."""

SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Input:
    """One encoded image that systems are asked about.

    Attributes:
        name: for people.
        encoded: its bytes; a record that was read from a file has none.
        sha256: of `encoded`.
        image_hw: pixels, after its EXIF orientation.
        format: `jpeg`, `png`, or another one's name in lower case.
        n_bytes: length of `encoded`.
    """

    name: str
    encoded: bytes = field(repr=False)
    sha256: str
    image_hw: tuple[int, int]
    format: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class System:
    """Who was measured.

    Attributes:
        key: short and unique within the record: `visionfast`, `naive`, `bare`.
        name: for people.
        kind: what sort of system it is.
        details: what it depends on, as text: `weights_sha256`, `engine_sha256`, `precision`, `certificate`
            (`passed`, `failed`, …), versions. What is not known is absent.
    """

    key: str
    name: str
    kind: SystemKind
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """One system in one scenario: N requests, one a row, in the order in which they began.

    Attributes:
        round: (N,) int64, the interleaved round it belongs to, from 0. Systems that share a round ran side by side.
        input: (N,) int64, which of the record's inputs it was about.
        due_ns: (N,) int64, when it arrived: in `server` when it was due by the schedule, whether or not anyone was
            free then; in `multi-stream` equal for those that arrived together.
        begun_ns: (N,) int64, when someone began to work on it.
        done_ns: (N,) int64, when its answer was in host memory.
        stage_ns: stage → (N,) int64, what it took; -1 where the request did not reach it.
        failed: (N,) bool, no answer came but an error.
        settings: what the scenario was run with: `parallel`, and in `server` `rate_per_s` and `bound_ms`.
    """

    round: npt.NDArray[np.int64]
    input: npt.NDArray[np.int64]
    due_ns: npt.NDArray[np.int64]
    begun_ns: npt.NDArray[np.int64]
    done_ns: npt.NDArray[np.int64]
    stage_ns: Mapping[str, npt.NDArray[np.int64]]
    failed: npt.NDArray[np.bool_]
    settings: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.round)
        columns = {name: getattr(self, name) for name in _COLUMNS} | dict(self.stage_ns)
        for name, column in columns.items():
            kind = np.bool_ if name == "failed" else np.int64
            if column.shape != (n,) or column.dtype != kind:
                got = f"{column.shape} {column.dtype.name}"
                raise ShapeError(f"Samples.{name}: expected ({n},) {np.dtype(kind).name}, got {got}")

    def __len__(self) -> int:
        return len(self.round)

    @property
    def latency_ns(self) -> npt.NDArray[np.int64]:
        """(N,) int64: from the arrival to the answer. A request that waited for a slow one before it has waited."""
        return self.done_ns - self.due_ns

    def __getitem__(self, rows: npt.NDArray[Any] | slice) -> Samples:
        """The selected requests: a boolean mask, positions or a slice."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        stage_ns = {name: column[rows] for name, column in self.stage_ns.items()}
        return Samples(**columns, stage_ns=stage_ns, settings=self.settings)

    @property
    def answered(self) -> Samples:
        """Those that did not fail."""
        return self[~self.failed]


_COLUMNS = ("round", "input", "due_ns", "begun_ns", "done_ns", "failed")


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One measuring run.

    Attributes:
        version: of the file's layout.
        created: UTC, ISO 8601.
        command: what was asked for: option → value. File names, not the paths of one machine.
        environment: machine, versions, revision; see `visionfast.bench.environment`.
        systems: who took part, by unique keys.
        inputs: what they were asked about.
        samples: (system's key, scenario) → its requests.
        others_cpu_share: of all processors' time during the run, what went to anyone else, 0..1; `None` where the
            system does not tell.
        harness_ns: scenario → what the harness itself takes of a request, by the null system.
    """

    version: int
    created: str
    command: Mapping[str, str]
    environment: Mapping[str, str]
    systems: tuple[System, ...]
    inputs: tuple[Input, ...]
    samples: Mapping[tuple[str, Scenario], Samples]
    others_cpu_share: float | None
    harness_ns: Mapping[Scenario, int]

    def system(self, key: str) -> System:
        """The system of that key; there is one (`KeyError`)."""
        return {system.key: system for system in self.systems}[key]

    @property
    def scenarios(self) -> tuple[Scenario, ...]:
        """Those that somebody was measured in, in the order of `SCENARIOS`."""
        run = {scenario for _, scenario in self.samples}
        return tuple(scenario for scenario in SCENARIOS if scenario in run)


# ---- the file ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StoredInput:
    name: str
    sha256: str
    image_hw: tuple[int, int]
    format: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class _StoredSamples:
    system: str
    scenario: Scenario
    settings: Mapping[str, float]
    round: tuple[int, ...]
    input: tuple[int, ...]
    due_ns: tuple[int, ...]
    begun_ns: tuple[int, ...]
    done_ns: tuple[int, ...]
    stage_ns: Mapping[str, tuple[int, ...]]
    failed: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _StoredRecord:
    version: int
    created: str
    command: Mapping[str, str]
    environment: Mapping[str, str]
    others_cpu_share: float | None
    harness_ns: Mapping[str, int]
    systems: tuple[System, ...]
    inputs: tuple[_StoredInput, ...]
    samples: tuple[_StoredSamples, ...]


def write_record(path: str | os.PathLike[str], record: Record) -> None:
    """Writes a record as JSON, without the images' bytes.

    Raises:
        ArtifactError: the disk is full, or the folder cannot be written.
    """
    content = {
        "version": record.version,
        "created": record.created,
        "command": dict(record.command),
        "environment": dict(record.environment),
        "others_cpu_share": record.others_cpu_share,
        "harness_ns": dict(record.harness_ns),
        "systems": [{"key": s.key, "name": s.name, "kind": s.kind, "details": dict(s.details)} for s in record.systems],
        "inputs": [
            {"name": i.name, "sha256": i.sha256, "image_hw": i.image_hw, "format": i.format, "n_bytes": i.n_bytes}
            for i in record.inputs
        ],
        "samples": [_stored(key, scenario, samples) for (key, scenario), samples in record.samples.items()],
    }
    # One request's numbers in one place would be a line each; a column on a line is what a diff can be read of.
    atomic_write(Path(path), (_columns_on_lines(content) + "\n").encode())


def _stored(key: str, scenario: Scenario, samples: Samples) -> dict[str, Any]:
    return {
        "system": key,
        "scenario": scenario,
        "settings": dict(samples.settings),
        **{name: getattr(samples, name).tolist() for name in _COLUMNS},
        "stage_ns": {stage: column.tolist() for stage, column in samples.stage_ns.items()},
    }


def _columns_on_lines(value: Any, indent: str = "") -> str:
    """JSON, indented, but for lists of plain values, which stay on one line."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        items = [f"{inner}{_plain(name)}: {_columns_on_lines(item, inner)}" for name, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return "[\n" + ",\n".join(inner + _columns_on_lines(item, inner) for item in value) + f"\n{indent}]"
    return _plain(value)


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read_record(path: str | os.PathLike[str]) -> Record:
    """Reads what `write_record` wrote; its inputs have no bytes.

    Raises:
        ArtifactError: there is no such file, or it is none of these, or damaged; the message says where.
    """
    where = os.fspath(path)
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ArtifactError(f"{where}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ArtifactError(
            f"{where}: expected what `visionfast bench --json` writes, got no JSON ({reason})"
        ) from error
    if not isinstance(content, dict) or "samples" not in content:
        raise ArtifactError(f"{where}: expected what `visionfast bench --json` writes, got other JSON")
    if (version := content.get("version")) != _VERSION:
        raise ArtifactError(f"{where}: expected a record of version {_VERSION}, got {version!r}; measure again")
    with _as_artifact_errors():
        return _record(where, decode(_StoredRecord, content, where))


@contextlib.contextmanager
def _as_artifact_errors() -> Iterator[None]:
    try:
        yield
    except (ManifestError, ShapeError) as error:
        raise ArtifactError(str(error)) from error


def _record(where: str, stored: _StoredRecord) -> Record:
    keys = [system.key for system in stored.systems]
    if len(set(keys)) < len(keys):
        raise ArtifactError(f"{where}.systems: expected each key once, got {', '.join(keys)}")
    if not stored.systems or not stored.inputs:
        raise ArtifactError(f"{where}: expected somebody who was measured, and on something; got nobody or nothing")
    harness_ns = {decode(Scenario, name, f"{where}.harness_ns"): spent for name, spent in stored.harness_ns.items()}
    samples: dict[tuple[str, Scenario], Samples] = {}
    for i, one in enumerate(stored.samples):
        at = f"{where}.samples[{i}]"
        if one.system not in keys:
            raise ArtifactError(f"{at}.system: expected one of {', '.join(keys)}, got {one.system!r}")
        if (key := (one.system, one.scenario)) in samples:
            raise ArtifactError(f"{at}: {one.system} in {one.scenario} is there twice")
        samples[key] = _checked(at, one, len(stored.inputs))
    return Record(
        version=stored.version,
        created=stored.created,
        command=stored.command,
        environment=stored.environment,
        systems=stored.systems,
        inputs=tuple(Input(i.name, b"", i.sha256, i.image_hw, i.format, i.n_bytes) for i in stored.inputs),
        samples=samples,
        others_cpu_share=stored.others_cpu_share,
        harness_ns=harness_ns,
    )


def _checked(at: str, one: _StoredSamples, inputs: int) -> Samples:
    try:
        columns = {name: np.array(getattr(one, name), np.int64) for name in _COLUMNS if name != "failed"}
        stage_ns = {stage: np.array(column, np.int64) for stage, column in one.stage_ns.items()}
    except OverflowError:
        raise ArtifactError(f"{at}: expected whole numbers of 64 bits, got a larger one") from None
    made = Samples(**columns, failed=np.array(one.failed, np.bool_), stage_ns=stage_ns, settings=one.settings)
    if len(made) and not (made.input.min() >= 0 and made.input.max() < inputs):
        raise ArtifactError(f"{at}.input: expected numbers of the {inputs} inputs, got one that is none")
    if not all(0 < value < math.inf for value in one.settings.values()):
        raise ArtifactError(f"{at}.settings: expected numbers above 0, got {one.settings}")
    if (made.due_ns > made.begun_ns).any() or (made.begun_ns > made.done_ns).any():
        raise ArtifactError(f"{at}: expected due_ns ≤ begun_ns ≤ done_ns in every row, got one that is otherwise")
    return made
