"""What grows is found out, and what only goes up and down is not."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from flatness import Series, read_process, shared_memory_bytes, trend

MIB = 2**20


def a_series(
    growth: float, noise: float, *, seconds: int = 120, steps: int = 1, seed: int = 0, warm: float = 0.0
) -> Series:
    """A figure around 300 MiB with noise whose neighbours are alike; each life of it at another level."""
    made = np.random.default_rng(seed)
    wander = 0.0
    series = Series()
    for second in range(seconds):
        life = second * steps // seconds
        wander = 0.8 * wander + made.normal(0, noise * 0.6)
        level = 300 * MIB + 20 * MIB * life + warm * min(1.0, second % (seconds // steps) / 20)
        series.add(float(second), level + growth * second / seconds + wander, life)
    return series


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_noise_is_flat_and_a_leak_is_none(steps: int, seed: int) -> None:
    flat = trend(a_series(0, MIB, steps=steps, seed=seed), warm_up_s=0)
    leak = trend(a_series(40 * MIB, MIB, steps=steps, seed=seed), warm_up_s=0)
    assert flat is not None
    assert leak is not None
    assert flat.verdict(8 * MIB) == "flat"
    assert leak.verdict(8 * MIB) == "grows"
    assert leak.low < 40 * MIB < leak.high
    assert leak.low < leak.growth < leak.high


def test_what_grows_while_it_warms_up_is_left_out_of_every_life() -> None:
    series = a_series(0, MIB / 4, steps=2, warm=50 * MIB)
    with_it, without = trend(series, warm_up_s=0), trend(series, warm_up_s=25)
    assert with_it is not None
    assert without is not None
    assert with_it.verdict(8 * MIB) != "flat"
    assert without.verdict(8 * MIB) == "flat"


def test_a_level_that_differs_from_life_to_life_is_no_growth_but_within_one_life_it_is() -> None:
    stepped = a_series(0, 0.0, steps=3)
    one_life = Series(stepped.seconds, stepped.value, [0] * len(stepped.value))
    flat, grown = trend(stepped, warm_up_s=0), trend(one_life, warm_up_s=0)
    assert flat is not None
    assert grown is not None
    assert abs(flat.growth) < 1
    assert grown.verdict(8 * MIB) == "grows"


def test_too_little_says_nothing() -> None:
    assert trend(Series(), warm_up_s=0) is None
    assert trend(a_series(0, MIB, seconds=20), warm_up_s=0) is None
    noisy = trend(a_series(0, 100 * MIB, seconds=40), warm_up_s=0)
    assert noisy is not None
    assert noisy.verdict(MIB) == "undecided"


def test_a_constant_is_flat() -> None:
    series = Series()
    for second in range(60):
        series.add(float(second), 7.0)
    seen = trend(series, warm_up_s=5)
    assert seen is not None
    assert (seen.growth, seen.low, seen.high, seen.verdict(0)) == (0, 0, 0, "flat")


def test_figures_are_of_the_process(tmp_path: Path) -> None:
    before = read_process(os.getpid())
    # Mapped: what an allocator gives may be memory that this process has already.
    mapped = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = np.frombuffer(mapped, np.uint8)
    held[:] = 1
    files = [(tmp_path / str(i)).open("w") for i in range(5)]
    after = read_process(os.getpid())
    for file in files:
        file.close()
    assert before is not None
    assert after is not None
    assert held.all()
    assert after["rss_bytes"] - before["rss_bytes"] > 32 * MIB
    assert after["descriptors"] - before["descriptors"] >= 5
    assert before["threads"] >= 1
    assert read_process(2**22 + 1) is None


def test_shared_memory_is_that_of_the_prefix() -> None:
    region = Path("/dev/shm") / f"visionfast-flatness-{os.getpid()}-a"
    try:
        region.write_bytes(bytes(MIB))
        assert shared_memory_bytes(f"visionfast-flatness-{os.getpid()}-") >= MIB
        assert shared_memory_bytes(f"visionfast-flatness-{os.getpid()}-b") == 0
    finally:
        region.unlink(missing_ok=True)
