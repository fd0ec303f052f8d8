"""Training on packs: sources of packs, batches, loaders, and Megatron's dataset face."""
