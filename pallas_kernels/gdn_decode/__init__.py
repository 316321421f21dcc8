"""One decode step of a Gated DeltaNet mixer: convolution, delta rule and gated norm, state updated in place."""
