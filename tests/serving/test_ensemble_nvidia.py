"""The pipelines of NVIDIA's container as data: golden files, and that every ensemble's models fit one another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from visionfast.errors import OptionError
from visionfast.preprocess.dali_feed import PLACEHOLDER, ticket_of
from visionfast.serving.ensemble import Pipeline
from visionfast.serving.scheduling import Scheduling
from visionfast.serving.topology import pipeline_of
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, Task, TensorSpec

pytest.importorskip("tritonclient.grpc", reason="config.pbtxt is made with tritonclient: visionfast[triton]")

from visionfast.serving.pbtxt import configs_of, read_config, text_of

GOLDEN = Path(__file__).parent / "golden"


def spec_of(task: Task, *, gpu: bool = True, batch: int = 1) -> ModelSpec:
    """YOLOv8 for three classes at 96 × 64, as TensorRT takes it, or OpenVINO."""
    masks = 32 if task == "segment" else 0
    outputs = [TensorSpec("predictions", (batch, 7 + masks, 126), "float32")]
    if masks:
        outputs.append(TensorSpec("prototypes", (batch, 32, 24, 16), "float16"))
    image = TensorSpec("images", (batch, 3, 96, 64), "float16", "NCHW")
    if not gpu:
        image = TensorSpec("images", (batch, 96, 64, 3), "uint8", "NHWC")
    graph = GraphSpec("model", (image,), tuple(outputs))
    return ModelSpec(
        "small", "yolov8", "yolov8n", task, (graph,), PreprocessSpec((96, 64)), ("a", "b", "c"), (8, 16, 32)
    )


PIPELINES: dict[str, dict[str, Any]] = {
    f"{prefix}-{task}-{layout}": {"task": task, "layout": layout, "gpu": prefix == "nvidia", **options}
    for task in ("detect", "segment")
    for prefix, layout, options in (
        ("nvidia", "fused", {"target": "nvidia"}),
        ("nvidia", "ensemble", {"target": "nvidia"}),
        ("openvino", "ensemble", {"engine_backend": "openvino"}),
        ("cpu", "ensemble", {}),
    )
}
ENSEMBLES = [name for name in PIPELINES if name.endswith("ensemble")]


def pipeline(name: str) -> Pipeline:
    options = dict(PIPELINES[name])
    spec = spec_of(options.pop("task"), gpu=options.pop("gpu"))
    return pipeline_of(name, spec, options.pop("layout"), **options)


def configs(name: str, scheduling: Scheduling | None = None) -> dict[str, Any]:
    made = pipeline(name)
    ours = {stage.name for stage in made.stages if stage.backend == "python"} | {name}
    parameters = {model: {"certificate": "passed", "engine": model} for model in made.models if model in ours}
    return configs_of(made, scheduling or Scheduling(), version=3, parameters=parameters)


def step(name: str, role: str, scheduling: Scheduling | None = None) -> Any:
    return configs(name, scheduling)[f"{name}_{role}"]


@pytest.mark.parametrize("name", [name for name in PIPELINES if not name.startswith("cpu")])
def test_configurations_are_those_of_the_golden_files(name: str) -> None:
    """To make them anew: `python tests/serving/test_ensemble_nvidia.py`."""
    there = {path.stem: path.read_text() for path in GOLDEN.glob(f"{name}*.pbtxt")}
    made = {model: text_of(config) for model, config in configs(name).items()}
    assert made == there
    assert {model: text_of(read_config(text)) for model, text in made.items()} == made


@pytest.mark.parametrize("name", ENSEMBLES)
def test_in_an_ensemble_every_tensor_has_one_maker_and_fits_whoever_takes_it(name: str) -> None:
    """As Triton's core looks at it: batched models have a batch of any size in front of their shapes."""
    made = {model: read_config(text_of(config)) for model, config in configs(name).items()}
    whole = made[name]

    def shaped(config: Any, tensor: Any) -> tuple[int, list[int]]:
        return tensor.data_type, [*([-1] if config.max_batch_size else []), *tensor.dims]

    makers = {tensor.name: shaped(whole, tensor) for tensor in whole.input}
    assert len(makers) == 3
    takers: dict[str, list[tuple[int, list[int]]]] = {}
    for one in whole.ensemble_scheduling.step:
        config = made[one.model_name]
        assert config.max_batch_size == 0 or config.max_batch_size >= whole.max_batch_size
        assert set(one.input_map) == {tensor.name for tensor in config.input}
        assert set(one.output_map) == {tensor.name for tensor in config.output}
        for tensor in config.input:
            takers.setdefault(one.input_map[tensor.name], []).append(shaped(config, tensor))
        for tensor in config.output:
            assert one.output_map[tensor.name] not in makers
            makers[one.output_map[tensor.name]] = shaped(config, tensor)
    for tensor in whole.output:
        takers.setdefault(tensor.name, []).append(shaped(whole, tensor))
    assert set(takers) == set(makers), "nobody takes it, or nobody makes it"
    for tensor, (dtype, dims) in makers.items():
        for taken_dtype, taken_dims in takers[tensor]:
            assert (taken_dtype, len(taken_dims)) == (dtype, len(dims)), tensor
            assert all(a in (b, -1) or b == -1 for a, b in zip(dims, taken_dims, strict=True)), tensor


