"""An engine's folder → its graphs, loaded where they were built for, once engine.json says that they fit its task."""

from __future__ import annotations

import contextlib
from pathlib import Path

from visionfast import artifacts, machine
from visionfast.backends import DeviceEngine, get_backend
from visionfast.errors import BackendError, ManifestError, OptionError
from visionfast.types import EngineManifest, ModelSpec, Runner, Task
from visionfast.whole_numbers import MAX_THREADS, checked_threads, checked_whole

__all__ = [
    "CANDIDATES",
    "PROMPT_INPUTS",
    "check_outputs",
    "load_graphs",
    "load_streams",
    "runs_here",
    "throughput_streams",
]

PROMPT_INPUTS = ("points", "labels", "mask_input", "has_mask")
"""What a prompt decoder takes, behind the encoder's outputs."""

CANDIDATES = 4
"""Masks that a prompt decoder gives for a prompt."""

_OUTPUTS: dict[Task, tuple[str, ...]] = {
    "detect": ("predictions",),
    "segment": ("predictions", "prototypes"),
    "prompt-segment": ("masks", "scores"),
    "embed": ("cls", "patches"),
}
"""Of the last graph: what the task's post-processing takes."""


def runs_here(manifest: EngineManifest) -> bool:
    """Whether this machine can run an engine."""
    try:
        get_backend(manifest.backend).check_runnable(manifest)
    except (BackendError, OptionError):
        return False
    return True


def check_outputs(folder: Path, manifest: EngineManifest) -> None:
    """Raises `ManifestError` unless the graphs fit one another and give what the task's post-processing takes."""
    where, task = folder / artifacts.MANIFEST_NAME, manifest.spec.task
    graphs = manifest.spec.graphs
    expected = ("encoder", "decoder") if task == "prompt-segment" else (graphs[0].name,)
    if (names := tuple(graph.name for graph in graphs)) != expected:
        raise ManifestError(
            f"{where}: expected the graphs {', '.join(expected)} for {task}, got {', '.join(names)}; "
            "build the engine again"
        )
    if (got := tuple(tensor.name for tensor in graphs[-1].outputs)) != _OUTPUTS[task]:
        raise ManifestError(
            f"{where}: expected the outputs {', '.join(_OUTPUTS[task])} for {task}, got {', '.join(got)}; "
            "build the engine again"
        )
    if task == "prompt-segment":
        _check_decoder(where, manifest.spec)


