"""OpenVINO on the CPU: what it is fed, what it hands out, and engines that are damaged or from elsewhere."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from visionfast import artifacts, machine
from visionfast.backends.openvino import OpenVinoBackend, OpenVinoRunner
from visionfast.errors import BackendError, BackendUnavailableError, IncompatibleEngineError, OptionError, ShapeError
from visionfast.loading import load_streams
from visionfast.types import EngineManifest, TensorSpec

openvino = pytest.importorskip("openvino", reason="openvino is not installed: pip install 'visionfast[openvino]'")


def _load(folder: Path, *, threads: int | None = 1, manifest: EngineManifest | None = None) -> OpenVinoRunner:
    manifest = manifest or artifacts.read_manifest(folder)
    return OpenVinoBackend().load(folder, manifest, manifest.spec.graphs[0], threads=threads)


def _images(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (1, 320, 320, 3), np.uint8)


def test_feeds_are_checked(copied_engine: Path) -> None:
    with _load(copied_engine) as runner:
        assert runner.inputs == (TensorSpec("images", (1, 320, 320, 3), "uint8", "NHWC"),)
        assert runner.outputs == (TensorSpec("predictions", (1, 7, 2100), "float32"),)
        for wrong in (_images(0)[0], _images(0).astype(np.float32), _images(0).transpose(0, 3, 1, 2)):
            with pytest.raises(ShapeError, match=r"images: expected \(1, 320, 320, 3\) uint8, got"):
                runner.infer({"images": wrong})
        with pytest.raises(ShapeError, match="expected the inputs images, got x"):
            runner.infer({"x": _images(0)})


def test_copies_are_the_callers(copied_engine: Path) -> None:
    with _load(copied_engine) as runner:
        own = runner.infer({"images": _images(0)})["predictions"]
        lent = runner.infer({"images": _images(0)}, copy=False)["predictions"]
        before = own.copy()
        np.testing.assert_array_equal(lent, before)
        other = runner.infer({"images": _images(1)})["predictions"]
        assert not np.array_equal(other, before)
        np.testing.assert_array_equal(own, before)
    # also after the engine is gone
    np.testing.assert_array_equal(own, before)


def test_inputs_that_are_not_contiguous_or_read_only(copied_engine: Path) -> None:
    images = _images(0)
    frozen = images.copy()
    frozen.flags.writeable = False
    strided = np.zeros((1, 320, 640, 3), np.uint8)[:, :, ::2]
    strided[...] = images
    with _load(copied_engine) as runner:
        expected = runner.infer({"images": images})["predictions"]
        for feed in (frozen, strided):
            np.testing.assert_array_equal(runner.infer({"images": feed})["predictions"], expected)


def test_the_cache_is_keyed_by_what_openvino_forgets(copied_engine: Path) -> None:
    (copied_engine / "cache" / "an older engine").mkdir(parents=True)
    _load(copied_engine, threads=1).close()
    _load(copied_engine, threads=2).close()
    (cache,) = (copied_engine / "cache").iterdir()  # of this engine's files only
    version = openvino.__version__.split("-")[0]
    for threads in (1, 2):
        bound = "" if threads >= machine.usable_cpus() else "-free"
        assert list((cache / f"{version}-fp32-latency-{threads}t{bound}").glob("*.blob"))


@pytest.mark.parametrize(("threads", "streams"), [(1, 1), (2, 2)])
def test_threads_that_share_the_processors_are_bound_to_none(copied_engine: Path, threads: int, streams: int) -> None:
    """Two processes with an engine each would compute on one processor, and the other stand idle."""
    if threads == streams and machine.usable_cpus() < 2:
        pytest.skip("one processor: there is nothing to share")
    with load_streams(copied_engine, artifacts.read_manifest(copied_engine), threads=threads, streams=streams)[
        0
    ] as runner:
        assert isinstance(runner, OpenVinoRunner)
        assert runner._config["ENABLE_CPU_PINNING"] is False
        assert runner._requests[()].get_compiled_model().get_property("ENABLE_CPU_PINNING") is False


@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_what_engine_json_says_is_held_against_the_engine(copied_engine: Path, what: str) -> None:
    manifest = artifacts.read_manifest(copied_engine)
    (graph,) = manifest.spec.graphs
    (tensor,) = getattr(graph, what)
    claimed = dataclasses.replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] * 10**9))
    graph = dataclasses.replace(graph, **{what: (claimed,)})
    with pytest.raises(IncompatibleEngineError, match=f"expected {tensor.name} .*000000000.*as engine.json says, got"):
        OpenVinoBackend().load(copied_engine, manifest, graph, threads=1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_after_a_fork_it_says_so(copied_engine: Path) -> None:
    """Its threads stay behind in the parent: the child would wait for them for ever."""
    with _load(copied_engine, threads=2) as runner:
        child = os.fork()
        if child == 0:
            try:
                runner.infer({"images": _images(0)})
            except BackendError as error:
                os._exit(7 if "opened before a fork; open it in the child" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        runner.infer({"images": _images(0)})


@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
def test_a_damaged_cache_does_no_harm(copied_engine: Path, damage: str) -> None:
    with _load(copied_engine) as runner:
        expected = runner.infer({"images": _images(0)})["predictions"]
    blobs = sorted((copied_engine / "cache").rglob("*.blob"))
    assert blobs
    for blob in blobs:
        whole = blob.read_bytes()
        noise = np.random.default_rng(0).bytes(len(whole))
        blob.write_bytes({"cut": whole[: len(whole) // 2], "noise": noise, "empty": b""}[damage])
    with _load(copied_engine) as runner:
        np.testing.assert_array_equal(runner.infer({"images": _images(0)})["predictions"], expected)


def test_a_folder_that_cannot_be_written_still_loads(copied_engine: Path) -> None:
    # A file where the cache should be: unlike permissions, that stops root too.
    for path in sorted((copied_engine / "cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (copied_engine / "cache").rmdir()
    (copied_engine / "cache").touch()
    copied_engine.chmod(0o555)
    try:
        with _load(copied_engine) as runner:
            assert np.isfinite(runner.infer({"images": _images(0)})["predictions"]).all()
    finally:
        copied_engine.chmod(0o755)
    assert (copied_engine / "cache").is_file()


def test_engines_from_elsewhere_are_refused(copied_engine: Path) -> None:
    manifest = artifacts.read_manifest(copied_engine)
    with pytest.raises(IncompatibleEngineError, match=r"built with 9999\.1\.0.*install openvino>=9999\.1\.0"):
        _load(copied_engine, manifest=dataclasses.replace(manifest, runtime_version="9999.1.0"))
    _load(copied_engine, manifest=dataclasses.replace(manifest, runtime_version="2023.0.0")).close()
    with pytest.raises(IncompatibleEngineError, match="device sm89: expected an engine for the cpu"):
        _load(copied_engine, manifest=dataclasses.replace(manifest, device="sm89"))
    able = OpenVinoBackend().availability().precisions
    for precision in {"fp16", "bf16"} - set(able):
        with pytest.raises(IncompatibleEngineError, match=f"precision {precision}: this CPU computes fp32"):
            _load(copied_engine, manifest=dataclasses.replace(manifest, precision=precision))


@pytest.mark.parametrize(("suffix", "keep"), [("xml", 0), ("xml", 400), ("bin", 0), ("bin", 1000)])
def test_damaged_engine_files(copied_engine: Path, suffix: str, keep: int) -> None:
    for blob in (copied_engine / "cache").rglob("*.blob"):
        blob.unlink()
    file = copied_engine / f"model.{suffix}"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BackendError, match="build it again") as caught:
        _load(copied_engine)
    assert "\n" not in str(caught.value)


def test_weights_that_are_lost_after_the_cache_was_made(copied_engine: Path) -> None:
    """The blob has its own copy of the weights: a cut .bin beside it is refused or does no harm, never half read."""
    with _load(copied_engine) as runner:
        expected = runner.infer({"images": _images(0)})["predictions"]
    file = copied_engine / "model.bin"
    file.write_bytes(file.read_bytes()[:1000])
    try:
        runner = _load(copied_engine)
    except BackendError:
        return
    with runner:
        np.testing.assert_array_equal(runner.infer({"images": _images(0)})["predictions"], expected)


def test_no_gpu() -> None:
    with pytest.raises(OptionError, match="--gpu sm89: backend openvino compiles for the CPU; leave --gpu out"):
        OpenVinoBackend().resolve_device("sm89")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, copied_engine: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "openvino", None)
    state = OpenVinoBackend().availability()
    assert not state.can_build
    assert not state.can_run
    assert "pip install 'visionfast[openvino]'" in state.reason
    with pytest.raises(BackendUnavailableError, match=r"pip install 'visionfast\[openvino\]'"):
        _load(copied_engine)


def test_threads_are_not_more_than_may_be_used(copied_engine: Path) -> None:
    with _load(copied_engine, threads=None) as runner:
        compiled = runner._requests[()].get_compiled_model()
        assert 1 <= compiled.get_property("INFERENCE_NUM_THREADS") <= (os.cpu_count() or 1)
        assert compiled.get_property("INFERENCE_PRECISION_HINT") == openvino.Type.f32


_CLOSED_ELSEWHERE = """
import signal, sys, threading
from visionfast.pipeline import open_engine

detectors = [open_engine(sys.argv[1], threads=1)]  # the main thread loads the CPU plugin
closing = threading.Thread(target=lambda: detectors.pop().close())
closing.start()
closing.join()
signal.signal(signal.SIGINT, lambda number, frame: print("handled"))
signal.raise_signal(signal.SIGINT)
"""


def test_a_signal_after_an_engine_was_closed_by_another_thread(built_engine: Any, seeded_checkpoint: Any) -> None:
    """OpenVINO's plugin, unloaded by another thread, leaves the main one without the stack that its signals use."""
    folder = built_engine(seeded_checkpoint("detect", 3), backend="openvino")
    command = [sys.executable, "-X", "faulthandler", "-c", _CLOSED_ELSEWHERE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
