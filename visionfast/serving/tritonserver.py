"""Where the Triton Inference Server is on this machine, and how it is called: its command line and its environment.

On a CPU it is the one inside the package nvidia-pytriton, which has the Python backend and a response cache and nothing
else; in NVIDIA's container it is the whole one. Nothing is imported from either.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from visionfast import artifacts
from visionfast.errors import BackendUnavailableError
from visionfast.serving import allocator

__all__ = ["Endpoints", "Installation", "command", "environment", "find_installation", "link_backends"]

_PACKAGE = "pip install --no-deps nvidia-pytriton==0.7.0"
"""By its own dependencies it would bring NumPy 1."""

_UNTIL_PARENT_ENDS = """\
import ctypes, os, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, 15)
if parent and os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Linux tells the server to end when who started it is gone, however it went: PR_SET_PDEATHSIG, SIGTERM."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a server listens: one IPv4 address and three ports."""

    address: str
    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True, slots=True)
class Installation:
    """A Triton server.

    Attributes:
        binary: `tritonserver`.
        python_backend: the files of a Python backend for the running Python, by the names that the server looks for;
            empty where the server knows its own.
        caches: its response caches; None where the server knows its own.
    """

    binary: Path
    python_backend: Mapping[str, Path]
    caches: Path | None


def find_installation() -> Installation:
    """What `$TRITONSERVER` names, else nvidia-pytriton's, else a `tritonserver` on the PATH.

    Raises:
        BackendUnavailableError: there is none, or it does not serve the running Python.
    """
    if named := os.environ.get("TRITONSERVER"):
        found = shutil.which(named)
        if found is None:
            raise BackendUnavailableError(
                f"TRITONSERVER={named}: expected the path of a tritonserver, got no program; unset it to take another"
            )
        return _complete(Path(found).resolve())
    # Its place is asked for, not the package itself: importing it would change this process's logging and signals.
    spec = importlib.util.find_spec("pytriton")
    for place in () if spec is None else (spec.submodule_search_locations or ()):
        binary = Path(place) / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return _complete(binary)
    if found := shutil.which("tritonserver"):
        return _complete(Path(found).resolve())
    raise BackendUnavailableError(
        f"tritonserver: not on this machine; `{_PACKAGE}` brings one, or work in NVIDIA's container"
    )


def _complete(binary: Path) -> Installation:
    """With what stands beside a `tritonserver` that is inside nvidia-pytriton."""
    root = binary.parents[1]
    stubs = root / "python_backend_stubs"
    if not stubs.is_dir():
        return Installation(binary, {}, None)
    running = _python()
    stub = stubs / running / "triton_python_backend_stub"
    if not stub.is_file():
        there = sorted((p.name for p in stubs.iterdir()), key=lambda name: [int(n) for n in name.split(".")])
        raise BackendUnavailableError(
            f"nvidia-pytriton: serves Python {', '.join(there)}, this is {running}; serve with one of those"
        )
    python = root / "backends" / "python"
    files = [python / "libtriton_python.so", python / "triton_python_backend_utils.py", stub]
    return Installation(binary, {file.name: file for file in files}, root / "caches")


def _python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def link_backends(installation: Installation, folder: Path) -> None:
    """Makes `folder` what the server gets as its backends: links, because both find their libraries by where they are.

    Beside them, `lib` is the running Python's own library where it has one: another build of it may be on the system.
    """
    if not installation.python_backend:
        return
    (folder / "python").mkdir(parents=True)
    for name, file in installation.python_backend.items():
        (folder / "python" / name).symlink_to(file)
    name = f"libpython{_python()}.so.1.0"
    for place in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix) / "lib"):
        if place and (library := Path(place) / name).is_file():
            (folder / "lib").mkdir()
            (folder / "lib" / name).symlink_to(library.resolve())
            return


