"""A graph that TensorRT-RTX compiled, read for its tests: which layers came of which node, in which dtype."""

from __future__ import annotations

import dataclasses
import functools

import onnx

from visionfast.backends.tensorrt_layers import EngineLayer, parse_layers
from visionfast.types import GraphSpec

__all__ = ["RtxGraph"]


@dataclasses.dataclass(frozen=True)
class RtxGraph:
    """One graph of a built engine: its tensors, what was compiled, and what the compiler said meanwhile."""

    spec: GraphSpec
    onnx: onnx.ModelProto
    log: str

    @functools.cached_property
    def layers(self) -> tuple[EngineLayer, ...]:
        return parse_layers(self.log)

    @functools.cached_property
    def layers_of(self) -> dict[str, list[EngineLayer]]:
        """ONNX node → the layers that it is in: a LayerNorm is in two where it is a sum and what follows."""
        found: dict[str, list[EngineLayer]] = {}
        for layer in self.layers:
            for node in layer.nodes:
                found.setdefault(node, []).append(layer)
        return found

    @functools.cached_property
    def dtypes(self) -> dict[str, int]:
        """ONNX value → ONNX' number of its dtype."""
        inferred = onnx.shape_inference.infer_shapes(self.onnx, check_type=True, strict_mode=True, data_prop=True)
        values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
        return {value.name: value.type.tensor_type.elem_type for value in values} | {
            weight.name: weight.data_type for weight in inferred.graph.initializer
        }

    def nodes(self, *kinds: str) -> list[onnx.NodeProto]:
        return [node for node in self.onnx.graph.node if node.op_type in kinds]
