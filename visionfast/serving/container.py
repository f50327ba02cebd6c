"""NVIDIA's container: what has to be added to it, and how it is started. Nothing here has been run on a GPU."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from visionfast._version import __version__
from visionfast.serving.ensemble import Layout
from visionfast.types import EngineManifest

__all__ = ["DOCKERFILE", "IMAGE", "commands", "dockerfile"]

IMAGE = "nvcr.io/nvidia/tritonserver:26.10-py3"
"""With CUDA 13, as the packages of visionfast's extras are built for (NVIDIA's release notes 26.10). Which TensorRT is
in it decides whether it loads a plan: docs/serve-nvidia.md."""

DOCKERFILE = "Dockerfile"

_SERVED, _PROGRAM = "/served", "/usr/local/bin/serve-models"
"""In the container: the models that are served, as links, and what starts the server with them."""

_RUNTIMES = {"tensorrt": "tensorrt-cu13", "tensorrt-rtx": "tensorrt-rtx-cu13"}


def dockerfile(manifest: EngineManifest, layout: Layout, image: str) -> str:
    """The container with the packages that the stages import.

    Args:
        manifest: of the engine.
        layout: an ensemble's TensorRT, DALI and OpenVINO are the container's own; a fused pipeline brings those of the
            session.
        image: NVIDIA's container.
    """
    extras = "" if manifest.device == "cpu" else "[gpu,dali]" if layout == "fused" else "[gpu]"
    packages = [f"visionfast{extras}=={__version__}"]
    if layout == "fused" and manifest.backend in _RUNTIMES:
        packages.append(f"{_RUNTIMES[manifest.backend]}=={manifest.runtime_version}")
    wanted = " ".join(f"'{package}'" for package in packages)
    return f"""\
# Written by `visionfast deploy`. The stages run in the container's own Python.
FROM {image}
ENV PIP_BREAK_SYSTEM_PACKAGES=1
# OpenCV's libraries.
RUN apt-get update && apt-get install -y --no-install-recommends libgl1 libglib2.0-0 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir {wanted}
# A pipeline's versions may be of different layouts, so of different models. Those of the version that is served have a
# configuration; one without would keep the server from starting.
RUN printf '%s\\n' '#!/bin/sh' 'rm -rf {_SERVED} && mkdir {_SERVED}' \\
    'for config in /models/*/config.pbtxt; do ln -s "${{config%/*}}" {_SERVED}/; done' \\
    'exec tritonserver --model-repository={_SERVED} "$@"' > {_PROGRAM} && chmod 755 {_PROGRAM}
"""


def commands(repository: Path, *, gpu: bool, cache: bool = False) -> tuple[str, ...]:
    """The commands that serve a pipeline: to this machine alone, its folder read-only.

    Args:
        repository: pipelines/<name>, with its `DOCKERFILE`.
        gpu: whether the stages need one.
        cache: with a response cache of 64 MiB.
    """
    folder = repository.resolve()
    # An image's name has one of its separators at a time, and none at its end.
    served = f"visionfast-{re.sub('[._-]{2,}', '-', folder.name.lower()).rstrip('._-')}"
    build = f"docker build --tag {served} - < {shlex.quote(str(folder / DOCKERFILE))}"
    # The Python stages get their tensors through /dev/shm, of which a container has 64 MiB by itself.
    options = f"--rm --init {'--gpus all ' if gpu else ''}--shm-size 1g"
    ports = " ".join(f"-p 127.0.0.1:{port}:{port}" for port in (8000, 8001, 8002))
    server = f"{Path(_PROGRAM).name} --disable-auto-complete-config"
    if cache:
        server += " --cache-config=local,size=67108864"
    run = f"docker run {options} {ports} -v {shlex.quote(f'{folder}:/models:ro')} {served} {server}"
    return build, run
