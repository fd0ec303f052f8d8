"""Run packed batches with images through Megatron-Bridge's own training step and Qwen-VL models, on the CPU.

``python tests/bridge_vlm_steps.py MODEL FOLDER OUT`` makes a shard of chats with images in FOLDER, and batches of them
in two ways: from the shard, and by Bridge's own collate function from the chats. It trains the model ``qwen2.5`` or
``qwen3`` on both, and writes the differences to the file OUT, as JSON. FOLDER/finetune_vlm.py is the script of
docs/media.md; Bridge's loader reads its data set.

The step (``training/vlm_step.py``), the models, the collate function and their imports are Bridge's own. Code that
needs a GPU is replaced:

- attention: ``SegmentAttention`` replaces Transformer Engine's;
- image encoder of Qwen3-VL: the encoder of transformers, which Bridge's Qwen2.5-VL uses anyway;
- the class of Transformer Engine's attention, which would be None: Bridge's main branch checks for it;
- ``Tensor.cuda`` returns the tensor, and ``torch.cuda.nvtx`` does nothing;
- two classes in annotations of the step, and its count of floating point operations.
"""

from __future__ import annotations

import io
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from bridge_modules import make_bare
from gpt_model import SegmentAttention, connect, megatron_device, seed_everything
from media_processors import png, qwen2_5_vl
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from PIL import Image
from tiny_media_models import FAMILIES, Swapped, shard_of
from torch import Tensor

from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training import BatchAssembler
from megatron_sft_idx.training.media import MediaInputs
from megatron_sft_idx.training.sources import StoredPacks
from megatron_sft_idx.training.vlm_batch import bridge_vlm_batch

LENGTH = 96
# The sizes of the images of each chat. No image has to be resized; several have the same number of positions.
SHOWN = [[(84, 56)], [(56, 84), (56, 56)], [], [(56, 112)], [(56, 56), (112, 56), (84, 84)]]
ANSWERS = ["the cat sat", "hello", "on the mat here", "what?", "the mat"]
Batch = dict[str, Any]


# ---- Bridge on the CPU ----


def enter_bridge() -> None:
    """Make Bridge's modules importable. Three that need Transformer Engine or a newer Megatron are replaced."""
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
    "seq_length": 2 * LENGTH,
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
    """Return the spec of a megatron.core layer with ``SegmentAttention``."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_layernorm)
    spec.submodules.self_attention.submodules.core_attention = SegmentAttention
    return spec


def qwen25(ids: dict[str, int]) -> Any:
    """Build Bridge's Qwen2.5-VL with its provider."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    provider = import_module("megatron.bridge.models.qwen_vl.qwen25_vl_provider").Qwen25VLModelProvider
    vision = Qwen2_5_VLVisionConfig(**VISION, patch_size=14, window_size=56, fullatt_block_indexes=[1])
    config = provider(**SIZES, **ids, vision_config=vision, add_qkv_bias=True, transformer_layer_spec=attending(False))
    config._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    config.finalize()
    return config.provide(pre_process=True, post_process=True)


def qwen3(ids: dict[str, int]) -> Any:
    """Build Bridge's Qwen3-VL with the image encoder of transformers, because Bridge's needs Transformer Engine."""
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
    import_module(f"{folder}.modelling_qwen3_vl.attention").TEDotProductAttention = ()  # no layer is an instance
    provider = import_module(f"{folder}.qwen3_vl_provider").Qwen3VLModelProvider
    vision = Qwen3VLVisionConfig(**VISION, patch_size=14, num_position_embeddings=64, deepstack_visual_indexes=[0])
    config = provider(**SIZES, **ids, vision_config=vision)
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


# For each model its family in ``tiny_media_models`` and its builder.
MODELS: dict[str, tuple[str, Callable[[dict[str, int]], Any]]] = {
    "qwen2.5": ("qwen2.5-vl", qwen25),
    "qwen3": ("qwen3-vl", qwen3),
}


