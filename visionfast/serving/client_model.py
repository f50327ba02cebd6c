"""What a server says of a model, read by a client before it asks the model anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from visionfast.errors import ManifestError, ServerError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.serving.metadata import manifest_of
from visionfast.serving.wire import outputs_of
from visionfast.strict_json import decode
from visionfast.types import EngineManifest

__all__ = ["is_unknown", "not_there", "served_model"]


def served_model(where: str, name: str, config: Mapping[str, Any]) -> tuple[EngineManifest, DecodeLimits]:
    """The manifest of the engine that a model runs, its certificate without the single images; and what an image may
    cost there.

    Args:
        where: the server's address.
        name: of the model.
        config: of the model, as Triton gives it in JSON.

    Raises:
        ServerError: it is none that visionfast deployed, or is only a step of one, or of another release.
    """
    try:
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        outputs = {output["name"] for output in config.get("output", ())}
    except (AttributeError, TypeError, KeyError) as error:
        raise ServerError(f"{where}: {name}: expected its configuration, got another JSON ({error!r})") from error
    try:
        manifest = manifest_of(parameters)
        limits: DecodeLimits = decode(DecodeLimits, json.loads(parameters.get("limits", "{}")), "limits")
    except (ServerError, ValueError, RecursionError, ManifestError) as error:
        raise ServerError(f"{where}: {name}: {error}") from error
    if missing := [tensor.name for tensor in outputs_of(manifest.spec.task) if tensor.name not in outputs]:
        raise ServerError(f"{where}: {name}: expected a whole pipeline, got a step of one, without {missing[0]}")
    return manifest, limits


def is_unknown(error: ServerError) -> bool:
    """Whether the server knows no such model; by Triton 2.51's words."""
    return "unknown model" in str(error)


def not_there(where: str, name: str, there: Sequence[str]) -> ServerError:
    """The error for a name that a server does not know."""
    return ServerError(f"{where}: no model {name!r} is ready there; there are {', '.join(sorted(there)) or 'none'}")
