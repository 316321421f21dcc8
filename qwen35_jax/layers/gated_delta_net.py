"""Gated DeltaNet: linear attention with a recurrent state per sequence.

Rounding points against the public reference implementation: ``beta`` and the decay stay in fp32 inside the kernels
(the reference rounds ``beta`` to the activation dtype); the core output ``o`` is rounded to the activation dtype on
both paths, as in the reference; ``x_hat`` of the output norm stays in fp32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import causal_conv, gated_rms_norm, gdn_decode, gdn_prefill
from pallas_kernels.registry import implementation_of
from qwen35_jax.config import ModelConfig
from qwen35_jax.layers.inputs import Batch
from qwen35_jax.layers.linear import linear
from qwen35_jax.layers.parameters import HeadParam, SmallParam, matrix, vector
from qwen35_jax.shapes import Activations, ConvPool, Delta, RecurrentState


class GatedDeltaNet(nnx.Module):
    """Short causal convolution, gated delta rule, gated norm, projection.

    Parameters: ``in_proj [D, Cc + Hv*Dv + 2*Hv]``, its columns being qkv, z, b and a; ``conv_weight [4, Cc]``;
    ``A_log``, ``dt_bias`` fp32 ``[Hv]``; ``norm`` fp32 ``[Dv]`` (an ordinary weight); ``out_proj [Hv*Dv, D]``.

    Attributes:
        pool_layer: index of this layer in the convolution and state pools.
    """

    def __init__(self, config: ModelConfig, pool_layer: int, *, rngs: nnx.Rngs | None, kernels: str, dtype: jnp.dtype):
        gdn = config.gdn
        self.config = gdn
        self.eps = config.rms_norm_eps
        self.pool_layer = pool_layer
        self.kernels = kernels
        in_dim = gdn.conv_dim + gdn.value_dim + 2 * gdn.num_v_heads
        self.in_proj = matrix(rngs, (config.hidden_size, in_dim), dtype)
        self.conv_weight = SmallParam(_initial_conv_weight(rngs, (gdn.conv_kernel, gdn.conv_dim), dtype))
        self.A_log = HeadParam(_initial_a_log(rngs, gdn.num_v_heads))
        self.dt_bias = HeadParam(jnp.ones((gdn.num_v_heads,), jnp.float32))
        self.norm = vector(gdn.head_v_dim, 1.0)
        self.out_proj = matrix(rngs, (gdn.value_dim, config.hidden_size), dtype)

    def __call__(
        self,
        x: Activations,
        batch: Batch,
        conv_pool: ConvPool,
        state_pool: RecurrentState,
        *,
        last_rows: bool = False,
    ) -> tuple[Delta, ConvPool, RecurrentState]:
        """Advances the sequences' states by the tokens of the step.

        Args:
            x: ``[M, D]``, prefill tokens first.
            batch: where the tokens belong.
            conv_pool: ``[Lg, S, 3, Cc]``; only this layer's slots named by the batch change.
            state_pool: ``[Lg, S, Hv, Dv, Dk]``; likewise.
            last_rows: give only what :meth:`Batch.last_rows` keeps.

        Returns:
            The mixed tokens ``[M, D]``, or ``[R + B, D]``, and both pools. Of decode rows alone they may be in parts,
            see ``linear``.
        """
        gdn = self.config
        # The ops take the index as an array, not as a constant: one traced and compiled kernel serves all layers.
        layer = self.pool_layer
        heads = {"num_k_heads": gdn.num_k_heads, "head_k_dim": gdn.head_k_dim}
        ops = ("causal_conv", "gdn_prefill", "gated_rms_norm", "gdn_decode")
        chosen = {op: {"implementation": implementation_of(self.kernels, op)} for op in ops}

        projected = linear(x, self.in_proj[...], "in_proj")  # [M, Cc + Hv*Dv + 2*Hv]
        prefill_part, decode_part = batch.split(projected)

        mixed = []
        if batch.prefill is not None:
            bounds = np.cumsum([gdn.conv_dim, gdn.value_dim, gdn.num_v_heads])
            _, _, b, a = jnp.split(prefill_part, bounds, axis=-1)  # [T, Cc], [T, Hv*Dv], [T, Hv], [T, Hv]
            sequences = (batch.prefill.slot_ids, batch.prefill.has_state, batch.prefill.cu_seqlens)
            qkv, conv_pool = causal_conv(
                prefill_part, self.conv_weight[...], conv_pool, layer, *sequences, **chosen["causal_conv"]
            )
            gates = (b, a, self.A_log[...], self.dt_bias[...])
            o, state_pool = gdn_prefill(
                qkv, *gates, state_pool, layer, *sequences, **heads, **chosen["gdn_prefill"]
            )  # [T, Hv, Dv]
            y = gated_rms_norm(
                o,
                prefill_part,
                self.norm[...],
                first=gdn.conv_dim,
                eps=self.eps,
                **chosen["gated_rms_norm"],
            )
            mixed.append(y.reshape(-1, gdn.value_dim))
        if batch.decode is not None:
            y, conv_pool, state_pool = gdn_decode(
                decode_part,
                self.conv_weight[...],
                self.A_log[...],
                self.dt_bias[...],
                self.norm[...],
                conv_pool,
                state_pool,
                layer,
                batch.decode.slot_ids,
                eps=self.eps,
                **heads,
                **chosen["gdn_decode"],
            )  # [B, Hv*Dv]
            mixed.append(y)
        mixed = batch.join(mixed)
        mixed = batch.last_rows(mixed) if last_rows else mixed
        out = linear(mixed, self.out_proj[...], "out_proj", in_parts=batch.prefill is None)
        return out, conv_pool, state_pool


def _initial_conv_weight(rngs: nnx.Rngs | None, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """Uniform taps in +-1/sqrt(taps), or zeros when no ``rngs`` is given."""
    if rngs is None:
        return jnp.zeros(shape, dtype)
    bound = shape[0] ** -0.5
    return jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound).astype(dtype)


def _initial_a_log(rngs: nnx.Rngs | None, num_heads: int) -> jax.Array:
    """``log(uniform(1, 16))``: decays from slow to strong; zeros when no ``rngs`` is given."""
    if rngs is None:
        return jnp.zeros((num_heads,), jnp.float32)
    return jnp.log(jax.random.uniform(rngs.params(), (num_heads,), jnp.float32, 1.0, 16.0))
