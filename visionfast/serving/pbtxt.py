"""config.pbtxt: a pipeline's models as the server's own protobuf, `ModelConfig`, in text."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from visionfast.errors import BackendUnavailableError, ServerError
from visionfast.serving.ensemble import Pipeline, Stage
from visionfast.serving.scheduling import QueueLimits, Scheduling
from visionfast.serving.wire import WireTensor

__all__ = ["WARM_UP", "configs_of", "read_config", "served_version", "text_of"]


def _protobuf() -> ModuleType:
    try:
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise BackendUnavailableError(
            f"tritonclient: expected the package, but {error}; `pip install 'visionfast[triton]'`"
        ) from error
    module: ModuleType = model_config_pb2
    return module


def configs_of(
    pipeline: Pipeline, scheduling: Scheduling, *, version: int, parameters: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Model → its `ModelConfig`, for every model of the pipeline.

    Args:
        pipeline: the DAG.
        scheduling: how requests wait.
        version: of the models, the only one that is served.
        parameters: model → what it is told; those that are not ours are told nothing.
    """
    configs = {
        stage.name: _stage_config(stage, scheduling, first=stage is pipeline.stages[0]) for stage in pipeline.stages
    }
    if pipeline.is_bound:
        configs[pipeline.name] = _ensemble_config(pipeline, scheduling)
    for name, config in configs.items():
        config.version_policy.specific.versions.append(version)
        # A step's answer holds what is true of one request only: its deadline, and how long it took.
        config.response_cache.enable = scheduling.cache and name == pipeline.name
        if name != pipeline.name:
            config.parameters["pipeline"].string_value = pipeline.name
        for key, value in sorted(parameters.get(name, {}).items()):
            config.parameters[key].string_value = value
    return configs


def _stage_config(stage: Stage, scheduling: Scheduling, *, first: bool) -> Any:
    pb = _protobuf()
    most = scheduling.max_batch if stage.batched else 0
    config = pb.ModelConfig(name=stage.name, platform=_PLATFORMS[stage.backend], backend=stage.backend)
    config.max_batch_size = most
    _add_tensors(config, stage.inputs, stage.outputs, stage)
    for tensor in config.input:
        # Every request is an array of its own to the stage: images of different sizes are put together all the same.
        tensor.allow_ragged_batch = -1 in tensor.dims
    kind = pb.ModelInstanceGroup.KIND_GPU if stage.on_gpu else pb.ModelInstanceGroup.KIND_CPU
    config.instance_group.add(count=stage.instances or scheduling.instances, kind=kind)
    delay_us = scheduling.queue_delay_us if first else 0
    if stage.in_line:
        config.parameters["line"].string_value = scheduling.line(delay_us)
    else:
        _add_batching(config.dynamic_batching, scheduling, delay_us)
    if stage.backend == "tensorrt":
        config.optimization.cuda.graphs = True
    if stage.backend == "python" and stage.on_gpu:
        # Otherwise the backend copies every tensor to the CPU first.
        config.parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value = "no"
    for key, value in sorted(stage.options.items()):
        config.parameters[key].string_value = value
    if stage.backend != "python":  # ours warm themselves up
        _add_warm_up(config, stage.samples)
    return config


def _add_batching(batching: Any, scheduling: Scheduling, delay_us: int) -> None:
    """The server's own queue."""
    batching.max_queue_delay_microseconds = delay_us
    batching.priority_levels, batching.default_priority_level = 2, 1
    batching.default_queue_policy.CopyFrom(_policy(scheduling.online))
    for level, limits in ((1, scheduling.online), (2, scheduling.offline)):
        batching.priority_queue_policy[level].CopyFrom(_policy(limits))


_PLATFORMS: Mapping[str, str] = {"python": "", "dali": "", "tensorrt": "tensorrt_plan", "openvino": ""}

WARM_UP = "warmup"
"""Of a model's folder, where the server looks for samples: files of the tensors' names."""


def _add_warm_up(config: Any, samples: Mapping[str, bytes]) -> None:
    """A request before the first: what the samples' files hold, and zeros for the other tensors."""
    request = config.model_warmup.add(name="first", batch_size=1)
    for tensor in config.input:
        told = request.inputs[tensor.name]
        told.data_type = tensor.data_type
        if (sample := samples.get(tensor.name)) is not None:
            told.input_data_file = tensor.name
            told.dims.append(len(sample))
        else:
            told.zero_data = True
            told.dims.extend(tensor.dims)


def _policy(limits: QueueLimits) -> Any:
    pb = _protobuf()
    return pb.ModelQueuePolicy(
        timeout_action=pb.ModelQueuePolicy.REJECT,
        default_timeout_microseconds=limits.timeout_ms * 1000,
        allow_timeout_override=True,
        max_queue_size=limits.requests,
    )


def _ensemble_config(pipeline: Pipeline, scheduling: Scheduling) -> Any:
    config = _protobuf().ModelConfig(name=pipeline.name, platform="ensemble")
    config.max_batch_size = scheduling.max_batch if all(stage.batched for stage in pipeline.stages) else 1
    _add_tensors(config, pipeline.inputs, pipeline.outputs)
    for stage in pipeline.stages:
        # Of the step's versions the newest that is served: there is one.
        step = config.ensemble_scheduling.step.add(model_name=stage.name, model_version=-1)
        for link in pipeline.links:
            if link.target == stage.role:
                step.input_map[stage.own_name(link.tensor)] = link.tensor
        used = {link.tensor for link in pipeline.links if link.source == stage.role}
        for tensor in stage.outputs:
            assert tensor.name in used, "the server refuses a tensor that nobody takes"
            step.output_map[stage.own_name(tensor.name)] = tensor.name
    return config


def _add_tensors(
    config: Any, inputs: tuple[WireTensor, ...], outputs: tuple[WireTensor, ...], stage: Stage | None = None
) -> None:
    """By the model's own names; where it takes one image and no batch, that one stands in front of its shapes."""
    pb = _protobuf()
    single = (1,) if stage is not None and not stage.batched else ()
    for field, tensors in ((config.input, inputs), (config.output, outputs)):
        for tensor in tensors:
            name = tensor.name if stage is None else stage.own_name(tensor.name)
            field.add(name=name, data_type=pb.DataType.Value(f"TYPE_{tensor.datatype}"), dims=(*single, *tensor.dims))


def text_of(config: Any) -> str:
    """As it stands in config.pbtxt; the same configuration gives the same text."""
    from google.protobuf import text_format

    text: str = text_format.MessageToString(config)
    return text


def read_config(text: str) -> Any:
    """The inverse of `text_of`.

    Raises:
        ServerError: it is no config.pbtxt.
    """
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, _protobuf().ModelConfig())
    except text_format.ParseError as error:
        raise ServerError(f"config.pbtxt: {' '.join(str(error).split())}; deploy the engine again") from error


def served_version(config: Any) -> int:
    """The version that a configuration of `configs_of` serves."""
    (version,) = config.version_policy.specific.versions
    return int(version)
