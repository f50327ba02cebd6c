"""A prompt segmenter in miniature, as a real engine's folder: its masks depend on the image and on every prompt."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import torch
from torch import nn

from visionfast import artifacts
from visionfast._version import __version__
from visionfast.backends import CompileRequest, get_backend
from visionfast.export import export_onnx
from visionfast.types import Certificate, EngineManifest, GraphSpec, ModelSpec, PreprocessSpec, PromptSpec, TensorSpec

__all__ = ["SIDE", "build_small_segmenter"]

SIDE = 64
_CELLS = SIDE // 4
_P, _N = 5, 6
_ENCODER = GraphSpec(
    "encoder",
    (TensorSpec("images", (1, 3, SIDE, SIDE), "float32", "NCHW"),),
    (TensorSpec("image_embeddings", (1, 8, _CELLS, _CELLS), "float32"),),
)
_DECODER = GraphSpec(
    "decoder",
    (
        *_ENCODER.outputs,
        TensorSpec("points", (_P, _N, 2), "float32", axes=("prompts", "points", "")),
        TensorSpec("labels", (_P, _N), "float32", axes=("prompts", "points")),
        TensorSpec("mask_input", (_P, 1, _CELLS, _CELLS), "float32", axes=("prompts", "", "", "")),
        TensorSpec("has_mask", (_P,), "float32", axes=("prompts",)),
    ),
    (
        TensorSpec("masks", (_P, 4, _CELLS, _CELLS), "float32", axes=("prompts", "", "", "")),
        TensorSpec("scores", (_P, 4), "float32", axes=("prompts", "")),
    ),
    {"prompts": 1, "points": 2},
)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.patches(images).tanh()


class _Decoder(nn.Module):
    """Four blobs round the points of each prompt, disturbed by the image."""

    def __init__(self) -> None:
        super().__init__()
        self.texture = nn.Conv2d(8, 4, 3, padding=1)
        y, x = torch.meshgrid(torch.arange(_CELLS), torch.arange(_CELLS), indexing="ij")
        self.register_buffer("centres", torch.stack([x, y], -1) * 4 + 2.0)  # (h, w, 2) pixels of the input

    def forward(
        self,
        image_embeddings: torch.Tensor,
        points: torch.Tensor,
        labels: torch.Tensor,
        mask_input: torch.Tensor,
        has_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        away = (self.centres - points[:, :, None, None]).square().sum(-1)  # (P, N, h, w)
        near = torch.exp(-away / 400.0) * torch.where(labels > 0, 1.0, -1.0)[..., None, None]
        blob = near.sum(1, keepdim=True) - 0.5  # (P, 1, h, w)
        masks = blob * 4 + self.texture(image_embeddings) + mask_input * has_mask[:, None, None, None] * 0.3
        return masks, 0.9 + 0.09 * masks.mean((2, 3)).tanh()


def build_small_segmenter(folder: Path) -> Path:
    """An OpenVINO engine for the CPU in `folder`, as `visionfast build` leaves it but for its certificate."""
    torch.manual_seed(0)
    networks = {"encoder": _Encoder().eval(), "decoder": _Decoder().eval()}
    preprocess = PreprocessSpec(
        (SIDE, SIDE),
        resize="longest-side",
        interpolation="bilinear-antialias",
        pad_value=None,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )
    folder.mkdir(parents=True)
    backend, graphs, files, hashes, onnx_hashes = get_backend("openvino"), [], {}, {}, {}
    for spec in (_ENCODER, _DECODER):
        onnx = folder.parent / f"{folder.name}-{spec.name}.onnx"
        graph = export_onnx(networks[spec.name], spec, onnx, precision="fp32")
        request = CompileRequest(graph, onnx, networks[spec.name], preprocess, "fp32", (), "cpu", folder)
        compiled = backend.compile(request)
        graphs.append(compiled.graph)
        files[spec.name] = compiled.file
        hashes |= {name: artifacts.sha256_file(folder / name) for name in compiled.files}
        onnx_hashes[spec.name] = artifacts.sha256_file(onnx)
    prompts = PromptSpec(box_first=False, pad_with_box=False, score_threshold=0.5, stability_threshold=0.5)
    manifest = EngineManifest(
        spec=ModelSpec("small", "sam", "small", "prompt-segment", tuple(graphs), preprocess, (), (), prompts=prompts),
        backend="openvino",
        precision="fp32",
        device="cpu",
        runtime_version=importlib.metadata.version("openvino"),
        files=files,
        sha256=hashes,
        onnx_sha256=onnx_hashes,
        weights_sha256="0" * 64,
        keep_fp32=(),
        certificate=Certificate("not yet run on a device"),
        created="2026-01-01T00:00:00+00:00",
        visionfast_version=__version__,
    )
    artifacts.write_manifest(folder, manifest)
    return folder
