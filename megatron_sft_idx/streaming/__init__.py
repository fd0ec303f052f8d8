"""Training while the data is still being made."""
