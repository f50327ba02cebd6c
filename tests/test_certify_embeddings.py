"""An embedder's certificate passes for its engine and fails for a wrong one: wrong in a vector, a patch, a place of the
batch, or in what is near what."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from visionfast import machine
from visionfast.agreement import EMBED_TOLERANCES, combined, compare_embeddings, compare_neighbours
from visionfast.backends.fake import FakeRunner
from visionfast.certify_embeddings import GALLERY, VIEWS, certify_embeddings, view
from visionfast.errors import CertificateError
from visionfast.families import LoadedModel
from visionfast.preprocess.limits import DecodeLimits
from visionfast.sessions.embed_host import HostEmbedSession
from visionfast.sessions.embeddings import Embedded
from visionfast.types import Certificate, GraphSpec, Letterbox

torch = pytest.importorskip("torch", reason="the reference is eager PyTorch: pip install 'visionfast[build]'")

_PLACED = Letterbox((8, 8), (8, 8), (8, 8), 0, 0, 1.0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "usable_cpus", lambda: 1)
        yield
    torch.set_num_threads(threads)


def _loaded(path: Path, *, batch: int = 1) -> LoadedModel:
    from visionfast.checkpoint import open_checkpoint
    from visionfast.families import identify

    checkpoint = open_checkpoint(path)
    model = identify(checkpoint).load(checkpoint, name="m", size_hw=(56, 84), batch=batch)
    network: Any = model.modules["model"]
    network.blocks = network.blocks[:3]  # what is tested is the certificate
    return model


@pytest.fixture
def pictures(reduced_photographs: Callable[[int], list[Path]]) -> list[Path]:
    return reduced_photographs(5)


@pytest.fixture(scope="module")
def single(dino_checkpoint: Callable[..., Path]) -> LoadedModel:
    return _loaded(dino_checkpoint("dinov2_vits14"))


@pytest.fixture(scope="module")
def batched(dino_checkpoint: Callable[..., Path]) -> LoadedModel:
    return _loaded(dino_checkpoint("dinov2_vits14"), batch=5)


Outputs = dict[str, npt.NDArray[Any]]
Change = Callable[[Outputs], object]


def _certified(
    model: LoadedModel,
    images: list[Path],
    change: Change = lambda outputs: None,
    module: Any = None,
) -> Certificate:
    """Of an "engine" that is the module itself, or another, with its outputs changed."""
    graph: GraphSpec = model.spec.graphs[0]
    network = module or model.modules[graph.name]

    def answer(feeds: Mapping[str, npt.NDArray[Any]]) -> Outputs:
        with torch.inference_mode():
            found = network(torch.from_numpy(feeds["images"]))
        outputs = {spec.name: tensor.numpy().copy() for spec, tensor in zip(graph.outputs, found, strict=True)}
        change(outputs)
        return outputs

    session = HostEmbedSession(model.spec, [FakeRunner(graph, answer)], limits=DecodeLimits())
    return certify_embeddings(model, session, images, precision="fp32")


# ---- the right engine -------------------------------------------------------------------------------------


def test_the_right_engine_passes(single: LoadedModel, pictures: list[Path]) -> None:
    certificate = _certified(single, pictures)
    assert certificate.status == "passed"
    measures = certificate.measures
    assert set(certificate.tolerances) == set(EMBED_TOLERANCES["fp32"])
    assert measures["min_cls_cosine"] == pytest.approx(1, abs=1e-12)
    assert measures["min_patch_cosine"] == pytest.approx(1, abs=1e-12)
    assert (measures["moved_neighbours"], measures["max_norm_difference"]) == (0, 0)
    assert (measures["images"], measures["views"]) == (2, 12)
    assert [entry["views"] for entry in certificate.images] == [6, 6]
    assert all(len(entry["sha256"]) == 64 for entry in certificate.images)
    assert certificate.reference == "eager FP32 PyTorch, 12 views"
    json.dumps(asdict(certificate), allow_nan=False)


def test_an_image_does_not_depend_on_the_others_in_its_batch(batched: LoadedModel, pictures: list[Path]) -> None:
    """The reference is given one at a time, the engine five; the 12 views are no multiple of five."""
    certificate = _certified(batched, pictures)
    assert certificate.status == "passed"
    assert certificate.measures["views"] == 12
    assert certificate.measures["max_norm_difference"] < 1e-5


@pytest.mark.parametrize(("count", "views"), [(1, 6), (3, 12), (5, 15), (12, 12), (13, 13)])
def test_parts_join_where_there_are_few_images(
    single: LoadedModel, pictures: list[Path], count: int, views: int
) -> None:
    certificate = _certified(single, (pictures * count)[:count])
    assert certificate.status == "passed"
    assert certificate.measures["views"] == views


def test_images_that_cannot_be_decoded_are_named(single: LoadedModel, pictures: list[Path], tmp_path: Path) -> None:
    text, cut = tmp_path / "text.jpg", tmp_path / "cut.png"
    text.write_text("no image")
    cut.write_bytes(pictures[0].read_bytes()[:9000])
    certificate = _certified(single, [text, pictures[0], cut, tmp_path / "none.jpg"])
    assert certificate.status == "passed"
    assert [entry["file"] for entry in certificate.images] == ["text.jpg", "bus.png", "cut.png", "none.jpg"]
    assert ["error" in entry for entry in certificate.images] == [True, False, True, True]
    assert (certificate.measures["images"], certificate.measures["views"]) == (1, len(VIEWS))
    for images in ([text, cut], []):
        with pytest.raises(CertificateError, match=f"none of the {len(images)} images can be decoded; give real ones"):
            _certified(single, images)


def test_an_image_of_one_pixel(single: LoadedModel, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "dot.png"
    Image.new("RGB", (1, 1), (9, 90, 200)).save(path)
    certificate = _certified(single, [path])
    assert certificate.status == "passed"
    assert certificate.measures["views"] == 6


# ---- wrong ones -------------------------------------------------------------------------------------------


def _scaled(outputs: Outputs) -> None:
    for array in outputs.values():
        array *= 1.01  # which no cosine sees


def _one_nan(outputs: Outputs) -> None:
    outputs["patches"][0, 1, 2, 3] = np.nan


def _all_nan(outputs: Outputs) -> None:
    for array in outputs.values():
        array[:] = np.nan


def _infinite(outputs: Outputs) -> None:
    outputs["cls"][0, 7] = np.inf


def _zero(outputs: Outputs) -> None:
    for array in outputs.values():
        array[:] = 0


def _next_patch(outputs: Outputs) -> None:
    outputs["patches"][:] = np.roll(outputs["patches"], 1, axis=2)


def _columns_for_rows(outputs: Outputs) -> None:
    n, h, w, d = outputs["patches"].shape
    outputs["patches"][:] = outputs["patches"].reshape(n, w, h, d).transpose(0, 2, 1, 3)


def _mean_for_cls(outputs: Outputs) -> None:
    outputs["cls"][:] = outputs["patches"].mean((1, 2))


def _channels_reversed(outputs: Outputs) -> None:
    outputs["cls"][:] = outputs["cls"][:, ::-1].copy()


_WRONG = [
    _scaled,
    _one_nan,
    _all_nan,
    _infinite,
    _zero,
    _next_patch,
    _columns_for_rows,
    _mean_for_cls,
    _channels_reversed,
]


@pytest.mark.parametrize("change", _WRONG)
def test_a_wrong_engine_fails(single: LoadedModel, pictures: list[Path], change: Change) -> None:
    certificate = _certified(single, pictures[:1], change)
    assert certificate.status == "failed"
    json.dumps(asdict(certificate), allow_nan=False)


@pytest.mark.parametrize("place", range(5))
def test_one_place_of_the_batch_is_wrong(batched: LoadedModel, pictures: list[Path], place: int) -> None:
    def change(outputs: Outputs) -> None:
        outputs["cls"][place] *= -1

    # Six views: the second batch has one of its own.
    assert _certified(batched, pictures[:1], change).status == "failed"


def test_an_engine_that_mixes_up_its_batch_fails(batched: LoadedModel, pictures: list[Path]) -> None:
    def change(outputs: Outputs) -> None:
        for array in outputs.values():
            array[:] = array[::-1].copy()

    certificate = _certified(batched, pictures, change)
    assert certificate.status == "failed"
    assert certificate.measures["moved_neighbours"] > 10


def test_weights_of_another_seed_fail(
    single: LoadedModel, pictures: list[Path], dino_checkpoint: Callable[..., Path]
) -> None:
    other = _loaded(dino_checkpoint("dinov2_vits14", 1)).modules["model"]
    certificate = _certified(single, pictures[:1], module=other)
    assert certificate.status == "failed"
    assert certificate.measures["min_cls_cosine"] < 0.5


def _epsilon(module: Any) -> None:
    for norm in (m for m in module.modules() if isinstance(m, torch.nn.LayerNorm)):
        norm.eps = 0.01


def _one_layer_off(module: Any) -> None:
    module.blocks[1].mlp.fc1.weight *= 1.05


def _positions_off(module: Any) -> None:
    """Of the grid, one to the side: what a slip in their interpolation looks like."""
    position = module.embed.position
    module.embed.position = position.reshape(1, 4, 6, -1).roll(1, 2).reshape(position.shape)


def _no_gelu_tail(module: Any) -> None:
    module.blocks[2].mlp.forward = lambda x: module.blocks[2].mlp.fc2(
        torch.nn.functional.gelu(module.blocks[2].mlp.fc1(x), approximate="tanh") * 1.02
    )


@pytest.mark.parametrize("damage", [_epsilon, _one_layer_off, _positions_off, _no_gelu_tail])
def test_a_network_that_is_a_little_off_fails(
    single: LoadedModel, pictures: list[Path], damage: Callable[[Any], None]
) -> None:
    module = copy.deepcopy(single.modules["model"])
    damage(module)
    assert _certified(single, pictures[:1], module=module).status == "failed"


# ---- the measures -----------------------------------------------------------------------------------------


def _embedded(cls: Any, patches: Any = None) -> Embedded:
    cls = np.asarray(cls, np.float32)
    return Embedded(cls, np.asarray(patches if patches is not None else [[cls]], np.float32), _PLACED)


@pytest.mark.parametrize(
    ("expected", "got", "cosine", "norm"),
    [
        ([3, 4], [3, 4], 1, 0),
        ([3, 4], [6, 8], 1, 1),
        ([3, 4], [-3, -4], -1, 0),
        ([3, 4], [4, -3], 0, 0),
        ([0, 0], [0, 0], 1, 0),
        ([3, 4], [0, 0], -1, 1),
        ([0, 0], [3, 4], -1, None),
        ([3e30, 4e30], [3e30, 4e30], 1, 0),  # whose squares float32 does not hold
        ([3, 4], [np.nan, 4], -1, None),
        ([3, 4], [np.inf, 4], -1, None),
    ],
)
def test_compare_embeddings(expected: Any, got: Any, cosine: float, norm: float | None) -> None:
    """`None`: not finite, which is outside of any bound."""
    measures = compare_embeddings(_embedded(expected), _embedded(got))
    for name in ("min_cls_cosine", "mean_cls_cosine", "min_patch_cosine", "mean_patch_cosine"):
        assert measures[name] == pytest.approx(cosine)
    if norm is None:
        assert measures["max_norm_difference"] > 1e30
    else:
        assert measures["max_norm_difference"] == pytest.approx(norm, abs=1e-12)


def test_the_worst_patch_counts() -> None:
    patches = np.ones((2, 3, 4), np.float32)
    other = patches.copy()
    other[1, 2] = [1, 1, 1, -1]
    measures = compare_embeddings(_embedded([1, 0], patches), _embedded([1, 0], other))
    assert measures["min_patch_cosine"] == pytest.approx(0.5)
    assert measures["mean_patch_cosine"] == pytest.approx(1 - 0.5 / 6)
    assert measures["min_cls_cosine"] == 1


def test_means_are_combined_as_means() -> None:
    measured = [{"mean_x": 1.0, "min_x": 1.0, "max_x": 1.0, "x": 1.0}, {"mean_x": 2.0, "min_x": 2, "max_x": 2, "x": 2}]
    assert combined(measured) == {"images": 2, "mean_x": 1.5, "min_x": 1, "max_x": 2, "x": 3}


def _neighbours_by_definition(
    expected: npt.NDArray[np.float32], got: npt.NDArray[np.float32], slack: float
) -> list[int]:
    """Of each image: how many of the others stand before one that is nearer by more than the slack."""

    def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
        a, b = a.astype(np.float64), b.astype(np.float64)
        return float((a / np.sqrt((a * a).sum()) * (b / np.sqrt((b * b).sum()))).sum())

    moved = []
    for i in range(len(expected)):
        others = [j for j in range(len(expected)) if j != i]
        ranked = sorted(others, key=lambda j: (-cosine(got[i], got[j]), j))
        near = {j: cosine(expected[i], expected[j]) for j in others}
        moved.append(sum(any(near[k] - near[j] > slack for k in ranked[place + 1 :]) for place, j in enumerate(ranked)))
    return moved


@settings(deadline=None, max_examples=80)
@given(
    st.integers(2, 9), st.integers(1, 4), st.sampled_from([0.0, 0.01, 0.3, 2.5]), st.floats(0, 2), st.integers(0, 999)
)
def test_compare_neighbours(n: int, d: int, slack: float, noise: float, seed: int) -> None:
    # Sides away from what rounding decides: the sums here and there are in another order.
    rng = np.random.default_rng(seed)
    expected = rng.normal(size=(n, d + 1)).astype(np.float32)
    got = (expected + noise * rng.normal(size=expected.shape)).astype(np.float32)
    found = compare_neighbours(expected, got, slack=slack + 1e-9)
    assert [m["moved_neighbours"] for m in found] == _neighbours_by_definition(expected, got, slack + 1e-9)


def test_neighbours_as_near_as_the_slack_may_change_places() -> None:
    angles = np.deg2rad([0, 30, 31, 75])
    expected = np.stack([np.cos(angles), np.sin(angles)], 1)
    got = expected[[0, 2, 1, 3]]  # seen from the first and the last, two changed places: by 0.009 and 0.012
    for slack, moved in ((0.013, [0, 0, 0, 0]), (0.01, [0, 0, 0, 1]), (0.008, [1, 0, 0, 1]), (0, [1, 0, 0, 1])):
        assert [m["moved_neighbours"] for m in compare_neighbours(expected, got, slack=slack)] == moved
    tight = compare_neighbours(expected, got, slack=0)
    assert tight[0]["max_similarity_difference"] == pytest.approx(np.cos(angles[1]) - np.cos(angles[2]))


def test_neighbours_that_are_not_numbers() -> None:
    rng = np.random.default_rng(0)
    expected = rng.normal(size=(6, 4)).astype(np.float32)
    got = expected.copy()
    got[2] = np.nan
    found = compare_neighbours(expected, got, slack=0.1)
    assert all(m["max_similarity_difference"] > 1e30 for m in found)
    assert sum(m["moved_neighbours"] for m in found) > 0


@pytest.mark.parametrize("n", [0, 1])
def test_no_neighbours(n: int) -> None:
    assert compare_neighbours(np.ones((n, 3)), np.ones((n, 3)), slack=0.1) == [{}] * n


@pytest.mark.parametrize("hw", [(1, 1), (1, 5), (5, 1), (2, 2), (3, 7), (100, 101)])
def test_views(hw: tuple[int, int]) -> None:
    pixels = np.arange(hw[0] * hw[1] * 3).reshape(*hw, 3).astype(np.uint8)
    seen = np.zeros(hw, int)
    index = np.arange(hw[0] * hw[1]).reshape(*hw, 1).repeat(3, 2)
    for name in VIEWS:
        part = view(pixels, name)
        assert min(part.shape[:2]) >= 1
        assert part.flags.c_contiguous
        if name in ("top left", "top right", "bottom left", "bottom right"):
            seen.reshape(-1)[np.unique(view(index, name))] += 1
    assert seen.min() >= 1  # the quarters leave nothing out
    assert np.array_equal(view(pixels, "whole"), pixels)
    assert len(VIEWS) * 2 == GALLERY
