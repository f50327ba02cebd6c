"""What a served model tells about itself: the engine's manifest and certificate, in its configuration's parameters.

They are answered to whoever asks the server for the model's configuration, so a client needs nothing but the URL.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from visionfast._version import __version__
from visionfast.errors import ManifestError, ServerError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.strict_json import decode
from visionfast.types import EngineManifest

__all__ = ["manifest_of", "parameters_of"]


def parameters_of(
    manifest: EngineManifest,
    *,
    pipeline: str,
    engine: str,
    layout: str,
    options: Mapping[str, Any],
    limits: DecodeLimits,
) -> dict[str, str]:
    """The parameters of a model.

    `visionfast`: the release that deployed it. `pipeline`: the name that clients ask for. `layout`. `engine`: the
    engine's folder, from the version's folder. `certificate`: its status. `manifest`: engine.json without the
    certificate's single images. `options`: what is taken where a request says nothing, as JSON. `limits`:
    `DecodeLimits`, as JSON.
    """
    short = dataclasses.replace(manifest, certificate=dataclasses.replace(manifest.certificate, images=()))
    return {
        "visionfast": __version__,
        "pipeline": pipeline,
        "layout": layout,
        "engine": engine,
        "certificate": manifest.certificate.status,
        "manifest": json.dumps(dataclasses.asdict(short)),
        "options": json.dumps(options),
        "limits": json.dumps(dataclasses.asdict(limits)),
    }


def manifest_of(parameters: Mapping[str, str]) -> EngineManifest:
    """The manifest in a served model's parameters; its certificate has the figures, and none of the single images.

    Raises:
        ServerError: it is no model of visionfast's, or of another release's.
    """
    if "manifest" not in parameters:
        raise ServerError("model: expected one that `visionfast deploy` wrote, got one without a manifest")
    try:
        manifest: EngineManifest = decode(EngineManifest, json.loads(parameters["manifest"]), "manifest")
    except (ValueError, RecursionError, ManifestError) as error:
        by = parameters.get("visionfast", "another release")
        raise ServerError(f"model: deployed by visionfast {by}, not read by {__version__} ({error})") from error
    return manifest
