"""An eager module → an ONNX model with its shapes and its precision written into it.

TensorRT 11 and TensorRT-RTX know strongly typed networks only, so a tensor's precision is a property of the
graph: in a half-precision graph the weights are float16, and casts stand before and after what stays FP32: the
modules that are named, and every softmax.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visionfast.artifacts import atomic_write
from visionfast.errors import ArtifactError, BuildError, OptionError
from visionfast.onnx_check import check_onnx, first_line, varying
from visionfast.onnx_files import gather_weights, weights_file
from visionfast.types import GraphSpec, Precision, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["OPSET", "check_paths", "example_inputs", "export_onnx", "half_precision", "mapped"]

OPSET = 17  # the first with LayerNormalization as one op, and the last that the TorchScript exporter is sure of
_MOST_INLINE_BYTES = 1 << 30
"""Of weights in the ONNX file itself: a protobuf ends at 2 GiB, and what is folded is added to them."""


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
        path: the ONNX file; replaced at once when all went well, else left as it was. Beyond 1 GiB of weights they
            are beside it (`visionfast.onnx_files.weights_file`).
        precision: of the graph.
        keep_fp32: dotted paths of submodules that stay FP32, with all that is below them, in an `fp16` graph; an
            empty one is the whole.
        fp32_inputs: names of inputs that stay float32 in an `fp16` graph.

    Returns:
        The graph with the dtypes as written. In an `fp16` graph the other inputs are float16, and so are the
        outputs that do not come straight out of a module that stays FP32.

    Raises:
        OptionError: `keep_fp32` names a module that is not there.
        BuildError: the module cannot be exported, or an axis does not vary in it.
        ArtifactError: the file cannot be written.
    """
    traced = half_precision(module, keep_fp32) if precision == "fp16" else module
    assert set(fp32_inputs) <= {i.name for i in graph.inputs}, fp32_inputs
    inputs = tuple(i if i.name in fp32_inputs else _typed(i, precision) for i in graph.inputs)
    typed = dataclasses.replace(graph, inputs=inputs)
    weight_bytes = sum(tensor.nbytes for tensor in (*traced.parameters(), *traced.buffers()))
    if weight_bytes > _MOST_INLINE_BYTES:
        return _export_large(traced, typed, path, weight_bytes)
    model = _traced_onnx(traced, typed)
    written = check_onnx(model, typed)
    atomic_write(path, model.SerializeToString(deterministic=True))
    weights_file(path).unlink(missing_ok=True)
    return written


def _export_large(module: nn.Module, graph: GraphSpec, path: Path, weight_bytes: int) -> GraphSpec:
    """As `export_onnx`, with the weights beside the file."""
    _check_space(path, 2 * weight_bytes)  # the exporter writes a file a tensor
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
            folder = Path(scratch)
            (folder / "traced").mkdir()
            model = _traced_onnx(module, graph, folder / "traced" / path.name)
            trial = folder / path.name  # beside its weights, as `path` will be: the checker looks at both
            gather_weights(model, folder / "traced", weights_file(trial))
            shutil.rmtree(folder / "traced")
            atomic_write(trial, model.SerializeToString(deterministic=True))
            written = check_onnx(model, graph, trial)
            weights_file(trial).replace(weights_file(path))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written ({error.strerror}); nothing half-written was left") from error
    atomic_write(path, model.SerializeToString(deterministic=True))
    return written


def _check_space(path: Path, needed: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written ({error.strerror})") from error
    if free < needed:
        raise ArtifactError(
            f"{path}: expected {needed / 1e9:.1f} GB of free disk for a model of this size, got {free / 1e9:.1f} GB; "
            "make room there, or name another disk with TMPDIR"
        )


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
        if tensor.is_floating_point() and tensor.numel():
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


def _traced_onnx(module: nn.Module, graph: GraphSpec, path: Path | None = None) -> Any:
    """The module as an ONNX model without anything in it that differs from run to run.

    Args:
        module: as it is to be written.
        graph: its tensors, in the dtypes that go in.
        path: in a folder of its own, for a model that may have its weights beside it; they are left there.
    """
    import onnx
    import torch

    from visionfast.functions import FixedNorms

    buffer = io.BytesIO()
    target: Any = buffer if path is None else str(path)
    try:
        with _quiet_exporter(), torch.no_grad(), FixedNorms():
            # The dynamo exporter fails on a YOLO head and silently fixes a dynamic batch (torch 2.14).
            torch.onnx.export(
                module,
                example_inputs(graph),
                target,
                input_names=[i.name for i in graph.inputs],
                output_names=[o.name for o in graph.outputs],
                opset_version=OPSET,
                dynamic_axes={t.name: varying(t) for t in (*graph.inputs, *graph.outputs) if t.axes},
                do_constant_folding=True,
                dynamo=False,
            )
        if path is None:
            model = onnx.load_model_from_string(buffer.getvalue())
        else:
            model = onnx.load_model(path, load_external_data=False)
    except (RuntimeError, ValueError, TypeError, torch.onnx.errors.OnnxExporterError) as error:
        raise BuildError(f"{graph.name}: cannot be exported to ONNX ({first_line(error)})") from error
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
