"""Packed batches with images through Megatron-Bridge's own training step and models for Qwen-VL, on the CPU.

``python tests/bridge_vlm_steps.py MODEL FOLDER OUT`` makes a shard in FOLDER, trains on it with the model ``qwen2.5``
or ``qwen3``, and writes how far batches are from one another into the file OUT, as JSON.

``training/vlm_step.py``, the models and what they import are Bridge's own. These stand in for what needs a GPU:

- attention: ``SegmentAttention``, in place of Transformer Engine's;
- the images' encoder of Qwen3-VL: that of transformers, which Bridge's Qwen2.5-VL has anyway;
- ``Tensor.cuda`` returns the tensor, and ``torch.cuda.nvtx`` marks nothing;
- two classes that the step names in annotations, and its count of floating point operations.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from bridge_modules import make_bare
from gpt_model import SegmentAttention, connect, megatron_device, seed_everything
from media_processors import png
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from PIL import Image
from torch import Tensor

from megatron_sft_idx import MediaItem, ShardWriter
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training import BatchAssembler
from megatron_sft_idx.training.sources import StoredPacks
from megatron_sft_idx.training.vlm_batch import bridge_vlm_batch

LENGTH, PAD = 96, 0
IMAGE, VIDEO, START, END, VOCABULARY = 100, 101, 102, 103, 128
# Of each pack the sequences; of each sequence what it consists of: tokens of text, or the size of an image. The first
# two images have equally many positions.
PACKS = [
    [[3, (84, 56), 5], [2, (84, 56), 4, (28, 56), 3], [7]],
    [[1, (56, 112), 6], [4, (56, 56), (112, 56), 9]],
]
Batch = dict[str, Any]


# ---- Bridge on the CPU ----


def enter_bridge() -> None:
    """Make its modules importable, with stand-ins for the three that want Transformer Engine or a newer Megatron."""
    models = "megatron.bridge.models"
    make_bare([models, f"{models}.qwen_vl", f"{models}.qwen_vl.modelling_qwen3_vl", f"{models}.qwen_vl.data"])
    for name, members in {
        "config": {"ConfigContainer": object},
        "state": {"GlobalState": object},
        "utils.flop_utils": {
            "accumulate_flops_metadata": lambda *_, **__: None,
            "get_model_chunk_vp_stage": lambda _: None,
            "vision_patch_stats_from_grid_thw": lambda *_, **__: (0, 0, 0),
        },
    }.items():
        module = sys.modules[f"megatron.bridge.training.{name}"] = ModuleType(name)
        module.__dict__.update(members)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None  # type: ignore[assignment]


SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "kv_channels": 32,
    "ffn_hidden_size": 128,
    "vocab_size": VOCABULARY,
    "seq_length": 2 * LENGTH,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "mrope_section": [6, 5, 5],
    "rotary_base": 1000,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
SIZES |= dict.fromkeys(
    [
        *("gradient_accumulation_fusion", "masked_softmax_fusion", "cross_entropy_loss_fusion"),
        *("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm"),
    ],
    False,
)
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}


def attending(qk_layernorm: bool) -> Any:
    """A layer of megatron.core with ``SegmentAttention``."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_layernorm)
    spec.submodules.self_attention.submodules.core_attention = SegmentAttention
    return spec


def qwen25() -> Any:
    """Bridge's Qwen2.5-VL as its provider builds it."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    provider = import_module("megatron.bridge.models.qwen_vl.qwen25_vl_provider").Qwen25VLModelProvider
    vision = Qwen2_5_VLVisionConfig(**VISION, patch_size=14, window_size=56, fullatt_block_indexes=[1])
    config = provider(**SIZES, vision_config=vision, add_qkv_bias=True, transformer_layer_spec=attending(False))
    config._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    config.finalize()
    return config.provide(pre_process=True, post_process=True)


def qwen3() -> Any:
    """Bridge's Qwen3-VL, with the encoder of transformers in place of that made of Transformer Engine."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Qwen3VLVisionModel._from_config(vision)

        def forward(self, hidden_states: Tensor, grid_thw: Tensor) -> Any:
            made = self.encoder(hidden_states, grid_thw=grid_thw)
            return made.pooler_output, made.deepstack_features

    folder = "megatron.bridge.models.qwen_vl"
    provider = import_module(f"{folder}.qwen3_vl_provider").Qwen3VLModelProvider
    vision = Qwen3VLVisionConfig(**VISION, patch_size=14, num_position_embeddings=64, deepstack_visual_indexes=[0])
    config = provider(**SIZES, vision_config=vision)
    config._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    config.finalize()
    model = import_module(f"{folder}.modelling_qwen3_vl.model").Qwen3VLModel(
        language_transformer_config=config,
        language_transformer_layer_spec=attending(True),
        vision_transformer_config=vision,
        pg_collection=config._pg_collection,
        add_encoder=False,
    )
    model.vision_model = Encoder()
    return model


