"""Which modules of a half-precision network have to stay FP32?

`visionfast.drift` emulates FP16 module by module in eager PyTorch: cheap, and right about what overflows and where
rounding is worst, but not about what an engine makes of it. The search here asks the engine itself, and as few times
as it can: every answer is a build.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["LARGEST_FP16", "WHOLE", "Drift", "Islands", "Verdict", "find_islands"]

LARGEST_FP16 = 65504.0
WHOLE = ""
"""torch's name for the module that all others are in."""


@dataclass(frozen=True, slots=True)
class Drift:
    """What FP16 does to one module by itself: it is given the FP32 network's values, rounded.

    Attributes:
        path: dotted, of the module.
        peak: largest absolute value among its FP32 inputs and outputs.
        overflows: rounded to FP16 something in it is infinite or NaN that is finite in FP32.
        relative_error: RMS of the error over the RMS of the output around its channel's mean; 0 where it was not
            emulated: a module that others are inside of.
    """

    path: str
    peak: float
    overflows: bool
    relative_error: float

    @property
    def suspicion(self) -> float:
        """What sorts modules by how likely they are the ones: infinite for an overflow."""
        return math.inf if self.overflows else self.relative_error

    def __str__(self) -> str:
        if self.overflows:
            return f"its values reach {self.peak:.3g}, float16 ends at {LARGEST_FP16:.0f}"
        return f"relative error {self.relative_error:.2g} in float16"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a built engine's certificate says: whether it passed, and its worst figure in words."""

    passed: bool
    says: str = ""


@dataclass(frozen=True, slots=True)
class Islands:
    """What the search came to.

    Attributes:
        kept: module → why it stays FP32; empty where nothing was found.
        says: how the search went, in words.
        builds: engines that were built for it.
    """

    kept: Mapping[str, str]
    says: str
    builds: int


# ---- asking the engine ------------------------------------------------------------------------------------


def find_islands(
    drifts: Sequence[Drift],
    attempt: Callable[[tuple[str, ...]], Verdict],
    *,
    failed: Verdict,
    max_builds: int,
    progress: Callable[[str], None] = lambda stage: None,
) -> Islands:
    """The fewest and smallest modules that have to stay FP32: take any one away, and the engine fails.

    From the whole network down to single layers: of the parts of what has to be kept, the smallest set that will
    do, the most suspicious tried first. Each such set is found by QuickXplain (Junker, AAAI 2004), which needs about
    k · log2(n / k) builds for k of n parts, and two or three where the suspicion is right.

    Args:
        drifts: of every module that may be kept, in the order in which they run, a module before its parts.
        attempt: builds an engine with these modules in FP32, and certifies it.
        failed: the verdict on the engine that keeps none of them.
        max_builds: calls of `attempt` at most. With fewer than were needed, the smallest set so far is given.
        progress: is told each build's outcome.
    """
    search = _Search(drifts, attempt, failed, max_builds, progress)
    try:
        if not search.passes((WHOLE,)):
            reason = search.verdicts[WHOLE,].says
            return Islands({}, f"it is not precision: with everything in FP32 it fails too ({reason})", search.builds)
        search.settle()
        ended = f"{search.builds} of at most {max_builds} builds; without any one of these the engine fails"
    except _OutOfBuildsError:
        ended = f"stopped after {max_builds} builds; fewer modules may do"
    if search.is_everything(search.best):
        found = f"no part of the network found in {search.builds} of at most {max_builds} builds that will do"
        return Islands({}, f"{found}; build with precision fp32", search.builds)
    return Islands({path: search.reason(path) for path in search.best}, ended, search.builds)


class _OutOfBuildsError(Exception):
    """The budget is spent."""


