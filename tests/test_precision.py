"""The search finds the smallest set of modules, whatever drifts, and asks for few builds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from visionfast.precision import WHOLE, Drift, Islands, Verdict, find_islands


def _is_in(path: str, outer: str) -> bool:
    return outer in (path, WHOLE) or path.startswith(f"{outer}.")


def _drifts(paths: Sequence[str], suspects: dict[str, float] | None = None) -> list[Drift]:
    suspects = suspects or {}
    return [Drift(p, 1.0, suspects.get(p) == math.inf, suspects.get(p, 0.0)) for p in paths]


_FAILED = Verdict(False, "score 0.5 (allowed 0.04)")


class _Engine:
    """Passes where every culprit is in FP32. A culprit is a set of modules that have to be covered one by one, or by
    one and the same module where `together`."""

    def __init__(self, *culprits: Sequence[str], together: bool = False) -> None:
        self.culprits, self.together = culprits, together
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, keep: tuple[str, ...]) -> Verdict:
        assert keep not in self.asked
        self.asked.append(keep)
        return Verdict(True) if all(self.covers(keep, c) for c in self.culprits) else _FAILED

    def covers(self, keep: tuple[str, ...], culprit: Sequence[str]) -> bool:
        if self.together:
            return any(all(_is_in(path, kept) for path in culprit) for kept in keep)
        return all(any(_is_in(path, kept) for kept in keep) for path in culprit)


def _find(paths: Sequence[str], engine: Callable[[tuple[str, ...]], Verdict], **options: object) -> Islands:
    suspects: dict[str, float] = options.pop("suspects", {})  # type: ignore[assignment]
    options = {"max_builds": 1000, "failed": _FAILED} | options
    return find_islands(_drifts(paths, suspects), engine, **options)  # type: ignore[arg-type]


# 20 blocks, in each of them two parts, in each of those a convolution and a norm
_NETWORK = [
    path
    for i in range(20)
    for path in (
        f"blocks.{i}",
        *(q for p in (1, 2) for q in (f"blocks.{i}.cv{p}", f"blocks.{i}.cv{p}.conv", f"blocks.{i}.cv{p}.norm")),
    )
]


def test_one_layer_that_is_suspected_is_found_in_a_handful_of_builds() -> None:
    engine = _Engine(["blocks.7.cv2.conv"])
    found = _find(_NETWORK, engine, suspects={"blocks.7.cv2.conv": math.inf, "blocks.3.cv1.conv": 0.2})
    assert list(found.kept) == ["blocks.7.cv2.conv"]
    assert found.builds == len(engine.asked) == 4  # everything, the block, the part, the layer
    assert found.kept["blocks.7.cv2.conv"].endswith("without it score 0.5 (allowed 0.04)")
    assert found.says == "4 of at most 1000 builds; without any one of these the engine fails"


@pytest.mark.parametrize("layer", [0, 7, 19])
def test_without_any_suspicion_it_takes_a_bisection(layer: int) -> None:
    engine = _Engine([f"blocks.{layer}.cv1.norm"])
    found = _find(_NETWORK, engine)
    assert list(found.kept) == [f"blocks.{layer}.cv1.norm"]
    assert found.builds <= 1 + 2 * math.ceil(math.log2(20)) + 2 * 3


def test_several_independent_ones() -> None:
    engine = _Engine(["blocks.2.cv1.conv"], ["blocks.11.cv2"], ["blocks.19.cv1.norm"])
    suspects = {"blocks.2.cv1.conv": math.inf, "blocks.11.cv2.norm": 0.3, "blocks.5": 0.4}
    found = _find(_NETWORK, engine, suspects=suspects)
    assert list(found.kept) == ["blocks.2.cv1.conv", "blocks.11.cv2", "blocks.19.cv1.norm"]
    assert found.builds <= 30


def test_a_value_between_two_layers_needs_both_of_them() -> None:
    """An overflow on the way from one to the other: FP32 on one side only does not help."""
    engine = _Engine(["blocks.4.cv1.conv", "blocks.4.cv2.conv"])
    found = _find(_NETWORK, engine, suspects={"blocks.4.cv1.conv": math.inf, "blocks.4.cv2.conv": math.inf})
    assert list(found.kept) == ["blocks.4.cv1.conv", "blocks.4.cv2.conv"]
    assert found.builds <= 9
    engine = _Engine(["blocks.4.cv1", "blocks.4.cv2"], together=True)
    assert list(_find(_NETWORK, engine).kept) == ["blocks.4"]


def test_it_is_not_precision() -> None:
    found = _find(_NETWORK, lambda keep: Verdict(False, "boxes 9 px off"))
    assert found == Islands({}, "it is not precision: with everything in FP32 it fails too (boxes 9 px off)", 1)


def test_only_everything_will_do() -> None:
    whole_network = _Engine(_NETWORK, together=True)
    every_layer = _Engine(*([path] for path in _NETWORK))
    for engine in (whole_network, every_layer):
        found = _find(_NETWORK, engine)
        assert found.kept == {}
        assert found.says.startswith("no part of the network found in ")
        assert found.says.endswith("; build with precision fp32")


@pytest.mark.parametrize("paths", [[], ["only"]])
def test_a_network_without_parts(paths: list[str]) -> None:
    assert _find(paths, _Engine(["only"])).kept == {}


@pytest.mark.parametrize("max_builds", range(12))
def test_a_budget_that_runs_out(max_builds: int) -> None:
    engine = _Engine(["blocks.7.cv2.conv"])
    found = _find(_NETWORK, engine, max_builds=max_builds)
    assert found.builds == len(engine.asked) <= max_builds
    if found.kept:
        assert engine.covers(tuple(found.kept), engine.culprits[0])
        assert found.says == f"stopped after {max_builds} builds; fewer modules may do"
    else:
        assert found.says.startswith(f"no part of the network found in {max_builds} of at most {max_builds} builds")


def test_it_gets_smaller_the_larger_the_budget() -> None:
    sizes = []
    for max_builds in range(1, 30):
        kept = _find(_NETWORK, _Engine(["blocks.7.cv2.conv"]), max_builds=max_builds).kept
        sizes.append(sum(any(_is_in(path, k) for k in kept) for path in _NETWORK) or len(_NETWORK))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_progress_is_a_line_a_build() -> None:
    lines: list[str] = []
    found = _find(_NETWORK, _Engine(["blocks.7"]), progress=lines.append)
    assert len(lines) == found.builds
    assert lines[0] == "precision, build 1 of at most 1000: everything in FP32 passes"
    assert "fails (score 0.5 (allowed 0.04))" in " ".join(lines)
    assert not any("\n" in line or len(line) > 160 for line in lines)


def test_an_interruption_ends_it() -> None:
    def interrupted(keep: tuple[str, ...]) -> Verdict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _find(_NETWORK, interrupted)


# ---- any network, any culprits ----------------------------------------------------------------------------


@st.composite
def _networks(draw: st.DrawFn) -> list[str]:
    """Paths of a random tree, a module before its parts."""

    def grow(prefix: str, depth: int) -> list[str]:
        paths = []
        for i in range(draw(st.integers(0 if prefix else 1, 5))):
            path = f"{prefix}.{i}" if prefix else str(i)
            paths += [path, *(grow(path, depth - 1) if depth else [])]
        return paths

    return grow("", 2)


@given(st.data())
def test_what_is_found_passes_and_nothing_of_it_can_go(data: st.DataObject) -> None:
    paths = data.draw(_networks())
    some = st.lists(st.sampled_from(paths), min_size=1, max_size=3, unique=True)
    engine = _Engine(*data.draw(st.lists(some, min_size=1, max_size=3)), together=data.draw(st.booleans()))
    suspects = data.draw(st.dictionaries(st.sampled_from(paths), st.sampled_from([0.1, 0.2, math.inf])))
    found = _find(paths, engine, suspects=suspects)
    kept = tuple(found.kept)
    assert found.builds == len(engine.asked)
    layers = [p for p in paths if not any(q.startswith(f"{p}.") for q in paths)]
    if not kept:
        if not engine.together:  # then the layers by themselves would do
            assert all(
                any(_is_in(c, layer) or _is_in(layer, c) for cs in engine.culprits for c in cs) for layer in layers
            )
        return
    assert list(kept) == sorted(kept, key=paths.index)
    assert all(engine.covers(kept, culprit) for culprit in engine.culprits)
    for module in kept:
        fewer = tuple(other for other in kept if other != module)
        assert not all(engine.covers(fewer, culprit) for culprit in engine.culprits)
        inside = [layer for layer in layers if layer != module and _is_in(layer, module)]
        for layer in inside:  # nor will it do without any layer of a module that is kept whole
            others = (other for other in inside if other != layer)
            assert not all(engine.covers((*fewer, *others), culprit) for culprit in engine.culprits)


@given(st.data())
def test_it_ends_well_where_more_fp32_is_not_always_better(data: st.DataObject) -> None:
    paths = data.draw(_networks())
    answers: dict[tuple[str, ...], bool] = {}

    def whimsical(keep: tuple[str, ...]) -> Verdict:
        answers[keep] = data.draw(st.booleans())
        return Verdict(answers[keep], "whim")

    found = _find(paths, whimsical, max_builds=40)
    assert found.builds == len(answers) <= 40
    if found.kept:
        assert answers[tuple(found.kept)]
        if found.says.endswith("without any one of these the engine fails"):
            for module in found.kept:
                fewer = tuple(other for other in found.kept if other != module)
                assert not fewer or answers[fewer] is False
