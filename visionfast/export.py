"""An eager module → fixed-shape ONNX with its precision written into it.

Runtimes for NVIDIA GPUs know strongly typed networks only, so FP16 is not a flag for the compiler: the graph itself
is half precision, with casts around the parts that stay in FP32.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visionfast.artifacts import atomic_write
from visionfast.errors import BackendUnavailableError, BuildError, OptionError
from visionfast.types import GraphSpec, Precision, TensorSpec

__all__ = ["export_onnx"]

# The first opset with LayerNormalization as one operator.
_OPSET = 17


def export_onnx(
    module: Any,
    graph: GraphSpec,
    path: Path,
    *,
    precision: Precision = "fp32",
    fp32_tail: Sequence[str] = (),
    keep_fp32: Sequence[str] = (),
) -> GraphSpec:
    """Writes `module` as ONNX. The same weights and options give the same bytes.

    Args:
        module: `torch.nn.Module` in eval mode, FP32; it is not changed.
        graph: its inputs and outputs, FP32.
        path: of the file to write.
        precision: `fp16` writes half precision; `bf16` is the runtime's own doing and writes FP32.
        fp32_tail: submodules, by dotted name, that stay FP32 and hand their FP32 result on.
        keep_fp32: submodules that compute in FP32 inside an FP16 graph and hand on FP16.

    Returns:
        The graph's tensors with the dtypes as written.

    Raises:
        OptionError: a name in `fp32_tail` or `keep_fp32` is not a submodule.
        BuildError: the module cannot be exported.
        BackendUnavailableError: torch or onnx is not installed.
    """
    try:
        import onnx
        import torch
    except ImportError as error:
        raise BackendUnavailableError(f"export needs {error.name}; `pip install 'visionfast[build]'`") from error
    inputs = graph.inputs
    if precision == "fp16":
        module = _half(module, fp32_tail, keep_fp32)
        inputs = tuple(dataclasses.replace(spec, dtype="float16") for spec in inputs)
    example = tuple(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in inputs)
    buffer = io.BytesIO()
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    try:
        exporter_log.setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # the TorchScript exporter's age, and constants that it folds by design
            torch.onnx.export(
                module,
                example,
                buffer,
                opset_version=_OPSET,
                dynamo=False,  # the other exporter cannot take YOLO heads, and fixes what should vary
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in graph.outputs],
            )
        model = onnx.load_from_string(buffer.getvalue())
        onnx.checker.check_model(model)
        model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:  # the exporter and the checker raise many kinds
        raise BuildError(f"{graph.name}: cannot be exported to ONNX ({str(error).strip().splitlines()[0]})") from error
    finally:
        exporter_log.setLevel(level)
    atomic_write(path, model.SerializeToString(deterministic=True))
    return GraphSpec(graph.name, inputs, tuple(_output(onnx, value) for value in model.graph.output))


def _output(onnx: Any, value: Any) -> TensorSpec:
    tensor = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return TensorSpec(value.name, tuple(d.dim_value for d in tensor.shape.dim), dtype)


def _half(module: Any, fp32_tail: Sequence[str], keep_fp32: Sequence[str]) -> Any:
    """A half-precision copy with FP32 islands: casts stand where values enter and leave them."""
    import torch

    def cast(value: Any, dtype: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, (tuple, list)):
            return type(value)(cast(item, dtype) for item in value)
        return value

    half = copy.deepcopy(module).half()
    known = dict(half.named_modules())
    original = dict(module.named_modules())
    for name in (*fp32_tail, *keep_fp32):
        if name not in known or not name:
            raise OptionError(f"keep_fp32: {name!r} is not a submodule; there are, e.g., {', '.join(list(known)[1:6])}")
        island = known[name].float()
        # A round trip through half would have rounded the island's own numbers.
        island.load_state_dict(original[name].state_dict())
        for key, buffer in original[name].named_buffers():
            island.get_buffer(key).copy_(buffer)
        island.register_forward_pre_hook(lambda _, args: cast(args, torch.float32))
        if name not in fp32_tail:
            island.register_forward_hook(lambda _, __, result: cast(result, torch.float16))
    return half
