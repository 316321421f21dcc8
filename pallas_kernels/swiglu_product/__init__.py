"""The first product of a SwiGLU MLP and its activation."""
