"""What the builder made of a graph: the layer list of TensorRT's and TensorRT-RTX's verbose build log.

Reading it from the engine needs a GPU (`IEngineInspector`); the log has it on any machine, where the builder's
`profiling_verbosity` is `DETAILED` and its logger keeps what is `VERBOSE`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from visionfast.types import TensorSpec

__all__ = ["EngineLayer", "parse_io_tensors", "parse_layers", "precision_counts"]

_DTYPES = {
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int8": "int8",
    "UInt8": "uint8",
    "Int32": "int32",
    "Int64": "int64",
    "Bool": "bool",
}
_TENSORS = r"\[((?: ?\{[^{}]*\},?)*)\]"
_LAYER = re.compile(
    rf"Name: (\S.*?), LayerType: (\w+), Inputs: {_TENSORS}(?:, Constants: {_TENSORS})?, Outputs: {_TENSORS}(.*)"
)
_SCALAR = re.compile(r"\{[^{}]*Dimensions: \[1(?:,1)*\][^{}]*\}")
_DTYPE = re.compile(r"Datatype: (\w+)")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_IO = re.compile(
    r"^\s*Name: (?P<name>\S+), IOMode: (?P<mode>\w+), DataType: (?P<dtype>\w+), Dimensions: \[(?P<shape>[-\d,]*)\]",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """One kernel of the engine.

    Attributes:
        name: the builder's own.
        kind: the builder's own: `runtime_fusion`, `correlation`, `kgen`.
        inputs, weights, outputs: NumPy's name of each one's dtype. Weights are the constants that have more than one
            value: a matrix product's two factors are FP32 in any case. None of them for a layer that waits for another.
        nodes: the ONNX nodes that are in it.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]

    @property
    def dtypes(self) -> frozenset[str]:
        """Of everything that goes in, lies in it, and comes out."""
        return frozenset((*self.inputs, *self.weights, *self.outputs))


def parse_layers(log: str) -> tuple[EngineLayer, ...]:
    """The layers that a build's log lists, in the engine's order; none where it was not verbose enough."""
    layers = []
    for name, kind, inputs, constants, outputs, rest in _LAYER.findall(log):
        layer = EngineLayer(
            name,
            kind,
            _dtypes(inputs),
            _dtypes(_SCALAR.sub("", constants)),
            _dtypes(outputs),
            tuple(_NODE.findall(rest)),
        )
        layers.append(layer)
    return tuple(layers)


def parse_io_tensors(log: str) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The engine's inputs and outputs that a build's log lists; sides that vary are -1."""
    found: dict[str, list[TensorSpec]] = {"Input": [], "Output": []}
    for match in _IO.finditer(log):
        shape = tuple(int(side) for side in match["shape"].split(",") if side)
        found[match["mode"]].append(TensorSpec(match["name"], shape, _named(match["dtype"])))
    return tuple(found["Input"]), tuple(found["Output"])


def precision_counts(layers: tuple[EngineLayer, ...]) -> dict[str, int]:
    """How many layers give each dtype, the most frequent first: `{"float16": 106, "float32": 3}`."""
    return dict(Counter(dtype for layer in layers for dtype in dict.fromkeys(layer.outputs)).most_common())


def _dtypes(tensors: str) -> tuple[str, ...]:
    return tuple(_named(dtype) for dtype in _DTYPE.findall(tensors))


def _named(dtype: str) -> str:
    return _DTYPES.get(dtype, dtype.lower())
