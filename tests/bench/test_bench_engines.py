"""Each family's engine as a system: it answers what visionfast answers, alone and from several threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from visionfast.bench.engine_systems import BareSystem, PromptSystem, open_visionfast
from visionfast.bench.scenarios import multi_stream
from visionfast.bench.systems import ControlSystem, SystemUnderTest
from visionfast.pipeline import Detector

pytest.importorskip("torch", reason="engines are built from PyTorch: pip install 'visionfast[build]'")
pytest.importorskip("openvino", reason="engines are built with openvino: pip install 'visionfast[openvino]'")


@pytest.fixture(scope="module")
def detector_folder(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path]) -> Path:
    return built_engine(seeded_checkpoint("detect", 3))


def rows_of(system: SystemUnderTest, encoded: bytes, threads: int) -> Any:
    rows = multi_stream(system.parallel(threads), [0] * (2 * threads), lambda number: encoded)
    assert not any(row.failed for row in rows)
    return rows


def test_a_detector(detector_folder: Path, photographs: list[Path]) -> None:
    encoded = photographs[0].read_bytes()
    system = open_visionfast(detector_folder)
    with Detector.open(detector_folder) as detector:
        (expected,) = detector(encoded)
    answer = system.call(encoded)
    assert (answer.found.xyxy == expected.xyxy).all()
    assert list(answer.stage_ns) == ["decode", "preprocess", "engine", "postprocess"]
    for threads in (1, 2, 5):  # fewer sessions than callers: some wait for a turn
        rows = rows_of(system, encoded, threads)
        assert all(("turn" in row.stage_ns) == (threads == 5) for row in rows)
    details = system.system.details
    assert details["task"] == "detect"
    assert details["certificate"] == "passed"
    assert len(details["weights_sha256"]) == len(details["engine_sha256"]) == 64
    assert not system.caches
    system.close()
    system.close()


def test_a_bare_engine(detector_folder: Path) -> None:
    system = BareSystem(detector_folder)
    answer = system.call(b"")
    assert list(answer.stage_ns) == ["engine"]
    assert answer.found["predictions"].shape[:2] == (1, 7)
    assert all(list(row.stage_ns) == ["engine"] for row in rows_of(system, b"", 2))
    assert system.system.kind == "bare"
    system.close()
    system.close()


def test_an_embedder(tmp_path: Path, photographs: list[Path]) -> None:
    from small_embedder import build_small

    from visionfast.embedder import Embedder

    folder, encoded = build_small(tmp_path / "small"), photographs[1].read_bytes()
    system = open_visionfast(folder)
    with Embedder.open(folder) as embedder:
        expected = embedder(encoded)
    answer = system.call(encoded)
    np.testing.assert_array_equal(answer.found.cls, expected.cls)
    assert answer.found.patches.shape == expected.patches.shape  # type: ignore[union-attr]
    assert set(answer.stage_ns) == {"decode", "preprocess", "engine"}
    assert len(rows_of(system, encoded, 2)) == 4
    assert len(rows_of(system, encoded, 5)) == 10
    system.close()
    bare = BareSystem(folder)
    assert bare.call(b"").found["cls"].shape == (1, 384)
    bare.close()


@pytest.mark.slow
def test_a_prompt_segmenter(
    sam_checkpoint: Callable[[str], Path], built_engine: Callable[..., Path], photographs: list[Path]
) -> None:
    from visionfast.bench.inputs import distinct

    folder = built_engine(sam_checkpoint("mobile_sam"), images=(photographs[1],))
    encoded = photographs[1].read_bytes()
    system = open_visionfast(folder)
    assert isinstance(system, PromptSystem)
    assert system.caches
    first = system.call(encoded)
    assert len(first.found) == 1
    assert {"hash", "decode", "preprocess", "encoder", "decoder", "postprocess"} == set(first.stage_ns)
    assert "encoder" in system.call(distinct(encoded, 1)).stage_ns  # other bytes: an image that was never seen
    repeated = system.repeated()
    assert not repeated.caches
    assert repeated.system.key != system.system.key
    again = repeated.call(encoded)
    assert "encoder" not in again.stage_ns
    assert (again.found.score == first.found.score).all()
    repeated.close()  # it is the other's
    assert len(rows_of(repeated, encoded, 2)) == 4
    system.close()
    bare = BareSystem(folder)
    answer = bare.call(b"")
    assert list(answer.stage_ns) == ["encoder", "decoder"]
    bare.close()


def test_the_control_does_the_same_every_time() -> None:
    one, other = ControlSystem(), ControlSystem()
    assert (one.call(b"").found == other.call(b"anything").found).all()
