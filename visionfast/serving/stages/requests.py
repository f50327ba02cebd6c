"""The server's requests as arrays and options, and arrays and errors as its responses.

By DLPack alone: NVIDIA's stub (pytriton 0.7.0) was built for NumPy 1, and its own conversions are wrong with NumPy 2.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from visionfast import artifacts, machine
from visionfast.errors import ImageError, InputError, OptionError, VisionfastError
from visionfast.loading import check_outputs
from visionfast.preprocess.limits import DecodeLimits
from visionfast.serving.guarded import guarded
from visionfast.serving.options import options_of_request
from visionfast.serving.wire import fault_text, options_of, unpack_image, unpack_options
from visionfast.types import EngineManifest

if TYPE_CHECKING:
    import torch

__all__ = ["Deployed", "array_of", "device_tensor_of", "guarded", "images_of", "refused", "response_of"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Deployed:
    """What a model was told when it was deployed.

    Attributes:
        folder: the engine's.
        manifest: the engine's.
        options: of `options.deployed_options`, where a request says nothing.
        limits: what an image may cost.
        threads: processors of this process: all that there are, shared out among the instances.
        max_batch: images of one call at most.
    """

    folder: Path
    manifest: EngineManifest
    options: Mapping[str, Any]
    limits: DecodeLimits
    threads: int
    max_batch: int

    @classmethod
    def of(cls, args: Mapping[str, str]) -> Deployed:
        """From what the server gives to `initialize`.

        Raises:
            ManifestError: the engine is damaged.
        """
        config = json.loads(args["model_config"])
        told = {name: value["string_value"] for name, value in config["parameters"].items()}
        folder = (Path(args["model_repository"]) / args["model_version"] / told["engine"]).resolve()
        manifest = artifacts.read_manifest(folder)
        check_outputs(folder, manifest)
        instances = sum(group["count"] for group in config["instance_group"])
        return cls(
            folder,
            manifest,
            json.loads(told["options"]),
            DecodeLimits(**json.loads(told["limits"])),
            threads=max(1, machine.usable_cpus() // instances),
            max_batch=config["max_batch_size"],
        )

    def options_of(self, request: Any) -> dict[str, Any]:
        """What holds for the request: its own options, and the deployment's where it says nothing.

        Raises:
            OptionError: one that does not exist, is out of its range, or came as a parameter.
        """
        spec = self.manifest.spec
        # Quietly answered without it, whoever sent it would never know.
        if strays := sorted(set(json.loads(request.parameters() or "{}")) & set(options_of(spec.task))):
            raise OptionError(f"{strays[0]}: expected in the tensor `options`, as JSON, got a parameter of the request")
        return options_of_request(unpack_options(array_of(request, "options")), self.options, spec)


def array_of(request: Any, name: str) -> npt.NDArray[Any]:
    """An input, with the batch in front; the server's memory, to be read until the request is answered."""
    return np.from_dlpack(pb_utils.get_input_tensor_by_name(request, name))


def device_tensor_of(request: Any, name: str) -> torch.Tensor:
    """An input as a torch tensor, on the device where the server has it."""
    from torch.utils.dlpack import from_dlpack

    tensor: torch.Tensor = from_dlpack(pb_utils.get_input_tensor_by_name(request, name))
    return tensor


def images_of(request: Any) -> list[bytes | ImageError]:
    """The request's encoded images, each its own copy."""
    images: list[bytes | ImageError] = []
    for image, length in zip(array_of(request, "image"), array_of(request, "length"), strict=True):
        try:
            images.append(unpack_image(image, length))
        except ImageError as error:
            images.append(error.with_traceback(None))
    return images


def response_of(arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    """An answer; every array owns its memory and none is empty."""
    return pb_utils.InferenceResponse([_tensor(name, array) for name, array in arrays.items()])


_USED = ctypes.c_char_p(b"used_dltensor")
_set_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


def _tensor(name: str, array: npt.NDArray[Any]) -> Any:
    capsule = array.__dlpack__()
    tensor = pb_utils.Tensor.from_dlpack(name, capsule)
    # The stub takes the memory and calls the capsule "used_dlpack"; the standard's word, which NumPy looks for when the
    # capsule goes, is this one. Without it NumPy writes a traceback into the log for every tensor (pytriton 0.7.0).
    _set_capsule_name(capsule, _USED)
    return tensor


def refused(error: VisionfastError) -> Any:
    """The answer to a request that has none."""
    code = pb_utils.TritonError.INVALID_ARG if isinstance(error, InputError) else pb_utils.TritonError.INTERNAL
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(fault_text(error), code))
