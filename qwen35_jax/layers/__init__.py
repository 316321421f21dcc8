"""Flax NNX layers of the model."""