def _check_decoder(where: Path, spec: ModelSpec) -> None:
    """The encoder takes what the preprocessing makes; the decoder what the encoder gives, and prompts behind it."""
    encoder, decoder = spec.graphs
    h, w = spec.preprocess.size_hw
    if [t.shape for t in encoder.inputs] != [(1, 3, h, w)] or encoder.inputs[0].dtype not in ("float32", "float16"):
        raise ManifestError(
            f"{where}: encoder: expected one input (1, 3, {h}, {w}) float32 or float16, got "
            f"{', '.join(f'{t.shown} {t.dtype}' for t in encoder.inputs)}; build the engine again"
        )
    features = [(tensor.name, tensor.shape, tensor.dtype) for tensor in encoder.outputs]
    taken = [(tensor.name, tensor.shape, tensor.dtype) for tensor in decoder.inputs[: len(features)]]
    prompts = decoder.inputs[len(features) :]
    if taken != features or tuple(tensor.name for tensor in prompts) != PROMPT_INPUTS:
        raise ManifestError(
            f"{where}: decoder: expected the encoder's outputs and then {', '.join(PROMPT_INPUTS)} as its inputs, got "
            f"{', '.join(tensor.name for tensor in decoder.inputs)}; build the engine again"
        )
    p, n = prompts[1].shape if len(prompts[1].shape) == 2 else (0, 0)
    mask = (h // 4, w // 4)
    expected = ((p, n, 2), (p, n), (p, 1, *mask), (p,))
    axes = (("prompts", "points", ""), ("prompts", "points"), ("prompts", "", "", ""), ("prompts",))
    for tensor, shape, named in zip(prompts, expected, axes, strict=True):
        if tensor.shape != shape or tensor.axes != named or tensor.dtype != "float32":
            raise ManifestError(
                f"{where}: {tensor.name}: expected {shape} float32 with the axes {named}, got {tensor.shape} "
                f"{tensor.dtype} with {tensor.axes}; build the engine again"
            )
    masks, scores = (tensor.shape for tensor in decoder.outputs)
    if masks != (p, CANDIDATES, *mask) or scores != (p, CANDIDATES):
        raise ManifestError(
            f"{where}: decoder: expected masks {(p, CANDIDATES, *mask)} and scores {(p, CANDIDATES)}, got {masks} and "
            f"{scores}; build the engine again"
        )
    for axis, most in (("prompts", p), ("points", n)):
        if not 1 <= decoder.usual.get(axis, 0) <= most:
            raise ManifestError(
                f"{where}: decoder: usual: expected 1 to {most} {axis}, got {decoder.usual.get(axis)}; build it again"
            )


def load_graphs(
    folder: Path, manifest: EngineManifest, *, threads: int | None = None, device: str | None = None
) -> list[Runner | DeviceEngine]:
    """Every graph, in order; those on a GPU share one stream.

    Args:
        folder: the engine's.
        manifest: of `check_outputs`.
        threads: processors to compute on, for an engine on the host; default: all that this process may use.
        device: `cpu`, `cuda` or `cuda:1`; default: what the engine was built for, the first of its kind.

    Raises:
        OptionError: the engine is not for that device, or `threads` is out of its range.
        BackendError: this machine cannot run it; nothing stays loaded.
    """
    threads = checked_threads(threads)
    _check_device(manifest, device)
    backend, graphs = get_backend(manifest.backend), manifest.spec.graphs
    with contextlib.ExitStack() as opened:
        loaded: list[Runner | DeviceEngine] = []
        if manifest.device == "cpu":
            for graph in graphs:
                loaded.append(backend.load(folder, manifest, graph, threads=threads))
                opened.callback(loaded[-1].close)
        else:
            from visionfast.cuda import CudaDevice, gpu_index

            index = backend.check_runnable(manifest, device_index=gpu_index(device))
            stream = CudaDevice(index or 0)
            for graph in graphs:
                loaded.append(backend.load_on(stream, folder, manifest, graph))
                opened.callback(loaded[-1].close)
        opened.pop_all()  # all went well: they stay open
    return loaded


def _check_device(manifest: EngineManifest, device: str | None) -> None:
    if (device == "cpu") != (manifest.device == "cpu") and device is not None:
        built, other = ("the cpu", "a GPU") if manifest.device == "cpu" else (manifest.device, "the cpu")
        raise OptionError(f"device {device}: this engine is for {built}; `visionfast build` makes one for {other}")


def load_streams(
    folder: Path,
    manifest: EngineManifest,
    *,
    threads: int | None = None,
    streams: int = 1,
    device: str | None = None,
) -> list[Runner | DeviceEngine]:
    """A model's one graph, `streams` times: runners on the host that compute at the same time, each with its share of
    the threads. An engine on a GPU comes once, whatever `streams` is.

    Arguments and errors as for `load_graphs`; `streams` is at most `threads`.
    """
    threads = checked_threads(threads)
    most = threads or machine.usable_cpus() if manifest.device == "cpu" else MAX_THREADS
    streams = checked_whole("streams", streams, most, "one a thread")
    if manifest.device != "cpu" or streams == 1:
        return load_graphs(folder, manifest, threads=threads, device=device)
    _check_device(manifest, device)
    (graph,) = manifest.spec.graphs
    backend = get_backend(manifest.backend)
    return list(backend.load_streams(folder, manifest, graph, streams=streams, threads=threads))


def throughput_streams(manifest: EngineManifest, *, threads: int | None = None) -> int:
    """Streams that give the most images a second where nobody waits for a single one: one a thread on a CPU, so that no
    thread waits for another at the end of every layer; one on a GPU.

    DINOv2 ViT-S/14 at 224 in OpenVINO 2026.4, FP32, on two processors, images a second on ready tensors: 14.9 on one
    stream of two threads, 19.1 on two streams; an engine of batch 4: 19.0 and 20.7. (Medians of four or five passes
    over 16 images, in turns, in which others took less than a tenth of the processors.) The vectors were the same to
    the bit.
    """
    if manifest.device != "cpu":
        return 1
    return checked_threads(threads) or machine.usable_cpus()
