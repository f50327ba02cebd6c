"""The networks as modules: the publishers' own code holds the layers, what joins them is ours.

segment_anything (Apache-2.0) has SAM, ultralytics (AGPL-3.0) MobileSAM's image encoder and SAM 2. Both are imported
inside functions only, and their submodules keep their names, but that SAM 2's `sam_prompt_encoder` and
`sam_mask_decoder` are called as SAM's are.

The graphs compute what the official predictors do: Segment Anything (Kirillov et al., arXiv:2304.02643;
`SamPredictor`), MobileSAM (Zhang et al., arXiv:2306.14289), SAM 2 (Ravi et al., arXiv:2408.00714;
`SAM2ImagePredictor`). `P` prompts of `N` points each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = [
    "PromptDecoder",
    "Sam2Encoder",
    "SamEncoder",
    "WeightsOnMeta",
    "build_network",
    "graphs_of",
    "layer_norms",
]

_IMAGE_SIZE = 1024  # pixels, of each side of the network's input
_SIDE = 256  # of SAM 2's first feature map, and of every mask


class SamEncoder(nn.Module):
    """SAM's and MobileSAM's image encoder: `images` (1, 3, 1024, 1024) → `image_embeddings` (1, 256, 64, 64)."""

    def __init__(self, image_encoder: nn.Module) -> None:
        super().__init__()
        self.image_encoder = image_encoder

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.image_encoder(images)
        return embeddings


class Sam2Encoder(nn.Module):
    """SAM 2's image encoder: `images` (1, 3, 1024, 1024) → `image_embeddings` (1, 256, 64, 64),
    `high_res_features_0` (1, 32, 256, 256), `high_res_features_1` (1, 64, 128, 128).

    These are what `SAM2ImagePredictor.set_image` keeps: the two finer levels have gone through the mask decoder's
    own projections, and the coarse one has the embedding added that stands for a video without memory.
    """

    position: torch.Tensor  # (1, 256, 256, C) f32
    no_mem_embed: torch.Tensor  # (1, 256, 1, 1) f32

    def __init__(self, image_encoder: nn.Module, mask_decoder: nn.Module, no_mem_embed: torch.Tensor) -> None:
        super().__init__()
        trunk, decoder = cast("Any", image_encoder).trunk, cast("Any", mask_decoder)
        self.image_encoder = image_encoder
        self.mask_decoder = nn.ModuleDict({"conv_s0": decoder.conv_s0, "conv_s1": decoder.conv_s1})
        self.register_buffer("no_mem_embed", no_mem_embed.detach().reshape(1, -1, 1, 1), persistent=False)
        # It depends on weights only. Left in the graph, its bicubic enlargement and tiling make OpenVINO (2026.4)
        # compile for three minutes.
        position = trunk._get_pos_embed((_SIDE, _SIDE)).detach().contiguous()
        self.register_buffer("position", position, persistent=False)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        encoder: Any = self.image_encoder
        trunk, lateral = encoder.trunk, encoder.neck.convs
        x = trunk.patch_embed(images) + self.position  # (1, 256, 256, C)
        levels = []  # (1, C·2ⁱ, 256 / 2ⁱ, 256 / 2ⁱ), fine to coarse
        for index, block in enumerate(trunk.blocks):
            x = block(x)
            if index in trunk.stage_ends:
                levels.append(x.permute(0, 3, 1, 2))
        # Of the four levels of the feature pyramid only the coarsest flows into another, and is dropped then.
        coarse = nn.functional.interpolate(lateral[0](levels[3]), scale_factor=2.0, mode="nearest")
        embeddings = lateral[1](levels[2]) + coarse + self.no_mem_embed
        return (
            embeddings,
            self.mask_decoder["conv_s0"](lateral[3](levels[0])),
            self.mask_decoder["conv_s1"](lateral[2](levels[1])),
        )


class PromptEmbedding(nn.Module):
    """Prompts to tokens and to what is added to the image: the official prompt encoder's arithmetic.

    Stays FP32 in every graph: coordinates go into a sine at up to some 30 radians.
    """

    def __init__(self, prompt_encoder: nn.Module) -> None:
        super().__init__()
        self.prompt_encoder = prompt_encoder

    def forward(
        self, points: torch.Tensor, labels: torch.Tensor, mask_input: torch.Tensor, has_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(P, N, 2) pixels, (P, N), (P, 1, 256, 256) logits, (P,) → (P, N, 256), (P, 256, 64, 64)."""
        encoder: Any = self.prompt_encoder
        unit = (points + 0.5) / _IMAGE_SIZE  # of pixels' centres, 0..1
        phase = 2 * math.pi * ((2 * unit - 1) @ encoder.pe_layer.positional_encoding_gaussian_matrix)
        position = torch.cat((phase.sin(), phase.cos()), -1)  # (P, N, 256)
        embeddings = (encoder.not_a_point_embed, *encoder.point_embeddings)  # of the labels -1, 0, 1, 2, 3
        kind = torch.cat([e.weight for e in embeddings])[labels.long() + 1]  # (P, N, 256)
        # Padding has no position.
        tokens = torch.where((labels == -1)[..., None], kind, position + kind)
        without = encoder.no_mask_embed.weight.reshape(1, -1, 1, 1)
        masks = encoder.mask_downscaling(mask_input)  # (P, 256, 64, 64)
        return tokens, torch.where(has_mask.reshape(-1, 1, 1, 1) > 0, masks, without)


