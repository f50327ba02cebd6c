"""The wire of embedders: what goes in comes out to the bit, and what nobody packed is a typed error."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from test_wire import image_errors, some

from visionfast.errors import ImageError, OptionError, ServerError
from visionfast.preprocess.antialias import geometry
from visionfast.serving.options import checked_options, deployed_options, options_of_request
from visionfast.serving.wire import inputs_of, outputs_of, stages_of
from visionfast.serving.wire.vectors import pack_vectors, unpack_vectors
from visionfast.sessions.embeddings import Embedded
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, TensorSpec

PREPROCESS = PreprocessSpec((14, 28), "centre-crop", "bicubic-antialias", 0, cover_hw=(16, 32))
SPEC = ModelSpec(
    "small",
    "dino",
    "small",
    "embed",
    (
        GraphSpec(
            "model",
            (TensorSpec("images", (1, 14, 28, 3), "uint8", "NHWC"),),
            (TensorSpec("cls", (1, 3), "float16"), TensorSpec("patches", (1, 1, 2, 3), "float16")),
        ),
    ),
    PREPROCESS,
    (),
    (),
)


@st.composite
def vectors(draw: st.DrawFn) -> Embedded:
    image_hw = draw(st.tuples(st.integers(1, 3000), st.integers(1, 3000)))
    stages = draw(st.sets(st.sampled_from(stages_of("embed"))))
    return Embedded(
        draw(some(3)),
        draw(some(1, (2, 3))),
        geometry(image_hw, PREPROCESS),
        {stage: draw(st.integers(0, 2**62)) for stage in stages},
    )


@settings(max_examples=60, deadline=None)
@given(answers=st.lists(vectors() | image_errors, min_size=1, max_size=4), patches=st.booleans())
def test_vectors_come_out_as_they_went_in(answers: list[Embedded | ImageError], patches: bool) -> None:
    packed = pack_vectors(answers, SPEC, patches=patches)
    declared = {tensor.name: tensor for tensor in outputs_of("embed")}
    assert set(declared) - set(packed) == (set() if patches else {"patches"})
    for name, array in packed.items():
        assert array.dtype.name == declared[name].dtype
        assert array.ndim == 1 + len(declared[name].dims)
        assert array.size
        assert array.flags.owndata
        array.flags.writeable = False
    for before, after in zip(answers, unpack_vectors(packed, SPEC, patches=patches), strict=True):
        if isinstance(before, ImageError):
            assert (type(after), str(after)) == (type(before), str(before))
            continue
        assert isinstance(after, Embedded)
        assert after.cls.tobytes() == before.cls.tobytes()
        assert after.cls.flags.writeable
        assert (after.patches is not None) == patches
        assert after.patches is None or before.patches is None or after.patches.tobytes() == before.patches.tobytes()
        assert (after.placed, after.stage_ns) == (before.placed, before.stage_ns)


def one() -> dict[str, npt.NDArray[Any]]:
    found = Embedded(np.ones(3, np.float32), np.ones((1, 2, 3), np.float32), geometry((9, 9), PREPROCESS))
    return pack_vectors([found], SPEC, patches=True)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("cls", np.ones((1, 4), np.float32)),
        ("cls", np.ones((1, 3), np.float64)),
        ("cls", np.ones(3, np.float32)),
        ("patches", np.ones((1, 2, 2, 3), np.float32)),
        ("patches", np.ones((2, 1, 2, 3), np.float32)),
        ("image_hw", np.array([[0, 9]], np.int32)),
        ("image_hw", np.array([[9, -9]], np.int32)),
        ("stage_ns", np.ones((1, 4), np.int64)),
        ("problem", np.full((1, 2), 255, np.uint8)),
    ],
)
def test_arrays_that_contradict_one_another_are_an_error(name: str, wrong: npt.NDArray[Any]) -> None:
    with pytest.raises(ServerError):
        unpack_vectors({**one(), name: wrong}, SPEC, patches=True)


@pytest.mark.parametrize("name", [tensor.name for tensor in outputs_of("embed")])
def test_a_missing_array_is_named(name: str) -> None:
    arrays = one()
    del arrays[name]
    with pytest.raises(ServerError, match=f"^{name}: expected it among the answers"):
        unpack_vectors(arrays, SPEC, patches=True)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float32, (5, 2, 3), elements={"allow_nan": False, "allow_infinity": False}))
def test_a_vector_is_scaled_by_itself(rows: npt.NDArray[np.float32]) -> None:
    """An image's answer does not depend on the others', to the bit."""
    from visionfast.results import unit_vectors

    together = unit_vectors(rows)
    for i, row in enumerate(rows):
        assert unit_vectors(row).tobytes() == together[i].tobytes()
        assert unit_vectors(row[1]).tobytes() == together[i, 1].tobytes()


# ---- options ------------------------------------------------------------------------------------------------------


def test_what_holds_for_a_request() -> None:
    deployed = deployed_options({"normalise": True}, SPEC)
    assert deployed == {"normalise": True}
    assert options_of_request({"patches": True}, deployed, SPEC) == {"normalise": True, "patches": True}
    assert options_of_request({"normalise": False}, deployed, SPEC) == {"normalise": False}
    assert [tensor.name for tensor in inputs_of("embed")] == ["image", "length", "options"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"patches": None}, "patches: expected true or false, got None"),
        ({"normalise": "yes"}, "normalise: expected true or false, got 'yes'"),
        ({"conf": 0.5}, "option 'conf': expected one of normalise, patches"),
    ],
)
def test_a_wrong_option_of_a_request(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        checked_options(given, SPEC)
    assert str(caught.value) == said


@pytest.mark.parametrize("name", ["conf", "patches", "image_cache_mb"])
def test_an_option_that_a_deployment_has_not(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        deployed_options({name: 1}, SPEC)
    assert str(caught.value) == f"option {name!r}: expected one of normalise for small, a model for embed"
