"""Causal depthwise convolution of width 4 with SiLU over a ragged pack, with its tail in a slot pool."""