class PromptDecoder(nn.Module):
    """The encoder's outputs and P prompts → `masks` (P, 4, 256, 256) logits, `scores` (P, 4) predicted IoU.

    It is the official `predict_masks`: all four candidates, none chosen. `points` (P, N, 2) are pixels of the
    network's input; `labels` (P, N) 1, 0, 2, 3, -1 as in `visionfast.types.PromptSpec`; `mask_input`
    (P, 1, 256, 256) counts where `has_mask` (P,) is 1, and not where it is 0.
    """

    image_position: torch.Tensor  # (1, 256, 64, 64) f32: the sine encoding of each cell of the embedding

    def __init__(self, prompt_encoder: nn.Module, mask_decoder: nn.Module) -> None:
        super().__init__()
        self.embed = PromptEmbedding(prompt_encoder)
        self.mask_decoder = mask_decoder
        position = cast("Any", prompt_encoder).get_dense_pe().detach()
        self.register_buffer("image_position", position, persistent=False)

    def forward(self, image_embeddings: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *high_res, points, labels, mask_input, has_mask = rest
        decoder: Any = self.mask_decoder
        sparse, dense = self.embed(points, labels, mask_input, has_mask)
        own = self._own_tokens()
        # The casts are for a half-precision graph, where the embedding stays FP32.
        tokens = torch.cat((own.expand(points.shape[0], -1, -1), sparse.to(own.dtype)), 1)  # (P, T + N, 256)
        image = image_embeddings + dense.to(own.dtype)  # (P, 256, 64, 64)
        tokens, image = decoder.transformer(image, self.image_position, tokens)
        image = image.transpose(1, 2).reshape(-1, *image_embeddings.shape[1:])
        pixels = self._upscaled(image, high_res).flatten(2)  # (P, 32, 256 · 256)
        count = decoder.num_mask_tokens
        first = own.shape[1] - count
        score_token, mask_tokens = tokens[:, first - 1], tokens[:, first : first + count]
        heads = decoder.output_hypernetworks_mlps
        weights = torch.stack([head(mask_tokens[:, i]) for i, head in enumerate(heads)], 1)  # (P, 4, 32)
        masks = (weights @ pixels).reshape(-1, count, _SIDE, _SIDE)
        return masks, decoder.iou_prediction_head(score_token)

    def _own_tokens(self) -> torch.Tensor:
        """(1, T, 256): SAM 2's token that says whether there is an object, the score's, the four masks'."""
        decoder: Any = self.mask_decoder
        tokens = [decoder.iou_token.weight, decoder.mask_tokens.weight]
        if hasattr(decoder, "obj_score_token"):
            tokens.insert(0, decoder.obj_score_token.weight)
        return torch.cat(tokens)[None]

    def _upscaled(self, image: torch.Tensor, high_res: list[torch.Tensor]) -> torch.Tensor:
        """(P, 256, 64, 64) → (P, 32, 256, 256), SAM 2 with the encoder's finer levels added on the way."""
        first, norm, activation, second, last_activation = cast("Any", self.mask_decoder).output_upscaling
        finest, finer = high_res if high_res else (0.0, 0.0)
        image = activation(norm(first(image) + finer))  # (P, 64, 128, 128)
        upscaled: torch.Tensor = last_activation(second(image) + finest)
        return upscaled


class LayerNorm2d(nn.Module):
    """LayerNorm over the channels of (P, C, h, w), as ultralytics has it. Its own (8.4) reads C off the input, which
    the exporter takes for something that varies where P does, and refuses."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps
        self._channels = (weight.numel(),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        return nn.functional.layer_norm(x, self._channels, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


def layer_norms(module: nn.Module) -> tuple[str, ...]:
    """Dotted paths of every LayerNorm, over tokens or over a map's channels: their squares overflow FP16."""
    return tuple(path for path, inner in module.named_modules() if type(inner).__name__ in ("LayerNorm", "LayerNorm2d"))


# ---- from a checkpoint ------------------------------------------------------------------------------------


def build_network(architecture: str) -> nn.Module:
    """The whole published network of that name, its weights without memory yet. Its keys are the published ones."""
    generation, _, size = architecture.partition("_hiera_")
    if size:
        return _sam2(size, second=generation == "sam2.1")
    return _mobile_sam() if architecture == "mobile_sam" else _sam(architecture.removeprefix("sam_"))


def graphs_of(network: nn.Module) -> tuple[nn.Module, PromptDecoder]:
    """A loaded network's encoder and decoder. What serves video only is left behind."""
    whole: Any = network
    encoder: nn.Module
    if hasattr(whole, "sam_mask_decoder"):
        encoder = Sam2Encoder(whole.image_encoder, whole.sam_mask_decoder, whole.no_mem_embed)
        decoder = PromptDecoder(whole.sam_prompt_encoder, whole.sam_mask_decoder)
    else:
        encoder = SamEncoder(whole.image_encoder)
        decoder = PromptDecoder(whole.prompt_encoder, whole.mask_decoder)
    for tensor in (*encoder.parameters(), *encoder.buffers(), *decoder.parameters(), *decoder.buffers()):
        assert not tensor.is_meta, "a tensor was left without memory"
    return encoder.eval(), decoder.eval()


class WeightsOnMeta(TorchFunctionMode):
    """Weights are made without memory. Unlike under `torch.device("meta")`, what a constructor counts and looks up
    with (`linspace`, `arange`, `LongTensor`) is real: MobileSAM's and SAM 2's read numbers out of it.

    Nothing is to be imported under it: ultralytics keeps empty tensors in its classes, which would be on meta from then
    on, for every model of the process.
    """

    _MAKE_WEIGHTS = frozenset({torch.empty, torch.zeros, torch.ones, torch.randn})

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func in self._MAKE_WEIGHTS else {}))


