"""A residual stream plus a layer's result, and its RMS norm."""
