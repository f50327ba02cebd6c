"""A model of two graphs through a build: what one hands the other, and modules that are named with their graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from small_prompts import prompt_feeds, small_prompt_segmenter

from visionfast import artifacts
from visionfast.backends import get_backend
from visionfast.build import build
from visionfast.build_plan import Plan
from visionfast.errors import OptionError
from visionfast.export import export_onnx
from visionfast.families import LoadedModel
from visionfast.types import GraphSpec, Precision, TensorSpec

rtx = pytest.mark.skipif(
    not get_backend("tensorrt-rtx").availability().can_build,
    reason="TensorRT-RTX is not installed: pip install 'visionfast[tensorrt-rtx]'",
)


def _plan(
    backend: str = "tensorrt-rtx",
    precision: Precision = "fp16",
    keep_fp32: tuple[str, ...] = (),
    model: LoadedModel | None = None,
    device: str = "sm89",
) -> Plan:
    chosen = get_backend(backend)
    return Plan(
        backend=chosen,
        runtime_version=chosen.availability().version,
        devices=(device,),
        model=model or small_prompt_segmenter(),
        weights_sha256="0" * 64,
        precision=precision,
        keep_fp32=keep_fp32,
        images=(),
        max_builds=0,
        progress=lambda stage: None,
    )


def _dtypes(specs: tuple[TensorSpec, ...]) -> dict[str, str]:
    return {spec.name: spec.dtype for spec in specs}


@pytest.mark.parametrize(
    ("keep", "embeddings", "high_res"),
    [
        ((), "float32", "float16"),  # the first comes out of a norm, the second out of a convolution
        (("encoder.finer",), "float32", "float32"),
        (("encoder",), "float32", "float32"),
    ],
)
def test_a_graph_takes_what_the_one_before_it_gives(
    tmp_path: Path, keep: tuple[str, ...], embeddings: str, high_res: str
) -> None:
    encoder, decoder = _plan(keep_fp32=keep).export(tmp_path)
    assert _dtypes(encoder.graph.inputs) == {"images": "float16"}
    assert _dtypes(encoder.graph.outputs) == {"image_embeddings": embeddings, "high_res": high_res}
    prompts = dict.fromkeys(("points", "labels", "has_mask"), "float32")
    assert _dtypes(decoder.graph.inputs) == {"image_embeddings": embeddings, "high_res": high_res} | prompts


def test_in_fp32_everything_is(tmp_path: Path) -> None:
    for precision, backend in (("fp32", "tensorrt-rtx"), ("fp32", "openvino")):
        for item in _plan(backend, precision).export(tmp_path):  # type: ignore[arg-type]
            assert {spec.dtype for spec in (*item.graph.inputs, *item.graph.outputs)} == {"float32"}


def test_modules_are_named_with_their_graph(tmp_path: Path) -> None:
    plan = _plan(keep_fp32=("encoder.patches", "decoder.up"))
    assert plan.islands("encoder") == ("norm", "patches")
    assert plan.islands("decoder", ["decoder.weights", "encoder.qkv"]) == ("position", "norm", "up", "weights")
    encoder, decoder = plan.export(tmp_path, ["decoder.weights"])
    assert (encoder.islands, decoder.islands) == (("norm", "patches"), ("position", "norm", "up", "weights"))
    kept = {
        w.name.removeprefix("network.").rpartition(".")[0]
        for w in onnx.load(decoder.path).graph.initializer
        if w.data_type == onnx.TensorProto.FLOAT and w.name.startswith("network.")
    }
    assert {"norm", "up"} <= kept <= {"position", "norm", "up", "weights"}


def test_a_model_of_one_graph_has_no_prefix(tmp_path: Path) -> None:
    model = small_prompt_segmenter()
    alone = dataclasses.replace(model, spec=dataclasses.replace(model.spec, graphs=model.spec.graphs[:1]))
    plan = _plan(keep_fp32=("patches",), model=alone)
    assert plan.islands("encoder", ["qkv"]) == ("norm", "patches", "qkv")
    (encoder,) = plan.export(tmp_path)
    assert encoder.islands == ("norm", "patches")


@rtx
def test_a_manifest_names_them_so_too(tmp_path: Path) -> None:
    for precision, kept in (
        ("fp16", ("encoder.norm", "encoder.patches", "decoder.position", "decoder.norm", "decoder")),
        ("fp32", ()),
    ):
        keep = ("encoder.patches", "encoder.norm", "decoder") if precision == "fp16" else ()
        folder = tmp_path / precision
        folder.mkdir()
        plan = _plan(precision=precision, keep_fp32=keep)  # type: ignore[arg-type]
        manifest = plan.compile("sm89", plan.export(tmp_path), folder)
        assert manifest.keep_fp32 == kept
        assert manifest.files == {"encoder": "encoder.engine", "decoder": "decoder.engine"}
        assert set(manifest.sha256) == set(manifest.files.values())
        assert set(manifest.onnx_sha256) == {"encoder", "decoder"}
        read = artifacts.read_manifest(folder, verify=True)
        assert read == manifest
        assert read.spec.graphs[1].usual == {"prompts": 1, "points": 2}


@rtx
def test_a_profile_has_the_axes_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Least 1, best at the usual sizes, up to the most: as TensorRT-RTX itself lists them."""
    from visionfast.backends import tensorrt

    logs: list[str] = []
    parse = tensorrt.parse_layers
    monkeypatch.setattr(tensorrt, "parse_layers", lambda log: (logs.append(log), parse(log))[1])
    plan = _plan()
    plan.compile("sm89", plan.export(tmp_path), tmp_path)
    lines = {line.split()[1].rstrip(","): line for line in logs[1].splitlines() if line.startswith(" Name: ")}
    for name, sizes in {
        "points": "MinShape: [1,1,2], OptShape: [1,2,2], MaxShape: [5,6,2]",
        "labels": "MinShape: [1,1], OptShape: [1,2], MaxShape: [5,6]",
        "has_mask": "MinShape: [1], OptShape: [1], MaxShape: [5]",
    }.items():
        assert sizes in lines[name]


