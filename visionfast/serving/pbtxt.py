"""config.pbtxt: a pipeline's models as the server's own protobuf, `ModelConfig`, in text."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from visionfast.errors import BackendUnavailableError, ServerError
from visionfast.serving.ensemble import Pipeline, Stage
from visionfast.serving.scheduling import QueueLimits, Scheduling
from visionfast.serving.wire import WireTensor

__all__ = ["configs_of", "read_config", "served_version", "text_of"]


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
        parameters: model → what it is told.
    """
    configs = {
        stage.name: _stage_config(stage, scheduling, first=stage is pipeline.stages[0]) for stage in pipeline.stages
    }
    if pipeline.layout == "ensemble":
        configs[pipeline.name] = _ensemble_config(pipeline, scheduling)
    for name, config in configs.items():
        config.version_policy.specific.versions.append(version)
        config.response_cache.enable = scheduling.cache
        for key, value in sorted(parameters[name].items()):
            config.parameters[key].string_value = value
    return configs


def _stage_config(stage: Stage, scheduling: Scheduling, *, first: bool) -> Any:
    pb = _protobuf()
    config = pb.ModelConfig(name=stage.name, backend="python", max_batch_size=scheduling.max_batch)
    _add_tensors(config, stage.inputs, stage.outputs)
    for tensor in config.input:
        # Every request is an array of its own to the stage: images of different sizes are put together all the same.
        tensor.allow_ragged_batch = -1 in tensor.dims
    config.instance_group.add(count=scheduling.instances, kind=pb.ModelInstanceGroup.KIND_CPU)
    batching = config.dynamic_batching
    batching.max_queue_delay_microseconds = scheduling.queue_delay_us if first else 0
    batching.priority_levels, batching.default_priority_level = 2, 1
    batching.default_queue_policy.CopyFrom(_policy(scheduling.online))
    for level, limits in ((1, scheduling.online), (2, scheduling.offline)):
        batching.priority_queue_policy[level].CopyFrom(_policy(limits))
    return config


def _policy(limits: QueueLimits) -> Any:
    pb = _protobuf()
    return pb.ModelQueuePolicy(
        timeout_action=pb.ModelQueuePolicy.REJECT,
        default_timeout_microseconds=limits.timeout_ms * 1000,
        allow_timeout_override=True,
        max_queue_size=limits.requests,
    )


def _ensemble_config(pipeline: Pipeline, scheduling: Scheduling) -> Any:
    config = _protobuf().ModelConfig(name=pipeline.name, platform="ensemble", max_batch_size=scheduling.max_batch)
    _add_tensors(config, pipeline.inputs, pipeline.outputs)
    for stage in pipeline.stages:
        # Of the step's versions the newest that is served: there is one.
        step = config.ensemble_scheduling.step.add(model_name=stage.name, model_version=-1)
        for link in pipeline.links:
            if link.target == stage.role:
                step.input_map[link.tensor] = link.tensor
        used = {link.tensor for link in pipeline.links if link.source == stage.role}
        for tensor in stage.outputs:
            assert tensor.name in used, "the server refuses a tensor that nobody takes"
            step.output_map[tensor.name] = tensor.name
    return config


def _add_tensors(config: Any, inputs: tuple[WireTensor, ...], outputs: tuple[WireTensor, ...]) -> None:
    pb = _protobuf()
    for field, tensors in ((config.input, inputs), (config.output, outputs)):
        for tensor in tensors:
            field.add(name=tensor.name, data_type=pb.DataType.Value(f"TYPE_{tensor.datatype}"), dims=tensor.dims)


def text_of(config: Any) -> str:
    """As it stands in config.pbtxt; the same configuration gives the same text."""
    from google.protobuf import text_format  # type: ignore[import-untyped]

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
