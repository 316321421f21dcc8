"""Console commands (absl flags)."""
