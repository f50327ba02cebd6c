"""JSON → frozen dataclasses, strictly: a damaged or mistyped file is named, not guessed at."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from visionfast.errors import ManifestError

__all__ = ["decode"]


def decode(kind: Any, value: Any, where: str) -> Any:
    """`value`, as `json` gives it, as the type `kind`: dataclasses, tuples, mappings, unions, literals, plain values.

    Raises:
        ManifestError: it is not of that type; the message begins with `where` and the path inside it.
    """
    origin = get_origin(kind)
    if kind is Any:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ManifestError(f"{where}: expected an object, got {type(value).__name__}")
        hints = get_type_hints(kind)
        fields = {f.name: f for f in dataclasses.fields(kind)}
        if unknown := sorted(set(value) - set(fields)):
            raise ManifestError(f"{where}: unknown key {unknown[0]!r}; the keys are {', '.join(sorted(fields))}")
        for name, spec in fields.items():
            required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
            if required and name not in value:
                raise ManifestError(f"{where}: the key {name!r} is missing")
        made = {name: decode(hints[name], item, f"{where}.{name}") for name, item in value.items()}
        return kind(**made)
    if origin is tuple:
        if not isinstance(value, list):
            raise ManifestError(f"{where}: expected a list, got {type(value).__name__}")
        inner = get_args(kind)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(decode(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(inner):
            raise ManifestError(f"{where}: expected {len(inner)} values, got {len(value)}")
        return tuple(decode(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(inner, value, strict=True)))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ManifestError(f"{where}: expected an object, got {type(value).__name__}")
        item_kind = get_args(kind)[1]
        return {name: decode(item_kind, item, f"{where}.{name}") for name, item in value.items()}
    if origin in (Union, types.UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        if value is None and len(options) < len(get_args(kind)):
            return None
        if len(options) == 1:  # its own words say more than that it is none of them
            return decode(options[0], value, where)
        for option in options:
            with contextlib.suppress(ManifestError):
                return decode(option, value, where)
        raise ManifestError(f"{where}: {value!r} is none of {kind}")
    if origin is not None:  # Literal
        if value not in get_args(kind):
            raise ManifestError(f"{where}: expected one of {', '.join(map(repr, get_args(kind)))}, got {value!r}")
        return value
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ManifestError(f"{where}: expected a number of 64 bits, got one of {len(str(value))} digits") from None
    if type(value) is not kind:
        raise ManifestError(f"{where}: expected {kind.__name__}, got {value!r}")
    return value
