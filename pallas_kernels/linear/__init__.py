"""A product with a weight."""
