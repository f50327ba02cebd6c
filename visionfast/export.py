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

__all__ = ["OPSET", "export_onnx", "half_precision"]

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
    """A copy of `module` in float16, but for the named submodules, with casts around those.

    What a kept submodule returns is cast down for the rest of the network; where it is itself an output of
    `module`, it goes out as it was computed, in float32.

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
            full_of.clear()
            outputs = self.network(*inputs)
            # A cast whose result nothing reads is left out of the graph by the exporter.
            return _mapped(outputs, lambda tensor: full_of.get(id(tensor), (tensor, tensor))[0])

    # id of a tensor that was cast down → what it was cast from, and itself, so that its id is not used again.
    full_of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast_up(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        up = _mapped((args, kwargs), lambda t: t.float() if t.dtype == torch.float16 else t)
        return up[0], up[1]

    def cast_down(_module: nn.Module, _args: Any, outputs: Any) -> Any:
        def down(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype != torch.float32:
                return tensor
            half = tensor.half()
            full_of[id(half)] = (tensor, half)
            return half

        return _mapped(outputs, down)

    network = copy.deepcopy(module)
    islands = _islands(network, keep_fp32)
    kept = {id(inner) for island in islands for inner in island.modules()}
    for path, inner in network.named_modules(prefix="the network"):
        if id(inner) not in kept:
            _halve_own_tensors(inner, path)
    for island in islands:
        island.register_forward_pre_hook(cast_up, with_kwargs=True)
        island.register_forward_hook(cast_down)
    return HalfPrecision(network).eval()


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


def _islands(network: nn.Module, keep_fp32: Sequence[str]) -> list[nn.Module]:
    """The outermost kept modules that are called: a list of modules never is, its members are."""
    from torch import nn

    paths = dict(network.named_modules())
    for path in keep_fp32:
        if path not in paths:
            near = sorted(name for name in paths if name.rpartition(".")[0] == path.rpartition(".")[0])
            raise OptionError(f"keep_fp32: there is no module {path!r}; expected a path such as {', '.join(near[:8])}")
    outermost = [p for p in dict.fromkeys(keep_fp32) if not any(p.startswith(f"{other}.") for other in keep_fp32)]
    called: list[nn.Module] = []
    waiting = [paths[p] for p in outermost]
    while waiting:
        module = waiting.pop(0)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            waiting[:0] = list(module.children())
        else:
            called.append(module)
    return called


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to every tensor in its tuples, lists and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
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
