"""Fine-tune Qwen3-8B with Megatron-Bridge on the shards of examples/sft_qwen3.yaml.

Bridge first converts the weights of the model to its own format, once. Start both commands in the folder that has
data/:

    python -c 'from megatron.bridge import AutoBridge; AutoBridge.import_ckpt("Qwen/Qwen3-8B", "base")'
    torchrun --nproc-per-node 8 examples/megatron_bridge.py

LENGTH must be the seq-length of the shards, and both shards need at least BATCH packs. For another model, use its
recipe from megatron.bridge.recipes. See docs/bridge.md. Tests run this script up to the batches, not on GPUs.
"""

from megatron_sft_idx.training.bridge_config import BridgePackedConfig

LENGTH, BATCH = 4096, 32

dataset = BridgePackedConfig(path="data/sft", validation_path="data/sft.valid", seq_length=LENGTH)


def main() -> None:
    from megatron.bridge.recipes.qwen import qwen3_8b_sft_config
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step

    config = qwen3_8b_sft_config()
    config.dataset = dataset
    config.model.seq_length = LENGTH
    config.train.train_iters = 500
    config.train.global_batch_size = BATCH
    config.validation.eval_interval = 100
    config.validation.eval_iters = 4
    config.checkpoint.pretrained_checkpoint = "base"
    finetune(config, forward_step)


if __name__ == "__main__":
    main()
