"""An eager module → one ONNX file with its shapes and its precision written into it.

TensorRT 11 and TensorRT-RTX know strongly typed networks only, so a tensor's precision is a property of the
graph: in a half-precision graph the weights are float16, and casts stand before and after what stays FP32: the
modules that are named, and every softmax.
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
from visionfast.types import GraphSpec, Precision, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["OPSET", "check_paths", "example_inputs", "export_onnx", "half_precision", "mapped"]

OPSET = 17  # the first with LayerNormalization as one op, and the last that the TorchScript exporter is sure of
_MAX_PROTOBUF_BYTES = (1 << 31) - 1


def export_onnx(
    module: nn.Module,
    graph: GraphSpec,
    path: Path,
    *,
    precision: Precision,
    keep_fp32: Sequence[str] = (),
    fp32_inputs: Sequence[str] = (),
) -> GraphSpec:
    """Writes `module` to `path`, for exactly the shapes of `graph`; its axes are dimensions of their names in the file.

    The same weights and options give the same bytes. The caller's module is not changed. `bf16` is no
    precision of a graph here (OpenVINO chooses it when it runs): it writes the FP32 graph.

    Args:
        module: float32, in eval mode, on the CPU.
        graph: its tensors; all floating ones float32.
        path: the ONNX file; replaced at once when all went well, else left as it was.
        precision: of the graph.
        keep_fp32: dotted paths of submodules that stay FP32, with all that is below them, in an `fp16` graph; an
            empty one is the whole.
        fp32_inputs: names of inputs that stay float32 in an `fp16` graph.

    Returns:
        The graph with the dtypes as written. In an `fp16` graph the other inputs are float16, and so are the
        outputs that do not come straight out of a module that stays FP32.

    Raises:
        OptionError: `keep_fp32` names a module that is not there.
        BuildError: the module cannot be exported, has more than 2 GiB of weights, or an axis does not vary in it.
        ArtifactError: the file cannot be written.
    """
    traced = half_precision(module, keep_fp32) if precision == "fp16" else module
    assert set(fp32_inputs) <= {i.name for i in graph.inputs}, fp32_inputs
    inputs = tuple(i if i.name in fp32_inputs else _typed(i, precision) for i in graph.inputs)
    typed = dataclasses.replace(graph, inputs=inputs)
    model = _traced_onnx(traced, example_inputs(typed), graph)
    written = _checked(model, typed)
    atomic_write(path, model.SerializeToString(deterministic=True))
    return written


def example_inputs(graph: GraphSpec) -> tuple[torch.Tensor, ...]:
    """Zeros to trace a module of `graph` with. No axis is 0 or 1, which tracers take for fixed; no two are equal."""
    import torch

    sizes = {axis: size for size, axis in enumerate(graph.usual, start=2)}
    return tuple(torch.zeros(i.sized(sizes), dtype=getattr(torch, i.dtype)) for i in graph.inputs)


def _typed(spec: TensorSpec, precision: Precision) -> TensorSpec:
    halved = precision == "fp16" and spec.dtype == "float32"
    return dataclasses.replace(spec, dtype="float16") if halved else spec


# ---- precision --------------------------------------------------------------------------------------------


def half_precision(module: nn.Module, keep_fp32: Sequence[str] = ()) -> nn.Module:
    """A copy of `module` in float16, but for the named submodules, with all that is below them.

    A value is cast where weights of the other precision meet it, not where it is made: between neighbours that are
    both kept it stays float32, also on its way through what has no weights (an activation, a concatenation), and what
    a kept submodule hands out of `module` goes out as it was computed. Every softmax is FP32
    (`visionfast.functions`): it is a function, which cannot be named.

    Raises:
        OptionError: `keep_fp32` names a module that is not there.
        BuildError: a weight is too large for float16.
    """
    import torch
    from torch import nn

    from visionfast.functions import SoftmaxInFp32

    class HalfPrecision(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, *inputs: torch.Tensor) -> Any:
            with SoftmaxInFp32():
                return self.network(*inputs)

    def takes(wanted: torch.dtype, other: torch.dtype) -> Any:
        def cast(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return mapped((args, kwargs), lambda t: t.to(wanted) if t.dtype == other else t)

        return cast

    network = copy.deepcopy(module)
    check_paths(network, keep_fp32)
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


def check_paths(network: nn.Module, keep_fp32: Sequence[str], *, prefix: str = "") -> None:
    """Raises `OptionError` unless `keep_fp32` has paths of submodules only; `prefix` stands before them in messages."""
    paths = [path for path, _ in _everywhere(network)]
    for path in keep_fp32:
        if path not in paths:
            beside = (path.rpartition(".")[0], "")  # else the uppermost
            near = next((found for outer in beside if (found := sorted(_directly_below(outer, paths)))), [])
            raise OptionError(
                f"keep_fp32: there is no module {prefix + path!r}; expected a path such as "
                f"{', '.join(prefix + name for name in near[:8])}"
            )


def _directly_below(outer: str, paths: Sequence[str]) -> list[str]:
    return [path for path in paths if path and path.rpartition(".")[0] == outer]


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

    from visionfast.functions import FixedNorms

    buffer = io.BytesIO()
    try:
        with _quiet_exporter(), torch.no_grad(), FixedNorms():
            # The dynamo exporter fails on a YOLO head and silently fixes a dynamic batch (torch 2.14).
            torch.onnx.export(
                module,
                feeds,
                cast("Any", buffer),  # torch's annotation leaves out files, which this exporter takes
                input_names=[i.name for i in graph.inputs],
                output_names=[o.name for o in graph.outputs],
                opset_version=OPSET,
                dynamic_axes={t.name: _varying(t) for t in (*graph.inputs, *graph.outputs) if t.axes},
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
    """Without the exporter's own deprecation notice, and its notes on shapes, fixed on purpose, and on folding."""
    from torch.jit._trace import TracerWarning

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.|visionfast\.export")
        warnings.filterwarnings("ignore", category=TracerWarning)
        warnings.filterwarnings("ignore", "Constant folding", UserWarning)
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
    for spec, value, declared in zip(graph.outputs, inferred.graph.output, model.graph.output, strict=True):
        tensor = value.type.tensor_type
        shape = tuple(side.dim_param or side.dim_value for side in tensor.shape.dim)
        if value.name != spec.name or not _agrees(spec, shape):
            shown = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
            raise BuildError(f"{graph.name}: expected the output {spec.name} {spec.shown}, got {value.name} {shown}")
        for position, side in enumerate(declared.type.tensor_type.shape.dim):
            if position not in _varying(spec):
                side.dim_value = spec.shape[position]  # the exporter left some of them open
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        outputs.append(dataclasses.replace(spec, dtype=dtype))
    return dataclasses.replace(graph, outputs=tuple(outputs))


def _varying(spec: TensorSpec) -> dict[int, str]:
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
