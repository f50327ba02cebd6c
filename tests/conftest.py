"""Where the tests' data stand, and what every test may ask for."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from visionfast import machine

# Without a CUDA device, Triton's kernels run in its interpreter; it is asked for before a kernel is first imported.
if not machine.gpus():
    os.environ.setdefault("TRITON_INTERPRET", "1")


_LONG = (
    "test_soak.py",
    "test_prompt_segmenter.py",
    "test_dino_build.py",
    "test_sam_official.py",
    "test_server.py",
    "test_islands.py",
    "test_postprocess.py",
    "test_preprocess_kernels.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first: each is one worker's, and the other would wait for it at the end."""
    place = {name: i for i, name in enumerate(_LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(_LONG)))


class _AtOnce:
    """Says which test failed when it fails: a run that is cut off later prints no summary."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.write_line(f" {report.nodeid}")


@pytest.hookimpl(trylast=True)  # the reporter comes with a hook of this name
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):  # xdist's workers print nothing themselves
        config.pluginmanager.register(_AtOnce(reporter))


class _SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Signals work as in a fresh process when a test begins, and Ctrl-C is left as it was found.

    OpenVINO's plugin for the CPU gives the thread that makes it a stack for signals, and takes it back in the thread
    that unmakes it, which for a `Core` in a reference cycle is any: the next signal of the first thread then ends the
    process by SIGSEGV, with nothing printed. What pytest is started from may have Ctrl-C ignored: shells do so.
    """
    disabled = 2  # SS_DISABLE: signals use the thread's own stack
    ctypes.CDLL(None).sigaltstack(ctypes.byref(_SignalStack(None, disabled, 0)), None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "this test left Ctrl-C changed"


def _shared_data() -> Path | None:
    """Real weights and pictures that are too large or not ours to ship; `VISIONFAST_TEST_DATA` names the folder."""
    named = os.environ.get("VISIONFAST_TEST_DATA")
    candidate = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    return candidate if candidate.is_dir() else None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = _shared_data()
    if folder is None:
        pytest.skip("real weights and pictures are not here: set VISIONFAST_TEST_DATA to the folder that holds them")
    return folder


@pytest.fixture(scope="session")
def photographs() -> list[Path]:
    """Two photographs that install with the build extra: bus.jpg 810×1080, zidane.jpg 1280×720."""
    import importlib.util

    found = importlib.util.find_spec("ultralytics")
    if found is None or found.origin is None:
        pytest.skip("the two photographs come with ultralytics, which is not installed")
    assets = Path(found.origin).parent / "assets"
    return [assets / "bus.jpg", assets / "zidane.jpg"]


@pytest.fixture(scope="session")
def reduced_photographs(
    photographs: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[Path]]:
    """`reduced_photographs(factor)`: the photographs, so much smaller, that they are decoded in no time."""

    @functools.cache
    def make(factor: int) -> list[Path]:
        from PIL import Image

        folder = tmp_path_factory.mktemp("pictures")
        made = []
        for path in photographs:
            made.append(folder / f"{path.stem}.png")
            with Image.open(path) as image:
                image.reduce(factor).save(made[-1])
        return made

    return make


# ---- checkpoints and engines, made once a session --------------------------------------------------------


@pytest.fixture(scope="session")
def seeded_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`seeded_checkpoint(task, nc)`: an untrained YOLOv8n of that task, as ultralytics saves a checkpoint.

    Its weights are seeded, and its head is tuned so that every score is near 0.12: it finds nothing at the usual
    threshold, and its raw scores are still large enough to differ.
    """
    pytest.importorskip("ultralytics", reason="checkpoints are made with ultralytics: pip install 'visionfast[build]'")
    folder = tmp_path_factory.mktemp("weights")

    def make(task: str = "detect", nc: int = 3) -> Path:
        return made(task, nc)  # however it was asked for: a file that is written again has another date in it

    @functools.cache
    def made(task: str, nc: int) -> Path:
        import torch
        from ultralytics import YOLO

        torch.manual_seed(0)
        yolo = YOLO("yolov8n-seg.yaml" if task == "segment" else "yolov8n.yaml", verbose=False)
        model = type(yolo.model)(yolo.model.yaml["yaml_file"], nc=nc, verbose=False)
        with torch.no_grad():
            for branch in model.model[-1].cv3:
                branch[-1].bias.fill_(-2.0)
        model.names = {i: f"kind {i}" for i in range(nc)}
        model.task = task
        model.args = {"imgsz": 320, "task": task}
        yolo.model = model
        path = folder / f"yolov8n-{task}-{nc}.pt"
        yolo.save(path)
        return path

    return make


@pytest.fixture(scope="session")
def sam_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`sam_checkpoint(kind)`: seeded weights in the published layout of `mobile_sam`, `sam_vit_b` (375 MB) or another
    ViT, or `sam2.1_hiera_` / `sam2_hiera_` `tiny`, `small`, `base_plus`, `large` (see `tests/seeded_sam.py`).
    """
    pytest.importorskip("segment_anything", reason="SAM needs segment-anything: pip install 'visionfast[build]'")
    pytest.importorskip("ultralytics", reason="checkpoints are made with ultralytics: pip install 'visionfast[build]'")
    folder = tmp_path_factory.mktemp("sam")

    @functools.cache
    def make(kind: str) -> Path:
        from seeded_sam import save_checkpoint

        suffix = "pth" if kind.startswith("sam_") else "pt"
        return save_checkpoint(kind, folder / f"{kind}.{suffix}")

    return make


@pytest.fixture(scope="session")
def dino_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`dino_checkpoint(kind, seed=0)`: seeded weights in Meta's layout of `dinov2_vits14`, `dinov3_vits16` (88 MB each)
    or another size (see `tests/seeded_dino.py`).
    """
    pytest.importorskip("torch", reason="checkpoints are made with torch: pip install 'visionfast[build]'")
    folder = tmp_path_factory.mktemp("dino")

    @functools.cache
    def make(kind: str, seed: int = 0) -> Path:
        from seeded_dino import save_checkpoint

        return save_checkpoint(kind, folder / f"{kind}{f'-{seed}' if seed else ''}.pth", seed)

    return make


@pytest.fixture(scope="session")
def people_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, trained YOLOv8s: from models/ where it was fetched, else fetched now."""
    from visionfast import artifacts
    from visionfast.errors import VisionfastError
    from visionfast.fetch import fetch

    for root in (artifacts.models_home(), Path(__file__).parents[1] / "models"):
        if found := sorted(root.glob("yolov8s-people/*.pt")):
            return found[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VISIONFAST_HOME", str(tmp_path_factory.mktemp("fetched")))
        try:
            return fetch("yolov8s-people")
        except VisionfastError as error:
            pytest.skip(f"the trained checkpoint is not in models/ and cannot be fetched: {error}")


@pytest.fixture
def engine_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `VISIONFAST_HOME`."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("VISIONFAST_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def built_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`built_engine(checkpoint, backend="openvino", **options)`: an engine's folder, built once a session.

    It is shared: a test that changes it takes `copied_engine`.
    """
    pytest.importorskip("openvino", reason="engines are built with openvino: pip install 'visionfast[openvino]'")
    pytest.importorskip("onnx", reason="engines are built from ONNX: pip install 'visionfast[build]'")
    home = tmp_path_factory.mktemp("engines")

    @functools.cache
    def make(checkpoint: Path, **options: Any) -> Path:
        from visionfast.build import build

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VISIONFAST_HOME", str(home))
            return build(checkpoint, **{"backend": "openvino"} | options)[0]

    return make


@pytest.fixture
def copied_engine(built_engine: Callable[..., Path], seeded_checkpoint: Callable[..., Path], engine_home: Path) -> Path:
    """A small engine's folder of the test's own, under `engine_home`."""
    source = built_engine(seeded_checkpoint("detect", 3))
    target = engine_home / "engines" / "small" / source.name
    shutil.copytree(source, target)
    return target
