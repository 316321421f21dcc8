"""Names of array shapes, so that signatures read as English.

Dimension letters used throughout the code and in shape comments:

====== ============================================================
B      decode rows (one token each)
T      query tokens of packed prefill
M      tokens of a step: T prefill tokens, then B decode rows
S      kv tokens; in the shape of a pool: state slots
R      prefill requests
W      width of a page table, in pages
D      model width
F      MLP width
N      query heads
K      key/value heads
H      head dim of attention
V      value heads of Gated DeltaNet (Hv); Hk: its key heads
Dk, Dv key and value head dims of Gated DeltaNet
C      chunk of the chunkwise rule; Cc: channels of the convolution
P      pages
Z      page size
L      layers; La: full-attention layers, Lg: Gated DeltaNet layers
====== ============================================================

The aliases are documentation for readers and type checkers; nothing checks them at run time.
"""

from jax import Array
from jaxtyping import Bool, Float, Float32, Int32

# --- the model's values ---------------------------------------------------------------------------------------------
Activations = Float[Array, "M D"]
"""The residual stream, or a layer's input or output, in the activation dtype."""

Delta = Activations | Float32[Array, "parts M D"]
"""What is added to the residual stream: a layer's output, or parts of it that ``add_rms_norm`` sums."""

Hidden = Float[Array, "R D"]
"""Final-normed hidden states, one row a request or a decode row."""

Logits = Float32[Array, "B vocab"]

Queries = Float[Array, "M N H"]
Heads = Float[Array, "M X H"]
"""Heads of an attention layer as its projection leaves them, side by side: q, gate (N each), k, v (K each)."""

Keys = Float[Array, "M K H"]
Values = Float[Array, "M K H"]
ConvInputs = Float[Array, "M Cc"]
"""q, k and v of Gated DeltaNet side by side: before the convolution, or after it and its SiLU."""

HeadGates = Float[Array, "M Hv"]
"""One number a token and value head of Gated DeltaNet: b (write strength) or a (decay), before their nonlinearities."""

DeltaOutputs = Float[Array, "M Hv Dv"]

# --- parameters -----------------------------------------------------------------------------------------------------
Matrix = Float[Array, "in out"]
"""A linear map, used as ``x @ w``."""

Embedding = Float[Array, "vocab D"]
Vector = Float32[Array, "n"]
"""Norm weights, A_log and dt_bias: always fp32."""

ConvWeight = Float[Array, "4 Cc"]
"""Taps of the depthwise convolution; tap 3 meets the current token."""

# --- device memory of the sequences ---------------------------------------------------------------------------------
KVPool = Float[Array, "La P 2 K Z H"]
ConvPool = Float[Array, "Lg S 3 Cc"]
RecurrentState = Float[Array, "Lg S Hv Dv Dk"]

# --- bookkeeping of a step ------------------------------------------------------------------------------------------
TokenIds = Int32[Array, "M"]
Positions = Int32[Array, "M"]
PageIds = Int32[Array, "M"]
PageOffsets = Int32[Array, "M"]
CuSeqlens = Int32[Array, "R+1"]
SlotIds = Int32[Array, "R"]
HasState = Bool[Array, "R"]
PageTable = Int32[Array, "R W"]
KVLens = Int32[Array, "R"]
