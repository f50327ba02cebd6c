"""The publishers' own predictors and generators, eager FP32 PyTorch: what visionfast's figures and answers for Segment
Anything stand beside.

SAM's are in the package `segment-anything`; MobileSAM's are the same ones around the TinyViT that ultralytics has;
SAM 2's are in `sam2`, which nothing but this comparison needs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from visionfast import machine
from visionfast.errors import BackendUnavailableError

if TYPE_CHECKING:
    from visionfast.checkpoint import Checkpoint

__all__ = ["official_generator", "official_predictor"]

_SAM2_CONFIGS = {"tiny": "t", "small": "s", "base_plus": "b+", "large": "l"}


def official_predictor(checkpoint: Checkpoint, architecture: str) -> Any:
    """A `SamPredictor` or `SAM2ImagePredictor`: `set_image(rgb)`, then `predict(point_coords=…, box=…)`.

    Args:
        checkpoint: opened; it is loaded strictly.
        architecture: as `ModelSpec.architecture` says: `sam_vit_b`, `mobile_sam`, `sam2.1_hiera_tiny`.

    Raises:
        BackendUnavailableError: the publisher's package is missing.
    """
    model = _model(checkpoint, architecture)
    if architecture.startswith("sam2"):
        from sam2.sam2_image_predictor import SAM2ImagePredictor

        with _quiet():
            return SAM2ImagePredictor(model)
    from segment_anything import SamPredictor

    return SamPredictor(model)


def official_generator(checkpoint: Checkpoint, architecture: str, **options: Any) -> Any:
    """A `SamAutomaticMaskGenerator` or `SAM2AutomaticMaskGenerator` with their own options: `generate(rgb)`.

    Arguments and errors as for `official_predictor`.
    """
    model = _model(checkpoint, architecture)
    if architecture.startswith("sam2"):
        from sam2.automatic_mask_generator import SAM2AutomaticMaskGenerator

        with _quiet():
            return SAM2AutomaticMaskGenerator(model, **options)
    from segment_anything import SamAutomaticMaskGenerator

    return SamAutomaticMaskGenerator(model, **options)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notice that `sam2` uses a function of its that is on its way out."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=r".*torch\.jit\.script")
        yield


def _model(checkpoint: Checkpoint, architecture: str) -> Any:
    package = "sam2" if architecture.startswith("sam2") else "segment_anything"
    if missing := machine.missing_packages("torch", package):
        raise BackendUnavailableError(f"{architecture}: its publisher's own predictor needs {', '.join(missing)}")
    import torch

    torch.set_num_threads(machine.usable_cpus())
    model = _sam2(architecture) if package == "sam2" else _sam(architecture)
    model.load_state_dict({name: tensor.float() for name, tensor in checkpoint.state_dict.items()})
    return model.eval()


def _sam2(architecture: str) -> Any:
    from sam2.build_sam import build_sam2

    generation, _, size = architecture.partition("_hiera_")
    return build_sam2(f"configs/{generation}/{generation}_hiera_{_SAM2_CONFIGS[size]}.yaml", device="cpu")


def _sam(architecture: str) -> Any:
    import segment_anything

    if architecture != "mobile_sam":
        return segment_anything.sam_model_registry[architecture.removeprefix("sam_")]()
    from ultralytics.models.sam.build import build_mobile_sam

    sam = segment_anything.sam_model_registry["vit_b"]()  # whose prompt encoder and mask decoder MobileSAM has
    sam.image_encoder = build_mobile_sam().image_encoder  # type: ignore[no-untyped-call]
    return sam
