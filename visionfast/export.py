"""An eager module → one fixed-shape ONNX file with its precision written into it.

TensorRT 11 and TensorRT-RTX know strongly typed networks only, so a tensor's precision is a property of the
graph: in a half-precision graph the weights are float16, and casts stand before and after the modules that
stay FP32.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from visionfast.artifacts import atomic_write
from visionfast.errors import BuildError, OptionError
from visionfast.types import GraphSpec, Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["OPSET", "export_onnx", "half_precision", "mapped"]

OPSET = 17  # the first with LayerNormalization as one op, and the last that the TorchScript exporter is sure of
_MAX_PROTOBUF_BYTES = (1 << 31) - 1


def export_onnx(
    module: nn.Module, graph: GraphSpec, path: Path, *, precision: Precision, keep_fp32: Sequence[str] = ()
) -> GraphSpec:
    """Writes `module` to `path`, for exactly the shapes of `graph`.

    The same weights and options give the same bytes. The caller's module is not changed. `bf16` is no
    precision of a graph here (OpenVINO chooses it when it runs): it writes the FP32 graph.

    Args:
        module: float32, in eval mode, on the CPU.
        graph: its tensors; all floating ones float32.
        path: the ONNX file; replaced at once when all went well, else left as it was.
        precision: of the graph.
        keep_fp32: dotted paths of submodules that stay FP32, with all that is below them, in an `fp16` graph.

    Returns:
        The graph with the dtypes as written. In an `fp16` graph the inputs are float16, and so are the
        outputs that do not come straight out of a module that stays FP32.

    Raises:
        OptionError: `keep_fp32` names a module that is not there.
        BuildError: the module cannot be exported, or has more than 2 GiB of weights.
        ArtifactError: the file cannot be written.
    """
    import torch

    traced = half_precision(module, keep_fp32) if precision == "fp16" else module
    typed = dataclasses.replace(graph, inputs=tuple(_typed(i, precision) for i in graph.inputs))
    feeds = tuple(torch.zeros(i.shape, dtype=getattr(torch, i.dtype)) for i in typed.inputs)
    model = _traced_onnx(traced, feeds, graph)
    written = _checked(model, typed)
    atomic_write(path, model.SerializeToString(deterministic=True))
    return written


def _typed(spec: Any, precision: Precision) -> Any:
    halved = precision == "fp16" and spec.dtype == "float32"
    return dataclasses.replace(spec, dtype="float16") if halved else spec


# ---- precision --------------------------------------------------------------------------------------------


def half_precision(module: nn.Module, keep_fp32: Sequence[str] = ()) -> nn.Module:
    """A copy of `module` in float16, but for the named submodules, with all that is below them.

    A value is cast where weights of the other precision meet it, not where it is made: between neighbours that are
    both kept it stays float32, also on its way through what has no weights (an activation, a concatenation), and what
    a kept submodule hands out of `module` goes out as it was computed.

    Raises:
        OptionError: `keep_fp32` names a module that is not there.
        BuildError: a weight is too large for float16.
    """
    import torch
    from torch import nn

    class HalfPrecision(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, *inputs: torch.Tensor) -> Any:
            return self.network(*inputs)

    def takes(wanted: torch.dtype, other: torch.dtype) -> Any:
        def cast(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return mapped((args, kwargs), lambda t: t.to(wanted) if t.dtype == other else t)

        return cast

    network = copy.deepcopy(module)
    _check_paths(network, keep_fp32)
    kept = {id(inner) for path, inner in _everywhere(network) if _is_within(path, keep_fp32)}
    for path, inner in network.named_modules(prefix="the network"):
        if id(inner) not in kept:
            _halve_own_tensors(inner, path)
    for path, inner in _everywhere(network):
        if _is_within(path, keep_fp32):
            if path in keep_fp32 or _has_weights(inner):
                inner.register_forward_pre_hook(takes(torch.float32, torch.float16), with_kwargs=True)
        elif _has_weights(inner) and not any(_is_within(other, (path,)) for other in keep_fp32):
            inner.register_forward_pre_hook(takes(torch.float16, torch.float32), with_kwargs=True)
    return HalfPrecision(network).eval()


def _everywhere(network: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(network.named_modules(remove_duplicate=False))


def _has_weights(module: nn.Module) -> bool:
    return any(tensor.is_floating_point() for tensor in (*module.parameters(), *module.buffers()))


def _is_within(path: str, outer: Sequence[str]) -> bool:
    return any(other in ("", path) or path.startswith(f"{other}.") for other in outer)


def _halve_own_tensors(module: nn.Module, path: str) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            half = tensor.data.half()
            if half.isinf().any() and not tensor.isinf().any():
                largest = float(tensor.detach().abs().max())
                raise BuildError(
                    f"{path}: its weights reach {largest:.3g}, beyond float16's 65504; build with precision fp32, or "
                    "keep this module in it"
                )
            tensor.data = half


def _check_paths(network: nn.Module, keep_fp32: Sequence[str]) -> None:
    paths = [path for path, _ in _everywhere(network)]
    for path in keep_fp32:
        if path not in paths:
            near = sorted(name for name in paths if name.rpartition(".")[0] == path.rpartition(".")[0])
            raise OptionError(f"keep_fp32: there is no module {path!r}; expected a path such as {', '.join(near[:8])}")


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to every tensor in its tuples, lists and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value


# ---- tracing ----------------------------------------------------------------------------------------------


def _traced_onnx(module: nn.Module, feeds: tuple[torch.Tensor, ...], graph: GraphSpec) -> Any:
    """The module as an ONNX model without anything in it that differs from run to run."""
    import onnx
    import torch

    buffer = io.BytesIO()
    try:
        with _quiet_exporter(), torch.no_grad():
            # The dynamo exporter fails on a YOLO head and silently fixes a dynamic batch (torch 2.14).
            torch.onnx.export(
                module,
                feeds,
                cast("Any", buffer),  # torch's annotation leaves out files, which this exporter takes
                input_names=[i.name for i in graph.inputs],
                output_names=[o.name for o in graph.outputs],
                opset_version=OPSET,
                do_constant_folding=True,
                dynamo=False,
            )
        if buffer.tell() > _MAX_PROTOBUF_BYTES:
            raise BuildError(
                f"{graph.name}: an ONNX file holds at most 2 GiB, this graph has {buffer.tell() >> 20} MiB"
            )
        model = onnx.load_model_from_string(buffer.getvalue())
    except (RuntimeError, ValueError, TypeError, torch.onnx.errors.OnnxExporterError) as error:
        raise BuildError(f"{graph.name}: cannot be exported to ONNX ({_first_line(error)})") from error
    model.producer_name, model.producer_version, model.doc_string = "visionfast", "", ""
    model.graph.name, model.graph.doc_string = graph.name, ""
    for node in model.graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    del model.metadata_props[:]
    return model


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Without the exporter's own deprecation notice, and the tracer's notes on shapes, fixed on purpose."""
    from torch.jit._trace import TracerWarning

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.|visionfast\.export")
        warnings.filterwarnings("ignore", category=TracerWarning)
        yield


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ---- checking ---------------------------------------------------------------------------------------------


def _checked(model: Any, graph: GraphSpec) -> GraphSpec:
    """`graph` with the outputs' dtypes as written, once the model passed ONNX's strict type inference."""
    import onnx
    from onnx import helper

    try:
        onnx.checker.check_model(model, full_check=True)
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise BuildError(f"{graph.name}: the exported ONNX is not consistent ({_first_line(error)})") from error
    outputs = []
    for spec, value in zip(graph.outputs, inferred.graph.output, strict=True):
        tensor = value.type.tensor_type
        shape = tuple(dimension.dim_value for dimension in tensor.shape.dim)
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        if value.name != spec.name or shape != spec.shape:
            raise BuildError(f"{graph.name}: expected the output {spec.name} {spec.shape}, got {value.name} {shape}")
        outputs.append(dataclasses.replace(spec, dtype=dtype))
    return dataclasses.replace(graph, outputs=tuple(outputs))