class Watch:
    """A timer that does nothing, for Bridge's timers and its straggler timer."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def trained(model: Any, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Return the loss at all trained positions, and the gradient of the sum, from Bridge's ``forward_step``."""
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
    """Return the larger of the relative differences of losses and of gradients."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


# ---- the same chats, from a shard and by Bridge's collate function ----


def chat(number: int, form: str) -> dict[str, Any]:
    """Return a chat with its images as files (``bytes``) or as opened images (``opened``)."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "what "}]
    for image, size in enumerate(SHOWN[number]):
        data = png(*size, 10 * number + image)
        shown = {"bytes": data} if form == "bytes" else Image.open(io.BytesIO(data))
        parts.append({"type": "image", "image": shown})
    parts.append({"type": "text", "text": "is here?"})
    answer = [{"type": "text", "text": ANSWERS[number]}]
    return {"conversation": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def collated(numbers: Sequence[int], processor: Any, multiple: int = 1) -> Batch:
    """Return Bridge's batch of these chats, without the line end after an answer, which Bridge also trains on."""
    collate = import_module("megatron.bridge.models.qwen_vl.data.collate_fn").qwen2_5_collate_fn
    examples = [chat(number, "opened") for number in numbers]
    sizes = {"min_pixels": None, "max_pixels": None}  # the processor's own limits apply
    packing = {"enable_in_batch_packing": True, "in_batch_packing_pad_to_multiple_of": multiple}
    batch: Batch = collate(examples, processor, **sizes, **packing)
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    line_end = (batch["input_ids"] == end) & (batch["loss_mask"] > 0)
    assert int(line_end.sum()) == len(numbers)
    batch["loss_mask"][line_end], batch["labels"][line_end] = 0, -100
    return batch


def unequal(found: Batch, wanted: Batch) -> list[str]:
    """Return the names of entries that differ between two batches."""
    names = []
    for name in sorted({*found, *wanted}):
        one, other = (each.get(name, "missing") for each in (found, wanted))
        if name == "visual_inputs":
            one, other = one.normalized_for_model(), other.normalized_for_model()
            names += [f"{name}: {each}" for each in unequal(one, other)]
        elif isinstance(one, Tensor) and isinstance(other, Tensor):
            if one.dtype != other.dtype or not torch.equal(one, other):
                names.append(name)
        elif one != other:
            names.append(name)
    return names


def positions_of(batch: Batch, ids: dict[str, Any]) -> Tensor:
    """Return the positions that Bridge's Qwen3-VL computes for a packed row."""
    count = import_module("megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope").get_rope_index
    params = import_module("megatron.bridge.training.utils.packed_seq_utils").get_packed_seq_params(batch)
    tokens = (ids[f"{name}_token_id"] for name in ("image", "video", "vision_start"))
    grid = batch["visual_inputs"].image_grid_thw
    positions: Tensor = count(2, *tokens, batch["input_ids"], image_grid_thw=grid, packed_seq_params=params)[0]
    return positions


def loaded(config: Any) -> list[Batch]:
    """Return one epoch of batches from Bridge's own loader, with one worker process."""
    config.finalize()
    base = import_module("megatron.bridge.data.base")
    samples = {"train_samples": 8, "valid_samples": 4, "test_samples": 4}
    dataset, none, test = config.build_datasets(base.DatasetBuildContext(**samples))
    assert (none, test) == (None, None)
    load = import_module("megatron.bridge.data.samplers").build_pretraining_data_loader
    return list(
        load(
            dataset,
            0,
            config.dataloader_type,
            1,
            1,
            config.data_sharding,
            collate_fn=dataset.collate_fn,
            pin_memory=False,
            data_parallel_rank=0,
            data_parallel_size=1,
            global_batch_size=2,
            drop_last=config.drop_last,
            seed=config.seed,
        )
    )


def main(model: str, folder: str, out: str) -> None:
    enter_bridge()
    connect()
    parallel_state.initialize_model_parallel()
    processor = qwen2_5_vl(Path(folder, "model"))
    family, build = MODELS[model]
    config = FAMILIES[family].model(processor).config
    rows = [chat(number, "bytes")["conversation"] for number in range(len(SHOWN))]
    shard = shard_of(rows, Path(folder), Path(folder, "model"), LENGTH)
    order = [source[1] for pack in shard for source in pack["source"].tolist()]
    packs, source = range(len(shard)), StoredPacks(ShardSet([shard.prefix]))
    step = MediaInputs(processor, config)

    def made(packs: Sequence[int] = packs, media: Any = step, within: int = 1, **options: Any) -> Batch:
        """Return the batch for Bridge, made from a batch with sequences padded to multiples of ``within``."""
        assembler = BatchAssembler(source, LENGTH + 32, padding_mask=True, media=media, sequence_multiple=within)
        return bridge_vlm_batch(assembler.assemble(packs), **options)

    found: dict[str, Any] = {"packs": len(shard), "chats": order}
    # Bridge's own batches have text positions.
    theirs, padded = collated(order, processor), collated(order, processor, 8)
    of_text = {**made(), "position_ids": theirs["position_ids"]}
    found["unequal"] = {
        "packed": unequal(of_text, theirs),
        "padded": unequal({**made(sequence_multiple=8), "position_ids": padded["position_ids"]}, padded),
        "padded twice": unequal(made(sequence_multiple=8, within=4), made(sequence_multiple=8)),
        "swapped": unequal({**made(media=Swapped(step)), "position_ids": theirs["position_ids"]}, theirs),
    }
    config.save_pretrained(Path(folder, "model"))
    with chdir(folder):
        of_page = runpy.run_path("finetune_vlm.py", run_name="recipe")["dataset"]
        batches = loaded(replace(of_page, path=shard.prefix, sequence_multiple=8))
    row = {"sequence_multiple": 8, "length": of_page.seq_length, "pad_id": source.pad_id}
    expected = [made([pack], **row) for pack in packs]
    found["loaded"] = [[not unequal(batch, each) for each in expected] for batch in batches]
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: getattr(config, name) for name in names} | {"vocab_size": config.text_config.vocab_size}
    with megatron_device():
        seed_everything(1)
        built = build(ids)
        wanted = trained(built, [collated([number], processor) for number in order])

        def away(*batches: Batch) -> float:
            return difference(trained(built, batches), wanted)

        whole = made()
        total = whole["total_tokens"]
        found["losses"] = {
            "packed": away(whole),
            "each pack": away(*(made([pack]) for pack in packs)),
            "padded": away(made(sequence_multiple=8)),
            "one length": away(made(sequence_multiple=8, length=256)),
            "positions by Bridge": away(of_text),
        }
        through = {"cu_seqlens_q": torch.tensor([0, total]).int()}
        through["cu_seqlens_kv"] = through["cu_seqlens_q"]
        found["controls"] = {
            "swapped": away(made(media=Swapped(step))),
            "one sequence": away({**whole, **through, "max_seqlen_q": torch.tensor(total)}),
        }
        if model == "qwen3":  # Qwen2.5-VL computes positions itself
            for name, positions in {
                "positions of text": theirs["position_ids"],
                "time": whole["position_ids"][:1],
            }.items():
                found["controls"][name] = away({**whole, "position_ids": positions.expand(3, 1, -1)})
            found["unequal"]["positions"] = unequal(
                {"position_ids": made(sequence_multiple=8)["position_ids"]}, {"position_ids": positions_of(padded, ids)}
            )
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
