"""Training on shards: where packs lie, the order of an epoch, samples for Megatron's builder, the sampler."""
