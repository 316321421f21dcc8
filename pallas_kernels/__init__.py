"""GPU kernels and their plain-jnp references."""
