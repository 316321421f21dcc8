"""Grouped-query attention of one new token a row over paged keys and values, output gate fused."""
