"""The session that an engine needs: the host's, or the GPU's with the decoder that is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from visionfast import machine
from visionfast.backends import DeviceEngine
from visionfast.errors import OptionError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.sessions import Session
from visionfast.sessions.embeddings import EmbedSession
from visionfast.sessions.prompts import PromptSession
from visionfast.types import ModelSpec, Runner

if TYPE_CHECKING:
    from visionfast.preprocess.dali import DaliPreprocessor

__all__ = ["open_embed_session", "open_prompt_session", "open_session"]

_DECODE_THREADS = 4  # of one session: there are several, and the GPU decodes


def open_session(
    spec: ModelSpec,
    engine: Runner | DeviceEngine,
    options: Mapping[str, Any],
    limits: DecodeLimits,
    *,
    graph: bool | None = None,
    decoder: Literal["dali", "cpu"] | None = None,
    check_scans: bool = True,
) -> Session:
    """Arguments as for `pipeline.Detector`.

    Raises:
        OptionError: an option that does not exist, or is for engines on a GPU.
        BackendError: the runtime failed; the engine is closed then.
    """
    if decoder not in (None, "dali", "cpu"):
        raise OptionError(f"decoder: expected 'dali' or 'cpu', got {decoder!r}")
    if not isinstance(engine, DeviceEngine):
        if graph or decoder == "dali":
            asked = "graph" if graph else "decoder dali"
            raise OptionError(f"{asked}: expected an engine on a GPU, this one is on the host")
        from visionfast.sessions.host import HostSession

        return HostSession(spec, engine, options=options, limits=limits)

    from visionfast.sessions.cuda import CudaSession

    dali = None
    if decoder == "dali" or (decoder is None and _has_dali(engine)):
        dali = _dali(spec, engine, limits, check_scans)
    return CudaSession(spec, engine, options=options, limits=limits, dali=dali, graph=graph)


def open_prompt_session(
    spec: ModelSpec, encoder: Runner | DeviceEngine, decoder: Runner | DeviceEngine
) -> PromptSession:
    """A prompt segmenter's session, on the host or on the GPU whose stream both engines share.

    Raises:
        BackendError: the runtime failed; both engines are closed then.
    """
    if isinstance(encoder, DeviceEngine) and isinstance(decoder, DeviceEngine):
        from visionfast.sessions.prompts_cuda import CudaPromptSession

        return CudaPromptSession(spec, encoder, decoder)
    assert not isinstance(encoder, DeviceEngine)  # both come from one folder
    assert not isinstance(decoder, DeviceEngine)
    from visionfast.sessions.prompts_host import HostPromptSession

    return HostPromptSession(spec, encoder, decoder)


def open_embed_session(spec: ModelSpec, engines: Sequence[Runner | DeviceEngine], limits: DecodeLimits) -> EmbedSession:
    """An embedder's session, on the host or on a GPU.

    Raises:
        BackendError: the runtime failed; the engines are closed then.
    """
    runners = [engine for engine in engines if not isinstance(engine, DeviceEngine)]
    if len(runners) < len(engines):
        from visionfast.sessions.embed_cuda import CudaEmbedSession

        (engine,) = (engine for engine in engines if isinstance(engine, DeviceEngine))
        return CudaEmbedSession(spec, engine, limits=limits)
    from visionfast.sessions.embed_host import HostEmbedSession

    try:
        return HostEmbedSession(spec, runners, limits=limits)
    except BaseException:
        for runner in runners:
            runner.close()
        raise


def _has_dali(engine: DeviceEngine) -> bool:
    try:
        found = importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # not even its namespace
        found = False
    return found and engine.device.where.type == "cuda"


def _dali(spec: ModelSpec, engine: DeviceEngine, limits: DecodeLimits, check_scans: bool) -> DaliPreprocessor:
    """On the engine's own stream, in its input's dtype."""
    from visionfast.preprocess.dali import DaliPreprocessor

    device, image = engine.device, engine.inputs[0]
    on_gpu = device.where.type == "cuda"
    try:
        return DaliPreprocessor(
            spec.preprocess,
            batch=image.shape[0],
            device="mixed" if on_gpu else "cpu",
            dtype=image.dtype,  # type: ignore[arg-type]
            threads=min(_DECODE_THREADS, machine.usable_cpus()),
            device_id=device.where.index if on_gpu else None,
            limits=limits,
            stream=device.stream if on_gpu else None,
            check_scans=check_scans,
        )
    except BaseException:
        engine.close()
        raise
