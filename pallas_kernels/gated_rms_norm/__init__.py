"""RMS norm of each head times a gate."""
