"""`Embedder` on real, small engines: the vectors are PyTorch's, whatever is beside them and whoever computes them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from small_embedder import GRID, SIZE, WIDTH, build_small, pictures, small_network, small_spec

import visionfast as vf
from visionfast import artifacts, machine
from visionfast.backends.fake import FakeRunner
from visionfast.embedder import Embedder
from visionfast.errors import (
    BackendError,
    ImageError,
    ImageNotFoundError,
    ImageTooLargeError,
    ManifestError,
    OptionError,
)
from visionfast.loading import load_streams, throughput_streams
from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.reference import normalise
from visionfast.results import Embeddings

pytest.importorskip("openvino", reason="engines are built with openvino: pip install 'visionfast[openvino]'")
pytest.importorskip("onnx", reason="engines are built from ONNX: pip install 'visionfast[build]'")

ENGINES = [("openvino", 1), ("openvino", 3), ("torch", 3)]
Engines = Callable[[str, int], Path]


@pytest.fixture(scope="session")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """`small_engine(backend, batch)`: an engine's folder; a test that changes it copies it."""
    home = tmp_path_factory.mktemp("embedders")

    @functools.cache
    def make(backend: str, batch: int) -> Path:
        return build_small(home / f"{backend}-b{batch}", backend, batch)

    return make


