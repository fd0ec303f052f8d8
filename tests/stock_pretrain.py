"""A script like pretrain_gpt.py of Megatron-LM, which wheels lack. Its own data sets cannot be built."""

from __future__ import annotations

from typing import Any

from megatron.core.enums import ModelType
from megatron.training import argument_utils, arguments, pretrain
from megatron_pretrain import forward_step


def train_valid_test_datasets_provider(sizes: Any, vp_stage: int | None = None) -> Any:
    """The provider that the runner replaces."""
    raise AssertionError(f"the script's own data sets were asked for, {sizes} rows of them")


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    args = arguments.parse_and_validate_args()
    hybrid = getattr(args, "hybrid_layer_pattern", None)
    of_model = argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args
    config = argument_utils.pretrain_cfg_container_from_args(args, of_model(args))
    pretrain(config, train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)
