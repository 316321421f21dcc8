"""Causal grouped-query attention of a ragged pack of new tokens over paged keys and values, output gate fused."""
