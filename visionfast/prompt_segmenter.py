"""Masks for clicks and boxes: an image is encoded once, and every prompt on it is answered from what was kept."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from visionfast import artifacts
from visionfast.backends import DeviceEngine
from visionfast.embedding import Embedding, KeyedImage, check_key, embedding_key, image_key, model_key
from visionfast.embedding_cache import CacheStats, EmbeddingCache, Transfer
from visionfast.errors import OptionError
from visionfast.loading import check_outputs, load_graphs, runs_here
from visionfast.postprocess.answer import Answer
from visionfast.postprocess.choose import choose_masks
from visionfast.preprocess.antialias import geometry
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.prompts import no_boxes, prompt_tensors
from visionfast.results import Masks
from visionfast.sessions import ImageSource, pixels_of
from visionfast.sessions.opening import open_prompt_session
from visionfast.sessions.prompts import Features, PromptSession
from visionfast.types import EngineManifest, Letterbox, ModelSpec, PromptSpec, PromptTensors, Runner

__all__ = ["EncodedImage", "PromptSegmenter"]

_Self = TypeVar("_Self", bound="PromptSegmenter")
_CACHE_BYTES = 1 << 30  # some 250 images of SAM, 60 of SAM 2


@dataclass(frozen=True, slots=True, eq=False)
class EncodedImage:
    """An image that prompts can be asked about, by the segmenter that encoded it or another one of the same engine.

    Attributes:
        image_hw: the original image, pixels, after its EXIF orientation.
        placed: where it lies in the network's input.
        features: the encoder's outputs; read-only.
        model: which engine they are of.
        stage_ns: nanoseconds of `hash`, and where it was not in the cache `decode`, `preprocess` and `encoder`; also
            `turn`, the wait for other threads' images.
    """

    image_hw: tuple[int, int]
    placed: Letterbox
    features: Features = field(repr=False)
    model: str
    stage_ns: Mapping[str, int] = field(default_factory=dict, repr=False)


class PromptSegmenter:
    """Finds the masks that clicks and boxes mean. One engine and a cache of encoded images; a context manager.

    Safe for several threads: they take turns at the encoder and at the decoder, and an image that several of them ask
    about at the same time is encoded once.

    Args:
        spec: of the model.
        encoder, decoder: its two graphs, both on the host or both on one GPU's stream; closed with the segmenter.
        cache: of encoded images, which may be shared with other segmenters; default: one of its own.
        cache_bytes: of the cache of its own, at most; 0 keeps nothing. Default: 1 GiB.
        cache_folder: where its own cache also keeps encoded images on disk; `None`: nowhere.
        limits: what an image may claim.
        manifest: of the engine, which tells its encoded images from those of other engines in a shared cache.

    Raises:
        OptionError: the model has another task, or an option is out of its range.
        BackendError: the runtime failed; both engines are closed then.
    """

    task = "prompt-segment"

    def __init__(
        self,
        spec: ModelSpec,
        encoder: Runner | DeviceEngine,
        decoder: Runner | DeviceEngine,
        *,
        cache: EmbeddingCache | None = None,
        cache_bytes: int | None = None,
        cache_folder: str | os.PathLike[str] | None = None,
        limits: DecodeLimits | None = None,
        manifest: EngineManifest | None = None,
    ) -> None:
        if spec.task != self.task or spec.prompts is None:
            raise OptionError(f"{spec.name}: a model for {spec.task}; `visionfast.open` opens it")
        self.spec = spec
        self.manifest = manifest
        self._prompts: PromptSpec = spec.prompts
        self._limits = limits or DecodeLimits()
        if cache is None:
            cache = EmbeddingCache(_CACHE_BYTES if cache_bytes is None else cache_bytes, folder=cache_folder)
        elif cache_bytes is not None or cache_folder is not None:
            raise OptionError("cache: expected it, or cache_bytes and cache_folder for one of its own; got both")
        self._cache = cache
        self._model = model_key(manifest, spec, limits=self._limits, where=_where(encoder))
        self._transfer = _transfer(encoder)
        self.session: PromptSession = open_prompt_session(spec, encoder, decoder)

    @classmethod
    def open(
        cls: type[_Self],
        engine: str | os.PathLike[str],
        *,
        threads: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> _Self:
        """Opens an engine's folder.

        Args:
            engine: its path, or the name of a model that has one engine under engines/.
            threads: processors to compute on; default: all that this process may use.
            device: `cpu`, `cuda` or `cuda:1`; default: what the engine was built for, the first of its kind.
            options: `cache`, `cache_bytes`, `cache_folder` and `limits`, as for the class.

        Raises:
            ArtifactError, ManifestError: there is no such engine, or its files are not those it was built with.
            BackendError: this machine cannot run it.
            OptionError: an option does not exist or is out of its range.
        """
        folder = artifacts.find_engine(engine, usable=runs_here)
        # Verified: what is cached, here and by OpenVINO, is told apart by the hashes in engine.json.
        manifest = artifacts.read_manifest(folder, verify=True)
        return cls.from_folder(folder, manifest, threads=threads, device=device, **options)

    @classmethod
    def from_folder(
        cls: type[_Self],
        folder: Path,
        manifest: EngineManifest,
        *,
        threads: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> _Self:
        """`open`, once the engine was found and its manifest read."""
        known = ("cache", "cache_bytes", "cache_folder", "limits")
        if unknown := sorted(set(options) - set(known)):
            raise OptionError(f"option {unknown[0]!r}: expected one of {', '.join(known)}")
        check_outputs(folder, manifest)
        if manifest.spec.task != cls.task:
            raise OptionError(f"{manifest.spec.name}: a model for {manifest.spec.task}; `visionfast.open` opens it")
        encoder, decoder = load_graphs(folder, manifest, threads=threads, device=device)
        try:
            return cls(manifest.spec, encoder, decoder, manifest=manifest, **options)
        except BaseException:
            encoder.close()
            decoder.close()
            raise

    # ---- the two calls ------------------------------------------------------------------------------------

    def encode(self, image: ImageSource) -> EncodedImage:
        """The expensive part: once for each image, and not again while the cache has it.

        Args:
            image: a path, encoded bytes, an (H, W, 3) uint8 RGB array (also (H, W), (H, W, 1), RGBA), or a frame of
                video (`Nv12Frame`).

        Raises:
            ImageError: it is no image, a damaged one, or over the limits.
            BackendError: the runtime failed.
        """
        return self._asked(image)

    def segment(
        self,
        image: EncodedImage | ImageSource,
        *,
        points: Any = None,
        boxes: Any = None,
        mask_input: npt.NDArray[np.float32] | None = None,
        multimask: bool = False,
        logits: bool = False,
    ) -> Masks:
        """The cheap part: the masks for prompts on one image.

        Args:
            image: what `encode` gave, or an image, which is encoded first where the cache does not have it.
            points: `[(x, y, label), …]`, original pixels, label 1 on the object and 0 beside it: one prompt; or
                (P, N, 3), P prompts of N points.
            boxes: `(x1, y1, x2, y2)`, original pixels, one prompt; or (P, 4), P prompts. With points, a prompt has
                both.
            mask_input: (P, 256, 256) float32 `Masks.logits` of an earlier answer, for prompts that go on from it.
            multimask: three masks a prompt, for prompts that may mean several things (one click on a shirt: the
                shirt, the person?), instead of one.
            logits: also give each mask's logits.

        Returns:
            P masks, or 3 P with `multimask`; none where `boxes` is (0, 4), as a detector's are where it finds nothing.

        Raises:
            OptionError: no prompt, or one that does not fit the image; the message says which.
            ImageError, BackendError: as for `encode`.
        """

        def prompts_on(placed: Letterbox) -> PromptTensors:
            return prompt_tensors(
                points,
                boxes,
                mask_input=mask_input,
                placed=placed,
                spec=self._prompts,
                most_points=self.session.points,
            )

        if no_boxes(points, boxes):
            return Masks.empty(self._size_of(image))
        encoded = self._own(image) if isinstance(image, EncodedImage) else self._asked(image, check=prompts_on)
        tensors = prompts_on(encoded.placed)
        before = {} if encoded is image else encoded.stage_ns
        answer = Answer(encoded.placed, {**before, "decoder": 0, "postprocess": 0})
        for first, some in tensors.chunks(self.session.prompts):
            started = perf_counter_ns()
            decoded = self.session.decode(encoded.features, some)
            decoded_at = perf_counter_ns()
            answer.add(
                decoded, choose_masks(decoded, self._prompts, multimask), first, self._prompts if logits else None
            )
            answer.stage_ns["decoder"] += decoded_at - started
            answer.stage_ns["postprocess"] += perf_counter_ns() - decoded_at
        return answer.masks()

    def everything(self, image: ImageSource, **options: Any) -> Masks:
        """The masks of everything in an image: a grid of points, filtered, duplicates removed.

        Args:
            image: as for `encode`.
            options: of `visionfast.everything.everything`: `points_per_side`, `score_threshold`,
                `stability_threshold`, `nms_threshold`, `crop_layers`, `min_area` and others.

        Raises:
            OptionError: an option that does not exist or is out of its range.
            ImageError, BackendError: as for `encode`.
        """
        from visionfast.everything import everything

        if isinstance(image, EncodedImage):
            raise OptionError(
                "everything: expected an image, got an encoded one; give the image itself, for its pixels: what was "
                "encoded is taken from the cache"
            )
        if unknown := sorted(set(options) - set(known := _keywords(everything))):
            raise OptionError(f"option {unknown[0]!r}: expected one of {', '.join(known)}")
        started = perf_counter_ns()
        name = _name(image)
        keyed = image_key(image, limits=self._limits, name=name)
        hashed = perf_counter_ns()
        pixels = pixels_of(keyed.source, limits=self._limits, name=name)
        before = {"hash": hashed - started, "decode": perf_counter_ns() - hashed}

        def encode(crop: npt.NDArray[np.uint8], stage_ns: dict[str, int]) -> Features:
            # The whole picture under the key that clicks on it have; crops by their pixels.
            key = keyed.key if crop.shape == pixels.shape else image_key(crop).key
            return self._encode(KeyedImage(key, crop), name, stage_ns).features

        found = everything(pixels, self.session, self.spec, encode=encode, **options)
        return replace(found, stage_ns=before | {k: v for k, v in found.stage_ns.items() if k not in before})

    def keeps(self, key: str) -> bool:
        """Whether `kept` has it; counts as no use of it."""
        return embedding_key(self._model, key) in self._cache

    def kept(self, key: str) -> EncodedImage | None:
        """An image that the cache has in memory, by its `visionfast.embedding.image_key`; `None`: it does not.

        Raises:
            OptionError: `key` is not 64 hex digits.
        """
        check_key(key)
        if (embedding := self._cache.kept(embedding_key(self._model, key))) is None:
            return None
        return EncodedImage(embedding.placed.image_hw, embedding.placed, embedding.features, self._model)

    # ---- around them --------------------------------------------------------------------------------------

    def cache_stats(self) -> CacheStats:
        """What the cache of encoded images holds, and how often it was asked."""
        return self._cache.stats()

    def close(self) -> None:
        """Frees the engine; the cache stays as it is, for others that share it. Closing twice is harmless."""
        self.session.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, image: ImageSource, check: Callable[[Letterbox], object] | None = None) -> EncodedImage:
        """What the caller wants encoded; `check` is asked before that is paid for."""
        started = perf_counter_ns()
        name = _name(image)
        keyed = image_key(image, limits=self._limits, name=name)
        return self._encode(keyed, name, {"hash": perf_counter_ns() - started}, check)

    def _encode(
        self,
        image: KeyedImage,
        name: str,
        stage_ns: dict[str, int],
        check: Callable[[Letterbox], object] | None = None,
    ) -> EncodedImage:
        key = embedding_key(self._model, image.key)
        decoded: list[npt.NDArray[np.uint8]] = []

        def pixels() -> npt.NDArray[np.uint8]:
            if not decoded:
                began = perf_counter_ns()
                decoded.append(pixels_of(image.source, limits=self._limits, name=name))
                stage_ns["decode"] = perf_counter_ns() - began
            return decoded[0]

        def make() -> Embedding:
            return Embedding(self.session.encode(pixels(), stage_ns), self._place(pixels()))

        # Not in `make`: those who wait for the same image have prompts of their own.
        if check is not None and key not in self._cache:
            check(self._place(pixels()))
        embedding = self._cache.get(key, make, transfer=self._transfer)
        return EncodedImage(embedding.placed.image_hw, embedding.placed, embedding.features, self._model, stage_ns)

    def _size_of(self, image: EncodedImage | ImageSource) -> tuple[int, int]:
        if isinstance(image, EncodedImage):
            return self._own(image).image_hw
        height, width = pixels_of(image, limits=self._limits, name=_name(image)).shape[:2]
        return height, width

    def _place(self, pixels: npt.NDArray[np.uint8]) -> Letterbox:
        return geometry((pixels.shape[0], pixels.shape[1]), self.spec.preprocess)

    def _own(self, image: EncodedImage) -> EncodedImage:
        if image.model != self._model:
            raise OptionError(
                f"{self.spec.name}: expected an image that this engine encoded, got another engine's; encode it again"
            )
        return image


def _keywords(function: Callable[..., Any]) -> list[str]:
    """What `PromptSegmenter.everything` hands on to it."""
    own = ("features", "encode")
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in own]


def _name(image: ImageSource) -> str:
    return os.fspath(image) if isinstance(image, (str, os.PathLike)) else "image"


def _where(encoder: Runner | DeviceEngine) -> str:
    """The device that features are on; empty for the host."""
    return str(encoder.device.where) if isinstance(encoder, DeviceEngine) else ""


def _transfer(encoder: Runner | DeviceEngine) -> Transfer | None:
    """How features on a device get to the cache's folder and back."""
    if not isinstance(encoder, DeviceEngine):
        return None
    where = encoder.device.where

    def to_device(array: npt.NDArray[Any]) -> Any:
        import torch

        return torch.from_numpy(array.copy()).to(where)  # a copy: what the store gives is read-only

    return Transfer(to_host=lambda tensor: tensor.cpu().numpy(), to_device=to_device)