@functools.cache
def expected(seed: int, count: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Eager PyTorch, image by image."""
    spec = small_spec().preprocess
    preprocessor, canvas = CropPreprocessor(spec), np.empty((*SIZE, 3), np.uint8)
    cls, patches = [], []
    for picture in pictures(count, seed):
        preprocessor.write(picture, canvas)
        with torch.inference_mode():
            one, dense = small_network()(torch.from_numpy(normalise(canvas, spec))[None])
        cls.append(one[0].numpy())
        patches.append(dense[0].numpy())
    return np.stack(cls), np.stack(patches)


def same(got: Embeddings, other: Embeddings) -> bool:
    """To the bit."""
    dense = got.patches is other.patches is None or np.array_equal(got.patches, other.patches, equal_nan=True)
    return np.array_equal(got.cls, other.cls, equal_nan=True) and dense and got.placed == other.placed


# ---- the vectors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "batch"), ENGINES)
@pytest.mark.parametrize("streams", [1, 2])
def test_vectors_are_those_of_eager_pytorch(small_engine: Engines, backend: str, batch: int, streams: int) -> None:
    cls, patches = expected(0, 8)
    with vf.Embedder.open(small_engine(backend, batch), threads=2, streams=streams) as embedder:
        assert (embedder.dim, embedder.grid_hw, embedder.session.streams) == (WIDTH, GRID, streams)
        found = embedder(pictures(8))
        assert found.patches is not None
        np.testing.assert_allclose(found.cls, cls, atol=2e-5)
        np.testing.assert_allclose(found.patches, patches, atol=2e-5)
        assert [placed.image_hw for placed in found.placed if placed] == [p.shape[:2] for p in pictures(8)]
        assert all({"decode", "preprocess", "engine"} == stages.keys() for stages in found.stage_ns)
        unit = embedder(pictures(8), normalise=True, patches=False)
        assert unit.patches is None
        np.testing.assert_allclose(unit.cls, cls / np.linalg.norm(cls, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(("backend", "batch"), ENGINES)
def test_vectors_depend_on_nothing_but_the_image(small_engine: Engines, backend: str, batch: int) -> None:
    """Not on the slot, the neighbours, the stream or the run: an interrupted job goes on as if it had not been."""
    images = pictures(7)
    for streams in (1, 2):
        runs = []
        for _ in range(2):
            with vf.Embedder.open(small_engine(backend, batch), threads=2, streams=streams) as embedder:
                runs.append(embedder(images))
                alone = [embedder(image) for image in images]
                shifted = embedder([*images[3:], *images[:3]])
                streamed = [answer for _, answer in embedder.stream(images, load=lambda image: image, patches=True)]
        assert same(runs[0], runs[1])
        for i, image in enumerate(images):
            for other in (alone[i].cls[0], shifted.cls[i - 3], streamed[i].cls):  # type: ignore[union-attr]
                assert np.array_equal(other, runs[0].cls[i]), f"image {i} {image.shape}, {streams} streams"
            for dense in (alone[i].patches[0], shifted.patches[i - 3], streamed[i].patches):  # type: ignore[index, union-attr]
                assert np.array_equal(dense, runs[0].patches[i])  # type: ignore[index]


def test_several_threads(small_engine: Engines) -> None:
    images = pictures(6)
    with vf.Embedder.open(small_engine("openvino", 3), threads=2, streams=2) as embedder:
        alone = embedder(images)
        found: dict[int, Embeddings] = {}

        def ask(thread: int) -> None:
            for _ in range(5):
                found[thread] = embedder([*images[thread:], *images[:thread]])

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for n, got in found.items():
        assert np.array_equal(np.roll(got.cls, n, 0), alone.cls)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_inputs_and_outputs_of_every_kind(dtype: str, layout: str) -> None:
    spec = small_spec(2, dtype=dtype, outputs=dtype)
    if layout == "NHWC":
        image = dataclasses.replace(spec.graphs[0].inputs[0], shape=(2, *SIZE, 3), dtype="uint8", layout="NHWC")
        spec = dataclasses.replace(spec, graphs=(dataclasses.replace(spec.graphs[0], inputs=(image,)),))
    fed: list[npt.NDArray[Any]] = []

    def answer(feeds: Any) -> Any:
        fed.append(feeds["images"].copy())
        return {"cls": np.arange(2)[:, None] + 0.1, "patches": np.arange(2)[:, None, None, None] + 0.2}

    images = pictures(2)
    with Embedder(spec, [FakeRunner(spec.graphs[0], answer)]) as embedder:
        found = embedder(images)
        canvas = np.empty((*SIZE, 3), np.uint8)
        for slot, picture in enumerate(images):
            CropPreprocessor(spec.preprocess).write(picture, canvas)
            want = canvas if layout == "NHWC" else normalise(canvas, spec.preprocess, np.dtype(dtype))
            np.testing.assert_array_equal(fed[0][slot], want)
    assert found.cls.dtype == np.float32
    assert found.patches is not None
    assert found.patches.dtype == np.float32
    assert np.array_equal(found.cls[:, 0], np.array([0.1, 1.1], dtype))
    assert np.array_equal(found.patches[:, 0, 0, 0], np.array([0.2, 1.2], dtype))


# ---- calling ----------------------------------------------------------------------------------------------


def test_one_image_none_and_paths(small_engine: Engines, photographs: list[Path]) -> None:
    with vf.open(small_engine("openvino", 3)) as embedder:
        assert isinstance(embedder, vf.Embedder)
        empty = embedder([])
        assert (empty.cls.shape, len(empty), empty.errors) == ((0, WIDTH), 0, {})
        assert empty.patches is not None
        assert empty.patches.shape == (0, *GRID, WIDTH)
        assert empty.normalised().cls.shape == (0, WIDTH)
        path = photographs[0]
        one = embedder(str(path))
        for source in (
            path,
            [path],
            (path,),
            path.read_bytes(),
            memoryview(path.read_bytes()),
            [bytearray(path.read_bytes())],
        ):
            assert same(embedder(source), one)
        grey = embedder(np.zeros((9, 9), np.uint8))
        assert same(grey, embedder([np.zeros((9, 9, 3), np.uint8)]))


@pytest.mark.parametrize("count", [2, 5])
def test_a_bad_image_harms_no_other(small_engine: Engines, tmp_path: Path, count: int) -> None:
    images: list[Any] = list(pictures(count))
    bad = [*images[:1], b"nothing", *images[1:], tmp_path / "gone.jpg", np.zeros((3, 3, 2), np.uint8)]
    with vf.Embedder.open(small_engine("openvino", 3)) as embedder:
        alone, found = embedder(images), embedder(bad, on_error="return")
        good = [i for i in range(len(bad)) if i not in found.errors]
        assert sorted(found.errors) == [1, count + 1, count + 2]
        assert np.array_equal(found.cls[good], alone.cls)
        assert np.isnan(found.cls[[1, count + 1, count + 2]]).all()
        assert found.patches is not None
        assert np.isnan(found.patches[1]).all()
        assert found.placed[1] is None
        assert [found.errors[i].source for i in sorted(found.errors)] == [
            "image 1",
            str(tmp_path / "gone.jpg"),
            f"image {count + 2}",
        ]
        with pytest.raises(ImageError, match=r"^image 1: "):
            embedder(bad)
        with pytest.raises(ImageNotFoundError, match="gone"):
            embedder([*images, tmp_path / "gone.jpg"])
        assert same(embedder(bad[1], on_error="return").normalised(), embedder([bad[1]], on_error="return"))


def test_limits_are_held(small_engine: Engines, photographs: list[Path]) -> None:
    with vf.open(small_engine("openvino", 1), limits=DecodeLimits(max_pixels=99)) as embedder:
        with pytest.raises(ImageTooLargeError, match="bus"):
            embedder(photographs[0])
        assert len(embedder(np.zeros((9, 11, 3), np.uint8)).cls) == 1


def test_what_is_asked_wrongly(small_engine: Engines) -> None:
    folder = small_engine("openvino", 1)
    for value in (0, -1, True, "2", 2.5, 10**20):
        for name in ("threads", "streams"):
            with pytest.raises(OptionError, match=f"^{name}: expected a whole number from 1 to .*, got {value!r}$"):
                vf.Embedder.open(folder, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"^streams: expected a whole number from 1 to 2 \(one a thread\), got 3$"):
        vf.Embedder.open(folder, streams=3, threads=2)
    with pytest.raises(OptionError, match=r"^threads: expected a whole number"):
        throughput_streams(artifacts.read_manifest(folder), threads=-1)
    with pytest.raises(OptionError, match=r"^threads: expected a whole number"):
        vf.Embedder(small_spec(), [], threads=-1)
    with pytest.raises(OptionError, match="device cuda: this engine is for the cpu"):
        vf.Embedder.open(folder, device="cuda")
    with vf.Embedder.open(folder) as embedder:
        with pytest.raises(OptionError, match="on_error: expected 'raise' or 'return', got 'ignore'"):
            embedder([], on_error="ignore")  # type: ignore[arg-type]
        with pytest.raises(ImageError, match="expected a path, encoded bytes or a uint8 RGB array, got float"):
            embedder(1.5)  # type: ignore[arg-type]
        with pytest.raises(ImageError, match="image 1: expected a path"):
            embedder([np.zeros((9, 9, 3), np.uint8), None])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="a model for detect"):
        vf.Embedder(dataclasses.replace(small_spec(), task="detect"), [])


def test_an_option_that_does_not_exist(small_engine: Engines) -> None:
    with pytest.raises(OptionError, match="option 'conf': expected one of limits, streams"):
        vf.open(small_engine("openvino", 1), conf=0.5)


def test_closed(small_engine: Engines) -> None:
    embedder = vf.Embedder.open(small_engine("openvino", 1), threads=2, streams=2)
    embedder.close()
    embedder.close()
    for images in ([], pictures(1), pictures(3), b"nothing"):
        with pytest.raises(BackendError, match="closed; open the engine again"):
            embedder(images)


def test_closing_waits_for_who_is_inside_and_turns_away_who_waits() -> None:
    spec = small_spec()
    inside, go_on = threading.Event(), threading.Event()

    def answer(feeds: Any) -> Any:
        inside.set()
        assert go_on.wait(20)
        return {}

    runner = FakeRunner(spec.graphs[0], answer)
    embedder = Embedder(spec, [runner])
    came: list[Any] = []

    def ask() -> None:
        try:
            came.append(len(embedder(pictures(1))))
        except BackendError as error:
            came.append(error)

    first = threading.Thread(target=ask)
    first.start()
    assert inside.wait(20)
    second, closer = threading.Thread(target=ask), threading.Thread(target=embedder.close)
    second.start()
    second.join(0.05)
    closer.start()
    second.join(20)  # while the first is still inside
    assert [str(error) for error in came] == ["session: it is closed; open the engine again"]
    assert not runner.closed
    go_on.set()
    for thread in (first, closer):
        thread.join(20)
    assert came[1:] == [1]
    assert runner.closed


# ---- the engine -------------------------------------------------------------------------------------------


def test_streams_share_one_model(small_engine: Engines) -> None:
    folder = small_engine("openvino", 1)
    runners = load_streams(folder, artifacts.read_manifest(folder), threads=2, streams=2)
    models = [runner._requests[()].get_compiled_model() for runner in runners]  # type: ignore[union-attr]
    assert [model.get_property("NUM_STREAMS") for model in models] == [2, 2]
    assert models[0].get_property("INFERENCE_NUM_THREADS") == 2
    feeds = {"images": np.zeros((1, *SIZE, 3), np.uint8)}
    outputs = [runner.infer(feeds, copy=False)["cls"] for runner in runners]  # type: ignore[union-attr]
    assert np.array_equal(*outputs)
    assert not np.shares_memory(*outputs)
    runners[0].close()
    assert np.array_equal(runners[1].infer(feeds)["cls"], outputs[1])  # type: ignore[union-attr]
    runners[1].close()


def test_the_cache_is_kept_apart_for_streams(small_engine: Engines, tmp_path: Path) -> None:
    """OpenVINO's own key forgets them: a blob of one stream would be answered for two."""
    folder = tmp_path / "engine"
    shutil.copytree(small_engine("openvino", 1), folder, ignore=shutil.ignore_patterns("cache"))
    for _ in range(2):  # compiled, then from the blob
        for streams in (1, 2):
            with vf.Embedder.open(folder, threads=2, streams=streams) as embedder:
                stream = embedder.session._streams._free[0]  # type: ignore[attr-defined]
                model = stream.runner._requests[()].get_compiled_model()
                assert model.get_property("NUM_STREAMS") == streams
    names = {path.name.partition("-fp32-")[2] for path in (folder / "cache").glob("*/*")}
    assert names == {f"latency-2t{'' if machine.usable_cpus() <= 2 else '-free'}", "throughput-2s-2t-free"}


def test_other_weights_in_the_same_network_are_another_engine(small_engine: Engines, tmp_path: Path) -> None:
    """OpenVINO's own key is the network's file, which two checkpoints of one architecture share."""
    folder = tmp_path / "engine"
    shutil.copytree(small_engine("openvino", 1), folder, ignore=shutil.ignore_patterns("cache"))
    image = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    with vf.Embedder.open(folder) as embedder:
        before = embedder([image]).cls
    weights = folder / "model.bin"
    halved = np.fromfile(weights, np.float32)
    small = (np.abs(halved) > 1e-6) & (np.abs(halved) < 0.4)  # no shape and no axis
    halved[small] *= np.float32(0.5)
    halved.tofile(weights)
    manifest = artifacts.read_manifest(folder)
    hashes = {**manifest.sha256, weights.name: artifacts.sha256_file(weights)}
    artifacts.write_manifest(folder, dataclasses.replace(manifest, sha256=hashes))
    with vf.Embedder.open(folder) as embedder:
        assert not np.allclose(embedder([image]).cls, before, rtol=0.01)
    assert len(list((folder / "cache").iterdir())) == 1  # the other one's is gone


def test_throughput_streams(small_engine: Engines) -> None:
    manifest = artifacts.read_manifest(small_engine("openvino", 1))
    assert throughput_streams(manifest) == machine.usable_cpus()
    assert throughput_streams(manifest, threads=3) == 3
    assert throughput_streams(dataclasses.replace(manifest, device="sm89")) == 1


@pytest.mark.parametrize(
    ("tensor", "changed"),
    [
        ("images", {"shape": (1, 56, 56, 3)}),
        ("images", {"dtype": "float32"}),
        ("cls", {"shape": (2, WIDTH)}),
        ("cls", {"name": "vector"}),
        ("patches", {"shape": (1, *GRID, WIDTH - 1)}),
        ("patches", {"shape": (1, 12, WIDTH)}),
        ("patches", {"shape": (1, 4, 4, WIDTH)}),
    ],
)
def test_an_engine_that_does_not_fit_its_task(
    small_engine: Engines, tmp_path: Path, tensor: str, changed: dict[str, Any]
) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(small_engine("openvino", 1), folder)
    manifest = artifacts.read_manifest(folder)
    (graph,) = manifest.spec.graphs
    inputs, outputs = (
        tuple(dataclasses.replace(t, **changed) if t.name == tensor else t for t in tensors)
        for tensors in (graph.inputs, graph.outputs)
    )
    graph = dataclasses.replace(graph, inputs=inputs, outputs=outputs)
    spec = dataclasses.replace(manifest.spec, graphs=(graph,))
    artifacts.write_manifest(folder, dataclasses.replace(manifest, spec=spec))
    with pytest.raises(ManifestError, match=r"engine\.json"):
        vf.open(folder)


def test_the_public_signature() -> None:
    assert list(inspect.signature(vf.Embedder.stream).parameters) == ["self", "items", "load", "patches", "prefetch"]


def test_a_keyword_that_is_spelled_another_way(small_engine: Engines) -> None:
    options: dict[str, Any] = {"normalize": True}
    with (
        Embedder.open(small_engine("openvino", 1)) as embedder,
        pytest.raises(TypeError, match="unexpected keyword argument 'normalize'; expected patches, normalise or"),
    ):
        embedder(pictures(1), **options)