@pytest.mark.parametrize("backend", ["openvino", "torch"])
def test_both_graphs_run_one_after_the_other(tmp_path: Path, backend: str) -> None:
    plan = _plan(backend, "fp32", device="cpu")
    exported = plan.export(tmp_path)
    manifest = plan.compile("cpu", exported, tmp_path)
    rng_images = prompt_feeds(1, 1)["image_embeddings"].reshape(-1)[: 3 * 32 * 10].repeat(4)[: 3 * 32 * 32]
    images = rng_images.reshape(1, 3, 32, 32)
    runtime = get_backend(backend)
    encoder, decoder = manifest.spec.graphs
    with runtime.load(tmp_path, manifest, encoder, threads=1) as first:
        features = first.infer({"images": images})
    with runtime.load(tmp_path, manifest, decoder, threads=1) as second:
        for prompts, points in ((1, 2), (4, 3), (1, 2)):
            feeds = prompt_feeds(prompts, points) | features
            found = second.infer(feeds)
            assert found["masks"].shape == (prompts, 4, 16, 16)
            assert found["scores"].shape == (prompts, 4)


@rtx
@pytest.mark.parametrize(
    ("keep", "says"),
    [
        ("blocks.3", r"there is no graph for 'blocks\.3'; expected a module's path that begins with encoder\. or dec"),
        ("encode.norm", r"there is no graph for 'encode\.norm'"),
        ("encoder.nowhere", r"there is no module 'encoder\.nowhere'; expected a path such as encoder\.image_encoder"),
        ("decoder.embed.x", r"there is no module 'decoder\.embed\.x'; expected a path such as decoder\.embed\.prompt_"),
    ],
)
def test_names_that_are_no_modules(
    sam_checkpoint: Callable[[str], Path], engine_home: Path, keep: str, says: str
) -> None:
    with pytest.raises(OptionError, match=says) as caught:
        build(sam_checkpoint("mobile_sam"), backend="tensorrt-rtx", gpu="sm89", keep_fp32=[keep])
    assert "\n" not in str(caught.value)
    assert list(engine_home.rglob("*")) == []


def test_only_inputs_of_the_same_name_are_handed_on(tmp_path: Path) -> None:
    """A decoder's own inputs are as the family says, whatever the encoder gives."""
    model = small_prompt_segmenter(fp32_inputs={})
    _, decoder = _plan(model=model).export(tmp_path)
    assert _dtypes(decoder.graph.inputs) == {
        "image_embeddings": "float32", "high_res": "float16",
        "points": "float16", "labels": "float16", "has_mask": "float16",
    }  # fmt: skip


def test_an_input_that_is_not_there_is_our_own_mistake(tmp_path: Path) -> None:
    model = small_prompt_segmenter()
    graph: GraphSpec = model.spec.graphs[0]
    arguments: dict[str, Any] = {"precision": "fp16", "fp32_inputs": ["points"]}
    with pytest.raises(AssertionError, match="points"):
        export_onnx(model.modules["encoder"], graph, tmp_path / "a.onnx", **arguments)
