"""Training while the data is still being made: shards are consumed as they are published."""