def environment(backends: Path) -> dict[str, str]:
    """What the server and its Python processes run in: this interpreter and these packages, wherever they are.

    Args:
        backends: the folder of `link_backends`.
    """
    variables = dict(os.environ)
    packages = [Path(__file__).parents[2], *(Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib"))]
    inherited = variables.get("PYTHONPATH")
    variables["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([*map(str, packages), *(inherited.split(os.pathsep) if inherited else ())])
    )
    # The stub is a Python of its own, which takes the first python3 on the PATH for itself.
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables.get("PATH", os.defpath)])
    if (backends / "lib").is_dir():
        # Nothing else is in that folder: what the server and its backends need they find by themselves.
        variables["LD_LIBRARY_PATH"] = os.pathsep.join(
            filter(None, [str(backends / "lib"), variables.get("LD_LIBRARY_PATH")])
        )
    variables["VISIONFAST_HOME"] = str(artifacts.home().resolve())
    variables["PYTHONUNBUFFERED"] = "1"  # what a stage prints is in the log when it dies
    variables.setdefault("OPENVINO_TELEMETRY_DISABLED", "1")
    allocator.for_server(variables)
    return variables


def command(
    installation: Installation,
    endpoints: Endpoints,
    *,
    models: Path,
    backends: Path,
    shm_prefix: str,
    cache_bytes: int,
    exit_timeout_s: int,
    shared_memory: bool,
    parent_pid: int | None,
) -> Sequence[str]:
    """The server's command line.

    Args:
        installation: which server.
        endpoints: where it listens.
        models: the model repository. All that is in it is served, and nothing else can be: the server's API for loading
            models would take a model's *code* from whoever reaches the port, so it is off.
        backends: the folder of `link_backends`.
        shm_prefix: what the names of its shared memory begin with.
        cache_bytes: of the response cache; 0 is none.
        exit_timeout_s: how long requests in flight have to finish when it is told to end.
        shared_memory: clients may have the server map theirs.
        parent_pid: the process whose end is also the server's; None is none.
    """
    # Tracing and logging can be told to write files. Shared memory can be told to map, and so to read and to write, any
    # that this user has, the server's own among it; every user of this machine reaches a loopback address.
    restricted = ["trace", "logging", *(() if shared_memory else ("shared-memory",))]
    # What takes a key is off where none can be sent: no header has a line break in it. (A secret one is no secret:
    # everybody can read a command line.)
    closed = f"{','.join(restricted)}:no one\n=nothing\n"
    options = {
        "model-repository": models,
        "model-control-mode": "none",
        "strict-readiness": "true",
        "exit-on-error": "true",
        "exit-timeout-secs": exit_timeout_s,
        "http-address": endpoints.address,
        "http-port": endpoints.http,
        "http-restricted-api": closed,
        "grpc-address": endpoints.address,
        "grpc-port": endpoints.grpc,
        # Requests kept for the next one have room for the largest image that each ever carried: with Triton's eight,
        # 50 MiB that filled up over the first ten minutes of mixed images. Without them no request took longer.
        "grpc-infer-allocation-pool-size": 0,
        "grpc-restricted-protocol": closed,
        "metrics-address": endpoints.address,
        "metrics-port": endpoints.metrics,
        "backend-config": f"python,shm-region-prefix-name={shm_prefix}",
    }
    if installation.python_backend:
        options |= {"backend-directory": backends, "allow-gpu-metrics": "false", "pinned-memory-pool-byte-size": 0}
    if cache_bytes:
        options["cache-config"] = f"local,size={cache_bytes}"
        if installation.caches is not None:
            options["cache-directory"] = installation.caches
    until = [sys.executable, "-I", "-S", "-c", _UNTIL_PARENT_ENDS, str(parent_pid)] if parent_pid else []
    # Configurations are written whole. Without this, every model starts a Python more, to complete its own.
    flags = ["--disable-auto-complete-config", *(f"--{name}={value}" for name, value in options.items())]
    return [*until, str(installation.binary), *flags]
