"""Megatron-core's ``HybridModel``, which replaces ``GPTModel`` from 0.18 on, with the layers of ``gpt_model.py``.

A block of ``GPTModel`` corresponds to two layers here: attention (``*`` in the pattern) and an MLP (``-``). With the
same seed, both models have the same weights and the same losses.
"""

from __future__ import annotations

from typing import Any

from gpt_model import layer_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

# Layers of one block of GPTModel.
BLOCK = "*-"


class LocalStack(HybridStack):  # type: ignore[misc]
    """A layer stack with torch's final norm: Megatron's class uses that of Transformer Engine, which needs a GPU."""

    def __init__(self, config: TransformerConfig, *args: Any, **named: Any) -> None:
        super().__init__(config, *args, **named, post_layer_norm=False)
        if self.post_process:
            self.post_layer_norm = True
            self.final_norm = WrappedTorchNorm(config, config.hidden_size, eps=config.layernorm_epsilon)


def stack_spec(layer: ModuleSpec) -> ModuleSpec:
    """Return attention and MLP layers for any machine: the halves of a ``GPTModel`` layer, no Transformer Engine."""
    whole = layer.submodules
    # Use the names of Transformer Engine's layers in checkpoints.
    names = whole.sharded_state_dict_keys_map
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=whole.self_attn_bda,
        sharded_state_dict_keys_map=names,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm,
        mlp=whole.mlp,
        mlp_bda=whole.mlp_bda,
        sharded_state_dict_keys_map=names,
    )
    layers = HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
    )
    return ModuleSpec(LocalStack, submodules=layers)


def build_hybrid(config: TransformerConfig, attention: str, vocab_size: int, length: int) -> HybridModel:
    """Build a model with ``config.num_layers / 2`` blocks and this attention (``gpt_model.ATTENTION``).

    ImportError: ``te`` without Transformer Engine.
    """
    layer = layer_spec(attention)
    return HybridModel(
        config,
        hybrid_stack_spec if attention == "te" else stack_spec(layer),
        vocab_size,
        length,
        hybrid_layer_pattern=BLOCK * (config.num_layers // len(BLOCK)),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
