"""The pipelines of NVIDIA's container on a GPU.

    fused      image ─→ NAME (Python: the session of `predict`) ─→ objects
    ensemble   image ─→ NAME_intake (Python, CPU) ─→ NAME_preprocess (DALI) ─→ NAME_engine (TensorRT)
                     ─→ NAME_postprocess (Python, GPU) ─→ objects

Of an ensemble, encoded bytes go up to the GPU and boxes, scores, classes and masks as run lengths come down; what is
between stays there. DALI ends the process on some images, and one that it cannot decode fails all that are decoded with
it, so no bytes reach it as a client sent them: `preprocess.dali_feed` says what does. What a row of its answer was made
from is checked: its ticket travels through DALI and is compared behind it.

TensorRT's engines are compiled for a fixed batch. Triton puts requests together only where a model takes any number of
images up to the most, so the engine's step takes one image at a time and says so in its shapes; several are answered
at once by several instances. An engine for more images is for the fused layout, which fills its slots itself.
"""

from __future__ import annotations

from pathlib import Path

from visionfast.errors import OptionError
from visionfast.preprocess.dali_feed import PLACEHOLDER, TICKET, packed, ticket_of
from visionfast.serving.ensemble import Layout, Pipeline, Stage, links_of
from visionfast.serving.wire import WireTensor, inputs_of, outputs_of
from visionfast.types import EngineManifest, ModelSpec, Task

__all__ = ["check_engine_fits", "nvidia_pipeline", "single_image_stage"]

SERVED: tuple[Task, ...] = ("detect", "segment")
_REFUSED: dict[Task, str] = {
    "prompt-segment": "its encoder's result is kept between clicks, in one process: `predict` and the Python API do it",
    "embed": "the GPU's stages of this release end in boxes: `visionfast embed` and the Python API do it",
}


def nvidia_pipeline(name: str, spec: ModelSpec, layout: Layout) -> Pipeline:
    """See `topology.pipeline_of`.

    Raises:
        OptionError: a task that is not served, or an ensemble's engine for more than one image.
    """
    if spec.task not in SERVED:
        raise OptionError(f"{spec.name}: a model for {spec.task}, not served on target nvidia; {_REFUSED[spec.task]}")
    given, gotten = inputs_of(spec.task), outputs_of(spec.task)
    if layout == "fused":
        stages: tuple[Stage, ...] = (Stage(name, "fused", given, gotten, module="fused_gpu", on_gpu=True),)
    else:
        stages = _steps(name, spec)
    return Pipeline(name, layout, stages, links_of(stages, given, gotten), given, gotten)


def _steps(name: str, spec: ModelSpec) -> tuple[Stage, ...]:
    given, gotten = inputs_of(spec.task), outputs_of(spec.task)
    image = spec.graphs[0].inputs[0]
    encoded = WireTensor("encoded", "uint8", (-1,))  # the name of the DALI graph's input
    network_input = WireTensor(image.name, image.dtype, image.shape[1:])
    # DALI's outputs go by their order: as `input_pipeline` with a trailer has them.
    decoded_hw, told = WireTensor("decoded_hw", "int64", (2,)), WireTensor("told", "int32", (5,))
    ticket = WireTensor("ticket", "int32", (TICKET,))
    intake_ns = WireTensor("intake_ns", "int64", (1,))
    raw = tuple(WireTensor(tensor.name, tensor.dtype, tensor.shape[1:]) for tensor in spec.graphs[0].outputs)
    early = tuple(tensor for tensor in gotten if tensor.name in ("image_hw", "problem"))
    late = tuple(tensor for tensor in gotten if tensor not in early)
    image_hw, options = early[0], given[-1]
    return (
        Stage(f"{name}_intake", "intake", given, (encoded, ticket, *early, intake_ns)),
        Stage(
            f"{name}_preprocess",
            "preprocess",
            (encoded,),
            (network_input, decoded_hw, told),
            backend="dali",
            on_gpu=True,
            instances=1,  # each holds memory for a whole batch of decoded images
            options={"num_threads": "4"},
            samples={encoded.name: packed([PLACEHOLDER], ticket_of(PLACEHOLDER, 0)[None]).tobytes()},
        ),
        single_image_stage(spec, f"{name}_engine", network_input, raw, backend="tensorrt", on_gpu=True),
        Stage(
            f"{name}_postprocess",
            "postprocess",
            (*raw, image_hw, options, ticket, decoded_hw, told, intake_ns),
            late,
            module="device_postprocess",
            on_gpu=True,
        ),
    )


def single_image_stage(
    spec: ModelSpec,
    name: str,
    network_input: WireTensor,
    raw: tuple[WireTensor, ...],
    **stage: object,
) -> Stage:
    """The engine as a model of a backend that is not ours: it takes one image, and its shapes say so.

    Raises:
        OptionError: it takes more.
    """
    if spec.batch != 1:
        raise OptionError(
            f"{spec.name}: an ensemble takes an engine for one image, got one for {spec.batch}, which the server would "
            "give no fewer; deploy it --layout fused, or build one --batch 1"
        )
    return Stage(name, "engine", (network_input,), raw, batched=False, **stage)  # type: ignore[arg-type]


def check_engine_fits(folder: Path, manifest: EngineManifest, layout: Layout) -> None:
    """Whether NVIDIA's container can run an engine.

    Raises:
        OptionError: it is for another kind of machine, or its file is not one that the ensemble's backend loads.
    """
    if manifest.device == "cpu":
        raise OptionError(
            f"{folder}: an engine for the cpu; target nvidia runs those for a GPU: build one with `visionfast build "
            "--backend tensorrt` on it"
        )
    if layout == "ensemble" and manifest.backend != "tensorrt":
        raise OptionError(
            f"{folder}: an engine of {manifest.backend}, which the server's TensorRT backend does not load; deploy it "
            "--layout fused, or build one with `visionfast build --backend tensorrt`"
        )
    image = manifest.spec.graphs[0].inputs[0]
    if layout == "ensemble" and (image.layout, image.dtype) not in (("NCHW", "float32"), ("NCHW", "float16")):
        raise OptionError(
            f"{folder}: an ensemble's engine takes NCHW float32 or float16, as DALI makes it, got {image.layout} "
            f"{image.dtype}; build it again"
        )
