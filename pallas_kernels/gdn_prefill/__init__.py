"""Gated delta rule over a ragged pack of prompt tokens, chunkwise, with its state in a slot pool."""
