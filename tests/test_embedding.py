"""One changed byte in an image or in a model is another key; what is cached cannot be written to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from visionfast.embedding import Embedding, check_key, embedding_key, image_key, model_key
from visionfast.errors import ImageError, ImageFormatError, ImageNotFoundError, ImageTooLargeError, OptionError
from visionfast.preprocess.limits import DecodeLimits
from visionfast.preprocess.nv12 import Nv12Frame
from visionfast.types import Certificate, EngineManifest, GraphSpec, Letterbox, ModelSpec, PreprocessSpec, TensorSpec

PLACED = Letterbox((30, 40), (1024, 1024), (768, 1024), 0, 0, 25.6)


def _key(source: Any, **options: Any) -> str:
    key = image_key(source, **options).key
    check_key(key)
    return key


# ---- embeddings -------------------------------------------------------------------------------------------


def test_what_is_kept_is_read_only_and_its_own() -> None:
    owner = np.arange(12, dtype=np.float32)
    view = owner.reshape(3, 4)[1:]
    embedding = Embedding({"owner": owner, "view": view, "empty": np.zeros((0, 2), np.float16)}, PLACED)
    assert embedding.nbytes == 48 + 32
    assert embedding.features["owner"] is owner
    for array in embedding.features.values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(TypeError):
        embedding.features["view"] = owner  # type: ignore[index]

    live = np.arange(4, dtype=np.float32)
    kept = Embedding({"x": live[:2]}, PLACED).features["x"]
    live[:] = 7
    assert kept.tolist() == [0, 1]


def test_tensors_count_by_their_bytes() -> None:
    torch = pytest.importorskip("torch", reason="device tensors are torch's: pip install 'visionfast[gpu]'")
    assert Embedding({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.float16)}, PLACED).nbytes == 24 + 10


# ---- images -----------------------------------------------------------------------------------------------


def test_encoded_images_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"an image")
    key, source = image_key(tmp_path / "a.jpg")
    assert source == b"an image"
    spread = memoryview(bytes(b for value in b"an image" for b in (value, 0)))[::2]
    for same in (str(tmp_path / "a.jpg"), b"an image", bytearray(b"an image"), memoryview(b"an image"), spread):
        assert image_key(same) == (key, b"an image")

    buffer = bytearray(b"an image")
    key, source = image_key(buffer)
    buffer[:] = b"changed!"
    assert (key, source) == (_key(b"an image"), b"an image")


@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_changed_byte_is_another_image(content: bytes, data: st.DataObject) -> None:
    changed = bytearray(content)
    changed[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    kinds = [content, bytes(changed), content + b"\0", np.frombuffer(content, np.uint8)[None]]
    assert len({_key(kind) for kind in kinds}) == len(kinds)


@given(arrays(np.uint8, st.tuples(st.integers(0, 4), st.integers(0, 4), st.sampled_from([1, 3, 4]))))
def test_arrays_by_shape_and_pixels_whatever_their_strides(pixels: np.ndarray) -> None:
    key = _key(pixels)
    wide = np.zeros((*pixels.shape[:2], 8), np.uint8)
    wide[:, :, : pixels.shape[2]] = pixels
    for same in (np.asfortranarray(pixels), wide[:, :, : pixels.shape[2]], pixels[::-1].copy()[::-1]):
        assert _key(same) == key
    assert _key(pixels.ravel()) != key
    assert _key(pixels.tobytes() or b"\0") != key
    turned = pixels.reshape(pixels.shape[1], pixels.shape[0], pixels.shape[2])
    assert (_key(turned) == key) == (turned.shape == pixels.shape)


def test_frames_by_planes_matrix_and_range() -> None:
    y, uv = np.zeros((4, 2), np.uint8), np.zeros((2, 1, 2), np.uint8)
    moved = y.copy()
    moved[3, 1] = 1
    tinted = uv.copy()
    tinted[0, 0, 0] = 1
    frames = [
        Nv12Frame(y, uv),
        Nv12Frame(moved, uv),
        Nv12Frame(y, tinted),
        Nv12Frame(y, uv, matrix="bt709"),
        Nv12Frame(y, uv, full_range=True),
        Nv12Frame(y.reshape(2, 4), uv.reshape(1, 2, 2)),
        Nv12Frame(uv, y),
    ]
    assert len({_key(frame) for frame in frames} | {_key(y), _key(uv)}) == len(frames) + 2
    assert _key(Nv12Frame(y.copy(), uv.copy())) == _key(frames[0])


def test_what_is_no_image(tmp_path: Path) -> None:
    y, uv = np.zeros((4, 2), np.uint8), np.zeros((2, 1, 2), np.uint8)
    wrong: list[tuple[Any, type[ImageError], str]] = [
        (tmp_path / "none.jpg", ImageNotFoundError, f"{tmp_path}/none.jpg: no such file"),
        (tmp_path, ImageNotFoundError, f"{tmp_path}: expected an image file, got a directory"),
        (b"123456789", ImageTooLargeError, "bytes: expected at most 8 bytes, got 9"),
        (np.zeros((2, 2, 3), np.float32), ImageFormatError, r"array: expected a uint8 array, got \(2, 2, 3\) float32"),
        (np.array([None]), ImageFormatError, "array: expected a uint8 array"),
        (Nv12Frame([1], uv), ImageFormatError, "frame: y: expected a numpy.ndarray on the host, got list"),
        (Nv12Frame(y, uv.astype(np.int8)), ImageFormatError, "frame: uv: expected a uint8 array"),
        (7, ImageFormatError, "int: expected a path, encoded bytes or a uint8 RGB array, got int"),
    ]
    for source, kind, message in wrong:
        with pytest.raises(kind, match=f"^{message}"):
            image_key(source, limits=DecodeLimits(max_bytes=8))
    with pytest.raises(ImageFormatError, match=r"^image 3: "):
        image_key(7, name="image 3")  # type: ignore[arg-type]


# ---- models -----------------------------------------------------------------------------------------------


def _manifest() -> EngineManifest:
    graph = GraphSpec("encoder", (TensorSpec("images", (1, 3, 8, 8), "float32", "NCHW"),), ())
    spec = ModelSpec(
        "sam",
        "sam",
        "vit_b",
        "prompt-segment",
        (graph,),
        PreprocessSpec((8, 8), "longest-side", pad_value=None),
        (),
        (),
    )
    return EngineManifest(
        spec=spec,
        backend="openvino",
        precision="fp32",
        device="cpu",
        runtime_version="2026.1.0",
        files={"encoder": "encoder.xml"},
        sha256={"encoder.xml": "0" * 64, "encoder.bin": "1" * 64},
        onnx_sha256={"encoder": "2" * 64},
        weights_sha256="3" * 64,
        keep_fp32=(),
        certificate=Certificate("passed"),
        created="2026-01-01T00:00:00+00:00",
        visionfast_version="0.0",
    )


def test_whatever_changes_features_changes_the_models_key() -> None:
    manifest = _manifest()
    preprocess = dataclasses.replace(manifest.spec.preprocess, mean=(0.1, 0.0, 0.0))
    others = [
        dataclasses.replace(manifest, **changed)
        for changed in (
            {"weights_sha256": "3" * 63 + "4"},
            {"onnx_sha256": {"encoder": "2" * 63 + "3"}},
            {"sha256": {"encoder.xml": "0" * 64, "encoder.bin": "1" * 63 + "2"}},
            {"precision": "fp16"},
            {"backend": "tensorrt"},
            {"device": "sm90"},
            {"runtime_version": "2026.2.0"},
            {"spec": dataclasses.replace(manifest.spec, preprocess=preprocess)},
        )
    ]
    keys = [model_key(each, each.spec) for each in [manifest, *others]]
    keys.append(model_key(manifest, manifest.spec, DecodeLimits(allow_truncated=True)))
    keys.append(model_key(manifest, manifest.spec, where="cuda:0"))
    keys.append(model_key(manifest, manifest.spec, where="cuda:1"))
    assert len(set(keys)) == len(keys)

    again = dataclasses.replace(_manifest(), created="later", sha256=dict(reversed(manifest.sha256.items())))
    assert model_key(again, again.spec) == keys[0]


def test_models_without_a_manifest_share_nothing() -> None:
    spec = _manifest().spec
    assert model_key(None, spec) != model_key(None, spec)


def test_keys_of_both() -> None:
    keys = {embedding_key(model, image) for model in ("0" * 64, "1" * 64) for image in ("0" * 64, "1" * 64)}
    assert len(keys) == 4
    for key in keys:
        check_key(key)


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "a" * 63, "a" * 65, "A" * 64, "a" * 64 + "\n", "٠" * 64, None])
def test_what_is_no_key(key: Any) -> None:
    with pytest.raises(OptionError, match=r"^key: expected 64 lower-case hex digits, got"):
        check_key(key)
