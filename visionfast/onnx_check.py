"""Is an exported ONNX model consistent, and does it give what its graph says?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from visionfast.errors import BuildError
from visionfast.types import GraphSpec, TensorSpec

__all__ = ["check_onnx", "first_line", "varying"]


def check_onnx(model: Any, graph: GraphSpec, path: Path | None = None) -> GraphSpec:
    """`graph` with the outputs' dtypes as written, once the model passed ONNX's strict type inference.

    Args:
        model: its outputs' shapes are completed.
        graph: its tensors, in the dtypes that go in.
        path: where it is written, for one with its weights beside it.
    """
    import onnx
    from onnx import helper

    try:
        onnx.checker.check_model(model if path is None else path, full_check=True)
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BuildError(f"{graph.name}: the exported ONNX is not consistent ({first_line(error)})") from error
    outputs = []
    for spec, value, declared in zip(graph.outputs, inferred.graph.output, model.graph.output, strict=True):
        tensor = value.type.tensor_type
        shape = tuple(side.dim_param or side.dim_value for side in tensor.shape.dim)
        if value.name != spec.name or not _agrees(spec, shape):
            shown = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
            raise BuildError(f"{graph.name}: expected the output {spec.name} {spec.shown}, got {value.name} {shown}")
        for position, side in enumerate(declared.type.tensor_type.shape.dim):
            if position not in varying(spec):
                side.dim_value = spec.shape[position]  # the exporter left some of them open
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        outputs.append(dataclasses.replace(spec, dtype=dtype))
    return dataclasses.replace(graph, outputs=tuple(outputs))


def varying(spec: TensorSpec) -> dict[int, str]:
    return {dimension: axis for dimension, axis in enumerate(spec.axes) if axis}


def _agrees(spec: TensorSpec, shape: tuple[int | str, ...]) -> bool:
    """Whether an output's inferred shape, names for what varies, is what `spec` says.

    Inference does not find every fixed side: a name that is no axis' is the exporter's word for an open one.
    """
    axes = spec.axes or ("",) * len(spec.shape)
    return len(shape) == len(spec.shape) and all(
        found == axis if axis else found == size or (isinstance(found, str) and found not in axes)
        for found, size, axis in zip(shape, spec.shape, axes, strict=True)
    )


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