def _sam(size: str) -> nn.Module:
    from segment_anything import sam_model_registry

    with WeightsOnMeta():
        network: nn.Module = sam_model_registry[size]()
    return network


def _mobile_sam() -> nn.Module:
    from ultralytics.models.sam import build

    network: Any = _sam("vit_b")  # MobileSAM has SAM's prompt encoder and mask decoder
    with WeightsOnMeta():
        network.image_encoder = cast("Any", build).build_mobile_sam().image_encoder
    return cast("nn.Module", network)


def _sam2(size: str, *, second: bool) -> nn.Module:
    """SAM 2, or 2.1: two layers more, which images have no use for."""
    from ultralytics.models.sam import build

    with WeightsOnMeta():
        network: Any = getattr(build, f"build_sam2_{size[0]}")()
        if second:
            network.no_obj_embed_spatial = nn.Parameter(torch.empty(1, network.mem_dim))
            network.obj_ptr_tpos_proj = nn.Linear(network.hidden_dim, network.mem_dim)
    for part in (network.sam_prompt_encoder.mask_downscaling, network.sam_mask_decoder.output_upscaling):
        for index, layer in enumerate(part):
            if type(layer).__name__ == "LayerNorm2d":
                part[index] = LayerNorm2d(layer.weight, layer.bias, layer.eps)
    return cast("nn.Module", network)
