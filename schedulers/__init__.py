"""Host-side scheduling in pure Python; never imports jax."""
