"""KV page pool and recurrent-state slot pools as one donated pytree."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Cache(NamedTuple):
    """Device memory of all sequences.

    Attributes:
        kv: keys and values of the full-attention layers, ``[La, P, 2, K, Z, H]``, activation dtype. Page 0 is the
            null page, the sink of padded tokens.
        conv: the last three raw inputs of every GDN convolution, ``[Lg, S, 3, Cc]``, activation dtype, oldest first.
            Slot 0 is the null slot, the sink of padded rows.
        state: recurrent states ``[Lg, S, Hv, Dv, Dk]``, fp32 (or bf16 when asked for).
    """

    kv: jax.Array
    conv: jax.Array
    state: jax.Array
