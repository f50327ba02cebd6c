"""A batch of encoded images → network inputs through DALI's graph, each image on its own feet.

On `mixed` the inputs are made on the GPU and stay there, on the caller's stream, and nothing here waits for the
device: an image's place in its input is computed from its header, and all that is read back from DALI (the image's
size and serial number) was on the CPU throughout.

An answer cannot be another image's. Every image gets a serial number that no other has had; it travels at the end
of the image's own bytes, comes out beside the input made from them, and is compared. One corrupt image fails its
whole run, so after a failed run each image runs alone, and the bad one fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from visionfast.errors import BackendError, BackendUnavailableError, ImageError, OptionError
from visionfast.preprocess.cpu import CpuPreprocessor
from visionfast.preprocess.cpu_crop import CropPreprocessor
from visionfast.preprocess.dali_admission import admit, scan_damage, too_long
from visionfast.preprocess.dali_batch import CpuDecode, DaliBatch, DaliRow, DaliRun
from visionfast.preprocess.dali_graph import ENCODED, DaliDevice, DaliDtype, input_pipeline, placement, trailer
from visionfast.preprocess.decode import DecodeLimits, decode_image
from visionfast.types import Letterbox, PreprocessSpec

__all__ = ["CpuDecode", "DaliBatch", "DaliPreprocessor", "DaliRow", "DaliRun", "input_pipeline"]

_SERIALS = 2**31  # then they begin again


class _RunError(Exception):
    """DALI refused a run; the message is what it says, in one line."""


@dataclass(frozen=True, slots=True)
class _Admitted:
    index: int
    encoded: bytes
    letterbox: Letterbox


class DaliPreprocessor:
    """Encoded images → network inputs through `input_pipeline`. Not for several threads at once.

    Only what DALI decodes as the definition does reaches it (`dali_admission.admit`); the rest comes back as
    `CpuDecode`, or as the error that says what is wrong. A context manager.

    Args:
        spec: the resize and the normalisation, as in `input_pipeline`.
        batch: images at most in one run of the graph; more are several runs.
        device: `cpu`; `mixed` leaves the inputs on the GPU.
        dtype: of the inputs; `uint8` for engines that normalise inside.
        threads: CPU threads for decoding, and as many for checking scans.
        device_id: the GPU for `mixed`; None for the one that is current now.
        limits: what an image may cost.
        stream: for `mixed`, the CUDA stream that the inputs are for: a torch stream, a `cuda.core` one or anything
            else with `__cuda_stream__`, or a handle. Without one, each run waits until the device is done.
        check_scans: look for damage inside a JPEG's scans too (`DaliBatch.damage`), for half a decode's CPU time.
        hw_decoder_load, expected_hw: as in `input_pipeline`.

    Raises:
        BackendUnavailableError: DALI is not installed; for `mixed` also where there is no NVIDIA driver.
        OptionError: an option or a resize that does not exist.
    """

    def __init__(
        self,
        spec: PreprocessSpec,
        *,
        batch: int = 8,
        device: DaliDevice = "cpu",
        dtype: DaliDtype = "uint8",
        threads: int = 2,
        device_id: int | None = None,
        limits: DecodeLimits | None = None,
        stream: Any = None,
        check_scans: bool = True,
        hw_decoder_load: float = 0.65,
        expected_hw: tuple[int, int] = (1080, 1920),
    ) -> None:
        if stream is not None and device != "mixed":
            raise OptionError(f"stream: expected none for device {device!r}, got {stream!r}; it is for mixed")
        if not _is_stream(stream):
            raise OptionError(f"stream: expected a CUDA stream or its handle, got {stream!r}")
        self.spec = spec
        self.batch = batch
        self.device = device
        self.dtype = dtype
        self.limits = limits or DecodeLimits()
        self._stream = stream
        self._options: dict[str, Any] = {
            "batch": batch,
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "device_id": device_id,
            "hw_decoder_load": hw_decoder_load,
            "expected_hw": expected_hw,
        }
        self._serial = 0
        self._closed = False
        self._held: list[Any] = []  # the last batch's tensors
        self._pipeline = self._built()
        self._checkers = ThreadPoolExecutor(threads, "visionfast-scans") if check_scans else None

    def run(self, images: Sequence[bytes], *, names: Sequence[str] | None = None) -> DaliBatch:
        """All images of a batch; an image that fails harms no other.

        On `mixed`, the tensors are ready on `stream` and only there: view and use them on it (with torch, inside
        `torch.cuda.stream(stream)`). They are nobody else's and are not written again, but must be kept until the
        work that reads them is done. The preprocessor itself keeps a batch's until the next call, so a
        caller that synchronises once a batch has nothing to copy.

        Args:
            images: encoded.
            names: `ImageError.source` of each; otherwise `bytes[i]`.

        Raises:
            BackendError: DALI does not run any more, or gave an answer that is not for the image asked for.
        """
        if self._closed:
            raise BackendError("DALI: expected an open preprocessor, got a closed one; make a new one")
        self._held.clear()
        names = names if names is not None else [f"bytes[{index}]" for index in range(len(images))]
        answers: dict[int, DaliRow | CpuDecode | ImageError] = {}
        checks: dict[int, Future[ImageError | None]] = {}
        admitted = []
        for index, (data, name) in enumerate(zip(images, names, strict=True)):
            try:
                admission = admit(data, limits=self.limits, name=name)
            except ImageError as error:
                answers[index] = error
                continue
            if isinstance(admission, str):
                answers[index] = CpuDecode(index, admission)
                continue
            letterbox = placement(admission.image_hw, self.spec)
            if reason := too_long(letterbox, self.spec):
                answers[index] = CpuDecode(index, reason)
                continue
            admitted.append(_Admitted(index, admission.encoded, letterbox))
            if self._checkers is not None:
                checks[index] = self._checkers.submit(scan_damage, data, limits=self.limits, name=name)
        for start in range(0, len(admitted), self.batch):
            for answer in self._together(admitted[start : start + self.batch]):
                answers[answer.index] = answer
        ordered = tuple(answers[index] for index in range(len(images)))
        runs = {id(answer.run): answer.run for answer in ordered if isinstance(answer, DaliRow)}
        return DaliBatch(ordered, tuple(runs.values()), checks)

    def __call__(self, images: Sequence[bytes]) -> list[tuple[npt.NDArray[Any], Letterbox] | ImageError]:
        """On the CPU: for each image, in order, its input and its place in it, or what is wrong with it.

        The inputs are the caller's own: (h, w, 3) uint8 or (3, h, w) float.

        Raises:
            OptionError: `mixed` leaves its inputs on the GPU: `run` hands them out.
        """
        if self.device != "cpu":
            raise OptionError(f"device: expected cpu, got {self.device!r}; its inputs are had by run()")
        batch = self.run(images)
        damage = batch.damage()
        results: list[tuple[npt.NDArray[Any], Letterbox] | ImageError] = []
        for index, answer in enumerate(batch.answers):
            if index in damage:
                results.append(damage[index])
            elif isinstance(answer, DaliRow):
                results.append((np.from_dlpack(answer.run.tensor)[answer.row].copy(), answer.letterbox))
            elif isinstance(answer, CpuDecode):
                results.append(self._without_dali(images[index], index))
            else:
                results.append(answer)
        return results

    def close(self) -> None:
        """Releases the pipeline and its threads; tensors that are still in use elsewhere live on."""
        self._closed = True
        self._held.clear()
        self._pipeline = None
        if self._checkers is not None:
            self._checkers.shutdown(cancel_futures=True)

    def __enter__(self) -> DaliPreprocessor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- runs of the graph ----------------------------------------------------------------------------------

    def _together(self, images: list[_Admitted]) -> list[DaliRow | CpuDecode]:
        """One run; where it fails, a run for each image."""
        if len(images) > 1:
            try:
                return self._rows(images)
            except _RunError:
                pass
        return [self._alone(image) for image in images]

    def _alone(self, image: _Admitted) -> DaliRow | CpuDecode:
        try:
            return self._rows([image])[0]
        except _RunError as failure:
            refusal = CpuDecode(image.index, f"DALI cannot decode it: {failure}")
        try:  # Is it the image, or is the pipeline dead? A sound picture tells.
            self._probe(1)
        except _RunError:
            self._pipeline = self._built()
            try:
                return self._rows([image])[0]
            except _RunError:
                pass
        return refusal

    def _rows(self, images: list[_Admitted]) -> list[DaliRow | CpuDecode]:
        tensors, sizes_hw = self._outputs([(image.encoded, image.letterbox) for image in images])
        self._held.append(tensors)
        run = DaliRun(tensors.as_tensor(), tuple(image.index for image in images))
        answers: list[DaliRow | CpuDecode] = []
        for row, (image, (height, width)) in enumerate(zip(images, sizes_hw.tolist(), strict=True)):
            expected_h, expected_w = image.letterbox.image_hw
            if (height, width) == (expected_h, expected_w):
                answers.append(DaliRow(image.index, run, row, image.letterbox))
            else:
                reason = f"its header says {expected_w}×{expected_h} pixels, DALI {width}×{height}"
                answers.append(CpuDecode(image.index, reason))
        return answers

    def _outputs(self, images: list[tuple[bytes, Letterbox]]) -> tuple[Any, npt.NDArray[np.int64]]:
        """One run: DALI's list of n inputs, and (n, 2) int64, each image's `(H, W)` as DALI sees it.

        Raises:
            _RunError: an image failed; or the pipeline is dead.
            BackendError: the answers are to other images.
        """
        trailers = np.stack([trailer(self._next_serial(), letterbox) for _, letterbox in images])  # (n, 5)
        pipeline = self._pipeline if self._pipeline is not None else self._built()
        self._pipeline = None  # until it has shown that it is right: what failed half-way is not used again
        pipeline.feed_input(
            ENCODED,
            [np.frombuffer(data + told.tobytes(), np.uint8) for (data, _), told in zip(images, trailers, strict=True)],
        )
        try:
            tensors, sizes_hw, told = pipeline.run(self._stream)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:  # DALI picks one by what went wrong
            self._pipeline = pipeline  # what was fed is used up, and the next run is right
            raise _RunError(_gist(error)) from error
        if not np.array_equal(told.as_array(), trailers):
            expected, got = (serials[:, 0].tolist() for serials in (trailers, told.as_array()))
            raise BackendError(f"DALI: expected images {expected}, got {got}; send the batch again, to a new pipeline")
        self._pipeline = pipeline
        return tensors, sizes_hw.as_array()

    def _next_serial(self) -> int:
        self._serial = (self._serial + 1) % _SERIALS
        return self._serial

    def _built(self) -> Any:
        """A pipeline that has run: what the first run allocates is not paid for by a request."""
        pipeline = input_pipeline(self.spec, with_trailer=True, **self._options)
        try:
            pipeline.build()
        except RuntimeError as error:
            raise BackendUnavailableError(
                f"DALI cannot build its {self.device} pipeline: {_gist(error)}; "
                "mixed needs an NVIDIA GPU and its driver, device cpu needs none"
            ) from error
        self._pipeline = pipeline
        try:
            self._probe(self.batch)
        except _RunError as failure:
            raise BackendError(f"DALI: expected its new {self.device} pipeline to run, got {failure}") from failure
        return pipeline

    def _probe(self, n: int) -> None:
        """Runs n sound pictures. Raises `_RunError` if the pipeline is dead."""
        import simplejpeg

        data = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
        self._outputs([(data, placement((16, 16), self.spec))] * n)

    def _without_dali(self, data: bytes, index: int) -> tuple[npt.NDArray[Any], Letterbox] | ImageError:
        try:
            pixels = decode_image(data, limits=self.limits, name=f"bytes[{index}]")
        except ImageError as error:
            return error
        h, w = self.spec.size_hw
        cpu = CpuPreprocessor(self.spec) if self.spec.resize == "letterbox" else CropPreprocessor(self.spec)
        canvas = np.empty((h, w, 3), np.uint8)
        letterbox = cpu.write(pixels, canvas)
        if self.dtype == "uint8":
            return canvas, letterbox
        planes = np.empty((1, 3, h, w), self.dtype)
        cpu.normalise(canvas[None], planes)
        return planes[0], letterbox


def _is_stream(stream: Any) -> bool:
    """The forms of a CUDA stream that DALI takes, and none at all."""
    forms = ("__cuda_stream__", "cuda_stream", "ptr", "handle")
    return stream is None or isinstance(stream, int) or any(hasattr(stream, form) for form in forms)


def _gist(error: Exception) -> str:
    """The part of DALI's many lines that says what happened."""
    text = str(error).partition("encountered:")[2] or str(error)
    return " ".join(text.partition("Current pipeline object")[0].split()).rstrip(" :")[:200]
