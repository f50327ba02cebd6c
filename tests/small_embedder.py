"""An embedder in miniature: DINOv2's network of two blocks, as a real engine's folder."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from visionfast import artifacts
from visionfast._version import __version__
from visionfast.backends import CompileRequest, get_backend
from visionfast.export import export_onnx
from visionfast.families.dino_modules import VisionTransformer
from visionfast.families.dino_published import PUBLISHED
from visionfast.types import Certificate, EngineManifest, GraphSpec, ModelSpec, PreprocessSpec, TensorSpec

__all__ = ["build_small", "pictures", "small_network", "small_spec"]

SIZE, GRID, WIDTH = (56, 42), (4, 3), 384


def small_spec(batch: int = 1, *, dtype: str = "float32", outputs: str = "float32", **preprocess: Any) -> ModelSpec:
    graph = GraphSpec(
        "model",
        (TensorSpec("images", (batch, 3, *SIZE), dtype, "NCHW"),),
        (TensorSpec("cls", (batch, WIDTH), outputs), TensorSpec("patches", (batch, *GRID, WIDTH), outputs)),
    )
    fields: dict[str, Any] = {"resize": "centre-crop", "cover_hw": (64, 48), "interpolation": "bicubic-antialias"}
    fields |= {"pad_value": 0, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    made = PreprocessSpec(SIZE, **fields | preprocess)
    return ModelSpec("small", "dino", "dinov2_vits14", "embed", (graph,), made, (), ())


def small_network() -> VisionTransformer:
    architecture = next(each for each in PUBLISHED if each.name == "dinov2_vits14")
    torch.manual_seed(0)
    network = VisionTransformer(dataclasses.replace(architecture, depth=2), SIZE).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape) * parameter[0].numel() ** -0.5)
    network.fold()
    return network


def build_small(folder: Path, backend: str = "openvino", batch: int = 1) -> Path:
    """An engine for the CPU in `folder`, as `visionfast build` leaves it but for its certificate."""
    spec, network = small_spec(batch), small_network()
    folder.mkdir(parents=True)
    onnx = folder.parent / f"{folder.name}.onnx"
    graph = export_onnx(network, spec.graphs[0], onnx, precision="fp32")
    compiled = get_backend(backend).compile(
        CompileRequest(graph, onnx, network, spec.preprocess, "fp32", (), "cpu", folder)
    )
    manifest = EngineManifest(
        spec=dataclasses.replace(spec, graphs=(compiled.graph,)),
        backend=backend,
        precision="fp32",
        device="cpu",
        runtime_version=importlib.metadata.version(backend),
        files={"model": compiled.file},
        sha256={name: artifacts.sha256_file(folder / name) for name in compiled.files},
        onnx_sha256={"model": artifacts.sha256_file(onnx)},
        weights_sha256="0" * 64,
        keep_fp32=(),
        certificate=Certificate("not yet run on a device"),
        created="2026-01-01T00:00:00+00:00",
        visionfast_version=__version__,
    )
    artifacts.write_manifest(folder, manifest)
    return folder


def pictures(count: int, seed: int = 0) -> list[npt.NDArray[np.uint8]]:
    """Of several sizes, (H, W, 3) u8 RGB."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (*rng.integers(20, 120, 2), 3), np.uint8) for _ in range(count)]