class _Search:
    """The state of one search. `best` is the smallest set that is known to pass, once the whole does."""

    def __init__(
        self,
        drifts: Sequence[Drift],
        attempt: Callable[[tuple[str, ...]], Verdict],
        failed: Verdict,
        max_builds: int,
        progress: Callable[[str], None],
    ) -> None:
        self.best: tuple[str, ...] = (WHOLE,)
        self.verdicts: dict[tuple[str, ...], Verdict] = {(): failed}
        self._drifts, self._attempt, self._max_builds, self._progress = drifts, attempt, max_builds, progress
        self._order = {drift.path: i for i, drift in enumerate(drifts)}
        self._parts: dict[str, list[str]] = {WHOLE: [], **{path: [] for path in self._order}}
        for path in self._order:
            self._parts[self._parent(path)].append(path)
        self._layers = [path for path in self._order if not self._parts[path]]
        self._worst = {path: self._worst_in(path) for path in self._order}

    @property
    def builds(self) -> int:
        return len(self.verdicts) - 1

    def settle(self) -> None:
        """From the whole, which passes, to the smallest set."""
        settled: list[str] = []
        waiting = [WHOLE]
        while waiting:
            module = waiting.pop(0)
            smaller = self._narrow([*settled, *waiting], self._parts[module])
            if smaller is None:
                settled.append(module)
            else:
                waiting[:0] = smaller
        # QuickXplain infers from the sets that it asked about. Rounding is not monotone (more in FP32 is not always
        # better), so the set itself, and the set without each of its members, are asked about; and where one of those
        # passes, all over again for that one.
        self.passes(settled)
        before: tuple[str, ...] = ()
        while before != self.best:
            before = self.best
            for module in before:
                self.passes([other for other in before if other != module])

    def passes(self, keep: Sequence[str]) -> bool:
        """Whether an engine with these in FP32 passes; each set is built once."""
        ordered = tuple(sorted(keep, key=lambda path: self._order.get(path, -1)))
        if ordered not in self.verdicts:
            if self.builds >= self._max_builds:
                raise _OutOfBuildsError
            verdict = self.verdicts[ordered] = self._attempt(ordered)
            outcome = "passes" if verdict.passed else f"fails ({verdict.says})"
            self._progress(
                f"precision, build {self.builds} of at most {self._max_builds}: {_shown(ordered)} in FP32 {outcome}"
            )
            if verdict.passed and self._size(ordered) <= self._size(self.best):
                self.best = ordered
        return self.verdicts[ordered].passed

    def reason(self, path: str) -> str:
        """Why a module of `best` is kept: what was measured on it, and what the engine does without it."""
        without = self.verdicts.get(tuple(other for other in self.best if other != path))
        worst = str(self._worst[path])
        return worst if without is None or without.passed else f"{worst}; without it {without.says}"

    def is_everything(self, keep: Sequence[str]) -> bool:
        return self._size(keep)[0] == len(self._layers)

    def _narrow(self, others: list[str], parts: list[str]) -> list[str] | None:
        """The smallest set of these parts that passes with the others; `None` where not even all of them do."""
        if not parts:
            return None
        ranked = sorted(parts, key=lambda path: (-self._worst[path].suspicion, self._order[path]))
        too_few, tried = 0, max(1, sum(self._worst[path].overflows for path in ranked))
        while not self.passes([*others, *ranked[:tried]]):
            if tried >= len(ranked):
                return None
            too_few, tried = tried, 2 * tried
        middle = too_few or tried // 2
        smallest = self._minimal(others, ranked[:middle], ranked[middle:tried])
        return sorted(smallest, key=self._order.__getitem__)

    def _minimal(self, others: list[str], first: list[str], rest: list[str]) -> list[str]:
        """QuickXplain: both halves pass with the others, which do not pass by themselves."""
        if len(first) + len(rest) <= 1:
            return [*first, *rest]
        of_rest = self._needed([*others, *first], rest)
        of_first = self._needed([*others, *of_rest], first) if of_rest else self._halved(others, first)
        return [*of_first, *of_rest]

    def _needed(self, others: list[str], candidates: list[str]) -> list[str]:
        return [] if self.passes(others) else self._halved(others, candidates)

    def _halved(self, others: list[str], candidates: list[str]) -> list[str]:
        middle = len(candidates) // 2
        return self._minimal(others, candidates[:middle], candidates[middle:])

    def _size(self, keep: Sequence[str]) -> tuple[int, int]:
        """By layers first, then by names: of two sets of the same layers, the shorter list."""
        return sum(any(_is_in(layer, path) for path in keep) for layer in self._layers), len(keep)

    def _worst_in(self, path: str) -> Drift:
        """A module is as suspicious as the worst thing in it."""
        return max((d for d in self._drifts if _is_in(d.path, path)), key=lambda d: (d.suspicion, d.peak))

    def _parent(self, path: str) -> str:
        while path := path.rpartition(".")[0]:
            if path in self._order:
                return path
        return WHOLE


def _is_in(path: str, outer: str) -> bool:
    return outer in (path, WHOLE) or path.startswith(f"{outer}.")


def _shown(paths: Sequence[str]) -> str:
    if paths == (WHOLE,):
        return "everything"
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
