"""A serialised DALI pipeline as data, and the GPU's graph as one for the CPU's operators."""

from __future__ import annotations

import functools
from typing import Any

import pytest

__all__ = ["on_the_cpu", "pipeline_definition"]


@functools.cache
def pipeline_definition() -> Any:
    """The message class of a serialised pipeline, as far as the tests read it (the field numbers are DALI's)."""
    pytest.importorskip("google.protobuf", reason="needs protobuf, which comes with visionfast[build]")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="dali_read.proto", package="dali_read", syntax="proto2")
    messages = {
        "Edge": {"name": (1, "string"), "device": (2, "string"), "is_argument": (3, "bool")},
        "Argument": {
            "name": (1, "string"),
            "type": (2, "string"),
            "floats": (3, "float*"),
            "ints": (4, "int64*"),
            "strings": (5, "string*"),
            "bools": (6, "bool*"),
            "elements": (7, "Argument*"),
            "is_vector": (8, "bool"),
        },
        "Operator": {
            "name": (1, "string"),
            "inputs": (2, "Edge*"),
            "outputs": (3, "Edge*"),
            "arguments": (4, "Argument*"),
        },
        "Pipeline": {
            "num_threads": (1, "int64"),
            "batch_size": (2, "int64"),
            "operators": (5, "Operator*"),
            "outputs": (7, "Edge*"),
        },
    }
    field = descriptor_pb2.FieldDescriptorProto
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            added = message.field.add(name=field_name, number=number, label=label)
            kind = kind.rstrip("*")
            if kind in messages:
                added.type, added.type_name = field.TYPE_MESSAGE, f".dali_read.{kind}"
            else:
                added.type = getattr(field, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("dali_read.Pipeline"))


def on_the_cpu(serialised: bytes) -> bytes:
    """The same graph, every operator and every tensor of it on the CPU: all that is changed is where they are."""
    graph = pipeline_definition().FromString(serialised)
    for operator in graph.operators:
        for edge in (*operator.inputs, *operator.outputs):
            edge.device = "cpu"
        for argument in operator.arguments:
            if argument.name == "device":
                argument.strings[:] = ["cpu"]
    for edge in graph.outputs:
        edge.device = "cpu"
    return graph.SerializeToString()
