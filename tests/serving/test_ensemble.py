"""The DAG as data and the configurations made from it: read back through the protobuf, and held to golden files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from visionfast.errors import OptionError, ServerError
from visionfast.serving.ensemble import Layout, Pipeline, behind_a_cache
from visionfast.serving.scheduling import QueueLimits, Scheduling
from visionfast.serving.topology import pipeline_of
from visionfast.serving.wire import inputs_of, outputs_of
from visionfast.types import GraphSpec, ModelSpec, PreprocessSpec, Task, TensorSpec

pytest.importorskip("tritonclient.grpc", reason="config.pbtxt is made with tritonclient: visionfast[triton]")

from visionfast.serving.pbtxt import configs_of, read_config, served_version, text_of

GOLDEN = Path(__file__).parent / "golden"
LAYOUTS: tuple[Layout, ...] = ("fused", "ensemble")


def spec_of(task: Task) -> ModelSpec:
    """YOLOv8 for three classes at 96 × 64, as OpenVINO takes it."""
    masks = 32 if task == "segment" else 0
    outputs = [TensorSpec("predictions", (1, 7 + masks, 126), "float32")]
    if masks:
        outputs.append(TensorSpec("prototypes", (1, 32, 24, 16), "float16"))
    image = TensorSpec("images", (1, 96, 64, 3), "uint8", "NHWC")
    graph = GraphSpec("model", (image,), tuple(outputs))
    return ModelSpec(
        "small", "yolov8", "yolov8n", task, (graph,), PreprocessSpec((96, 64)), ("a", "b", "c"), (8, 16, 32)
    )


def configs(pipeline: Pipeline, scheduling: Scheduling | None = None) -> dict[str, Any]:
    parameters = {model: {"certificate": "passed", "engine": model} for model in pipeline.models}
    return configs_of(pipeline, scheduling or Scheduling(), version=3, parameters=parameters)


@pytest.mark.parametrize("task", ["detect", "segment"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_configurations_are_those_of_the_golden_files(layout: Layout, task: Task) -> None:
    """To make them anew: `python tests/serving/test_ensemble.py`."""
    made = configs(pipeline_of(f"{task}-{layout}", spec_of(task), layout))
    there = {path.stem: path.read_text() for path in GOLDEN.glob(f"{task}-{layout}*.pbtxt")}
    assert {model: text_of(config) for model, config in made.items()} == there


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_configuration_read_back_says_what_was_asked_for(layout: Layout) -> None:
    pipeline = pipeline_of("p", spec_of("detect"), layout)
    scheduling = Scheduling(
        max_batch=4,
        queue_delay_us=123,
        instances=2,
        online=QueueLimits(5, 600),
        offline=QueueLimits(70, 8000),
        cache=True,
    )
    read = {model: read_config(text_of(config)) for model, config in configs(pipeline, scheduling).items()}
    assert list(read) == [stage.name for stage in pipeline.stages] + (["p"] if layout == "ensemble" else [])
    for model, config in read.items():
        assert (config.name, config.max_batch_size, served_version(config)) == (model, 4, 3)
        assert config.response_cache.enable == (model == "p")  # a step's answer is true of one request only
        assert config.parameters["certificate"].string_value == "passed"
        if config.platform == "ensemble":
            continue
        assert config.backend == "python"
        assert config.instance_group[0].count == 2
        assert not config.HasField("dynamic_batching")  # requests wait in a line of ours
        assert json.loads(config.parameters["line"].string_value) == {
            "delay_us": 123 if model == pipeline.stages[0].name else 0,
            "online": {"requests": 5, "timeout_ms": 600},
            "offline": {"requests": 70, "timeout_ms": 8000},
        }


def test_a_pipeline_behind_a_cache_is_an_ensemble_be_it_of_one_step() -> None:
    fused, ensemble = (behind_a_cache(pipeline_of("p", spec_of("detect"), layout)) for layout in LAYOUTS)
    assert ensemble == pipeline_of("p", spec_of("detect"), "ensemble")
    made = configs(fused, Scheduling(cache=True))
    assert list(made) == ["p_fused", "p"]
    (step,) = made["p"].ensemble_scheduling.step
    assert (step.model_name, dict(step.input_map)) == ("p_fused", {t.name: t.name for t in fused.inputs})
    assert [model for model, config in made.items() if config.response_cache.enable] == ["p"]
    assert made["p_fused"].parameters["pipeline"].string_value == "p"


@pytest.mark.parametrize("task", ["detect", "segment"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_has_one_source_and_a_target(layout: Layout, task: Task) -> None:
    pipeline = pipeline_of("p", spec_of(task), layout)
    assert (pipeline.inputs, pipeline.outputs) == (inputs_of(task), outputs_of(task))
    made = {(tensor.name, stage.role) for stage in pipeline.stages for tensor in stage.outputs}
    made |= {(tensor.name, None) for tensor in pipeline.inputs}
    assert len({name for name, _ in made}) == len(made)
    assert {(link.tensor, link.source) for link in pipeline.links} == made
    taken = {(tensor.name, stage.role) for stage in pipeline.stages for tensor in stage.inputs}
    taken |= {(tensor.name, None) for tensor in pipeline.outputs}
    assert {(link.tensor, link.target) for link in pipeline.links} == taken


def test_a_tensor_between_two_stages_is_the_same_to_both() -> None:
    stages = pipeline_of("p", spec_of("segment"), "ensemble").stages
    tensors = {tensor.name: tensor for tensor in inputs_of("segment")}
    for stage in stages:
        for tensor in stage.inputs:
            assert tensors[tensor.name] == tensor
        tensors |= {tensor.name: tensor for tensor in stage.outputs}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "both"}, "layout 'both': expected fused or ensemble"),
        ({"target": "tpu"}, "target 'tpu': expected cpu or nvidia"),
        ({"layout": "ensemble", "task": "embed"}, "layout ensemble: expected fused for embed: it has nothing behind"),
        (
            {"layout": "ensemble", "task": "prompt-segment"},
            "layout ensemble: expected fused for prompt-segment: an encoded image is kept where it was encoded",
        ),
    ],
)
def test_what_is_not_served_is_said(options: dict[str, Any], message: str) -> None:
    asked = {"layout": "fused", "target": "cpu", "task": "detect"} | options
    with pytest.raises(OptionError, match=message):
        pipeline_of("p", spec_of(asked["task"]), asked["layout"], target=asked["target"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_batch": 0},
        {"max_batch": True},
        {"max_batch": 2**31},
        {"queue_delay_us": -1},
        {"queue_delay_us": 0.5},
        {"instances": 0},
        {"online": QueueLimits(0, 1)},
        {"offline": QueueLimits(1, 0)},
    ],
)
def test_a_schedule_out_of_range_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="expected a whole number, at least"):
        Scheduling(**wrong)


def test_a_damaged_configuration_is_one_line() -> None:
    with pytest.raises(ServerError, match=r"^config\.pbtxt: [^\n]*$"):
        read_config('name: "p"\nmax_batch_sizes: 8\n')


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for task in ("detect", "segment"):
        for layout in LAYOUTS:
            for old in GOLDEN.glob(f"{task}-{layout}*.pbtxt"):
                old.unlink()
            for model, config in configs(pipeline_of(f"{task}-{layout}", spec_of(task), layout)).items():  # type: ignore[arg-type]
                (GOLDEN / f"{model}.pbtxt").write_text(text_of(config))
