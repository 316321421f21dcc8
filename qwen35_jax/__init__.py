"""Offline batch generation with Qwen3.5 in JAX."""