def test_dali_s_graph_and_tensorrt_s_plan_are_told_what_they_need() -> None:
    scheduling = Scheduling(max_batch=5, instances=3)
    name = "nvidia-segment-ensemble"
    dali, engine = step(name, "preprocess", scheduling), step(name, "engine", scheduling)
    assert (dali.backend, dali.max_batch_size, dali.instance_group[0].count) == ("dali", 5, 1)
    assert [tensor.name for tensor in dali.output] == ["images", "decoded_hw", "told"]  # by the graph's order
    assert dali.input[0].allow_ragged_batch
    assert dali.parameters["num_threads"].string_value.isdecimal()
    assert (engine.platform, engine.backend, engine.max_batch_size) == ("tensorrt_plan", "tensorrt", 0)
    assert engine.optimization.cuda.graphs
    assert engine.instance_group[0].count == 3
    assert list(engine.input[0].dims) == [1, 3, 96, 64]
    assert [list(tensor.dims) for tensor in engine.output] == [[1, 39, 126], [1, 32, 24, 16]]
    assert configs(name, scheduling)[name].max_batch_size == 1


@pytest.mark.parametrize("name", ["nvidia-detect-ensemble", "openvino-detect-ensemble"])
def test_what_is_on_the_gpu_stays_there(name: str) -> None:
    gpu = {
        model.removeprefix(f"{name}_"): config.instance_group[0].kind == config.instance_group[0].KIND_GPU
        for model, config in configs(name).items()
        if model != name
    }
    if name.startswith("openvino"):
        assert not any(gpu.values())
        return
    assert gpu == {"intake": False, "preprocess": True, "engine": True, "postprocess": True}
    for role in ("intake", "postprocess"):
        told = step(name, role).parameters
        assert ("FORCE_CPU_ONLY_INPUT_TENSORS" in told) == gpu[role]
    assert step(name, "postprocess").parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == "no"
    fused = configs("nvidia-detect-fused")["nvidia-detect-fused"]
    assert fused.instance_group[0].kind == fused.instance_group[0].KIND_GPU


@pytest.mark.parametrize("name", ["nvidia-detect-ensemble", "openvino-detect-ensemble"])
def test_other_backends_are_warmed_up(name: str) -> None:
    stages = {stage.name: stage for stage in pipeline(name).stages}
    for model, config in configs(name).items():
        if model == name or stages[model].backend == "python":
            assert not config.model_warmup
            continue
        (warm,) = config.model_warmup
        assert warm.batch_size == 1
        assert set(warm.inputs) == {tensor.name for tensor in config.input}
        for tensor in config.input:
            told = warm.inputs[tensor.name]
            assert told.data_type == tensor.data_type
            if -1 in tensor.dims:
                assert list(told.dims) == [len(stages[model].samples[told.input_data_file])]
            else:
                assert told.zero_data
                assert list(told.dims) == list(tensor.dims)


def test_dali_is_warmed_up_with_an_image_that_it_decodes() -> None:
    (sample,) = pipeline("nvidia-detect-ensemble").stages[1].samples.values()
    assert sample == PLACEHOLDER.encoded + ticket_of(PLACEHOLDER, 0)[:5].tobytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "embed", "target": "nvidia"}, "small: a model for embed, not served on target nvidia; "),
        ({"task": "prompt-segment", "target": "nvidia"}, "not served on target nvidia; its encoder's result is kept"),
        ({"batch": 4, "target": "nvidia", "layout": "ensemble"}, "takes an engine for one image, got one for 4"),
        ({"target": "tpu"}, "target 'tpu': expected cpu or nvidia"),
        ({"engine_backend": "onnx"}, "engine-backend 'onnx': expected python or openvino"),
        (
            {"engine_backend": "openvino"},
            "engine-backend openvino: expected an ensemble for the cpu, got fused for cpu",
        ),
        (
            {"engine_backend": "openvino", "target": "nvidia", "layout": "ensemble"},
            "engine-backend openvino: expected an ensemble for the cpu, got ensemble for nvidia",
        ),
        (
            {"engine_backend": "openvino", "layout": "ensemble"},
            "takes an engine with the normalisation inside, NHWC uint8, got NCHW float16",
        ),
        ({"engine_backend": "openvino", "layout": "ensemble", "gpu": False, "batch": 2}, "got one for 2"),
        ({"engine_backend": "openvino", "layout": "ensemble", "task": "embed"}, "openvino serves detect and segment"),
    ],
)
def test_what_is_not_served_is_said(options: dict[str, Any], message: str) -> None:
    asked = {"task": "detect", "gpu": True, "batch": 1, "layout": "fused"} | options
    spec = spec_of("detect", gpu=asked.pop("gpu"), batch=asked.pop("batch"))
    spec = replace(spec, task=asked.pop("task"))
    with pytest.raises(OptionError, match=message) as error:
        pipeline_of("p", spec, asked.pop("layout"), **asked)
    assert "\n" not in str(error.value)


def test_a_fused_pipeline_takes_an_engine_for_many_images() -> None:
    made = pipeline_of("p", spec_of("detect", batch=8), "fused", target="nvidia")
    assert [(stage.name, stage.module, stage.on_gpu) for stage in made.stages] == [("p", "fused_gpu", True)]


if __name__ == "__main__":
    for name in PIPELINES:
        if not name.startswith("cpu"):
            for old in GOLDEN.glob(f"{name}*.pbtxt"):
                old.unlink()
            for model, config in configs(name).items():
                (GOLDEN / f"{model}.pbtxt").write_text(text_of(config))