MODELS: dict[str, Callable[[], Any]] = {"qwen2.5": qwen25, "qwen3": qwen3}


class Watch:
    """Times nothing: Bridge's timers and its straggler timer."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def trained(model: Any, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Of all trained positions the loss, and the gradient of their sum, by Bridge's ``forward_step``."""
    checks = SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False)
    settings = SimpleNamespace(dataset=SimpleNamespace(), model=model.config, rerun_state_machine=checks)
    state = SimpleNamespace(timers=Watch(), straggler_timer=Watch(), cfg=settings)
    forward = import_module("megatron.bridge.training.vlm_step").forward_step
    model.zero_grad()
    losses, iterator = [], iter(batches)
    for batch in batches:
        output, loss_of = forward(state, iterator, model)
        total, count, _ = loss_of(output)
        assert int(count) == int(batch["loss_mask"].sum())
        total.backward()
        losses.append(output.detach()[batch["loss_mask"] > 0])
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(losses), torch.cat(gradients)


def difference(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """The larger of the relative differences of losses and of gradients."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


# ---- shards and batches ----


def image_processor() -> Any:
    """Qwen-VL's, with up to 16 positions for an image."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28})


def sequence_of(parts: Sequence[Any], seed: int) -> tuple[list[int], list[int], list[MediaItem]]:
    """Ids, a label-aligned mask that trains every second token of text, and images of noise."""
    generator = torch.Generator().manual_seed(seed)
    ids, items = list[int](), list[MediaItem]()
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids += torch.randint(1, 90, (part,), generator=generator).tolist()
        else:
            positions = part[0] * part[1] // 28**2
            ids.append(START)
            items.append(MediaItem("image", len(ids), positions, png(*part, 100 * seed + number)))
            ids += [IMAGE] * positions + [END]
    return ids, [int(ids[j + 1] < 90 and j % 2) for j in range(len(ids) - 1)] + [0], items


def write(prefix: Path, packs: Sequence[Sequence[Sequence[Any]]]) -> None:
    seed = 0
    with ShardWriter(prefix, media=True) as writer:
        for pack in packs:
            ids, mask, starts, items = list[int](), list[int](), list[int](), list[MediaItem]()
            for parts in pack:
                seed += 1
                own, trains, shown = sequence_of(parts, seed)
                starts.append(len(ids))
                items += [replace(item, start=item.start + len(ids)) for item in shown]
                ids, mask = ids + own, mask + trains
            writer.add_pack(ids, mask, starts, media=items)


def read(prefix: Path, packs: Sequence[int], **options: Any) -> Batch:
    shards = ShardSet([str(prefix)])
    source = StoredPacks(shards, ignore_media=True)
    batch: Batch = BatchAssembler(source, LENGTH, padding_mask=True, **options).assemble(packs)
    items = [item for pack in packs for item in shards[pack]["media"]]
    if items:
        batch.update(image_processor()([Image.open(io.BytesIO(item.data)) for item in items], return_tensors="pt"))
    return batch


def main(model: str, folder: str, out: str) -> None:
    enter_bridge()
    connect()
    parallel_state.initialize_model_parallel()
    write(Path(folder, "packed"), PACKS)
    write(Path(folder, "alone"), [[sequence] for pack in PACKS for sequence in pack])
    with megatron_device():
        seed_everything(1)
        built = MODELS[model]()
        alone = [bridge_vlm_batch(read(Path(folder, "alone"), [number])) for number in range(5)]
        wanted = trained(built, alone)
        packed = read(Path(folder, "packed"), [0, 1])
        found = {"packed": difference(trained(built, [bridge_vlm_batch(packed)]), wanted)}
        print(found)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
