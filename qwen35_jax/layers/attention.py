"""Gated full attention over paged keys and values."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from pallas_kernels import kv_write, paged_decode_attention, paged_prefill_attention
from pallas_kernels.registry import implementation_of
from qwen35_jax.config import ModelConfig
from qwen35_jax.layers.inputs import Batch, PrefillInputs
from qwen35_jax.layers.linear import linear
from qwen35_jax.layers.parameters import layer_vector, matrix
from qwen35_jax.shapes import Activations, Delta, Heads, KVPool, Queries


class GatedAttention(nnx.Module):
    """Causal grouped-query attention whose output is gated by ``sigmoid(gate)``.

    Parameters: ``qkv_proj [D, 2NH + 2KH]``, its columns being q (N heads), gate (N heads), k and v (K heads each);
    ``q_norm``, ``k_norm`` fp32 ``[H]`` (norms with 1 + w, before RoPE); ``o_proj [NH, D]``.

    Attributes:
        pool_layer: index of this layer in the KV pool.
    """

    def __init__(self, config: ModelConfig, pool_layer: int, *, rngs: nnx.Rngs | None, kernels: str, dtype: jnp.dtype):
        attention = config.attention
        q_dim, kv_dim = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        self.config = attention
        self.eps = config.rms_norm_eps
        self.pool_layer = pool_layer
        self.kernels = kernels
        self.qkv_proj = matrix(rngs, (config.hidden_size, 2 * q_dim + 2 * kv_dim), dtype)
        self.q_norm = layer_vector(attention.head_dim)
        self.k_norm = layer_vector(attention.head_dim)
        self.o_proj = matrix(rngs, (q_dim, config.hidden_size), dtype)

    def __call__(
        self, x: Activations, batch: Batch, kv_pool: KVPool, *, last_rows: bool = False
    ) -> tuple[Delta, KVPool]:
        """Writes the tokens' keys and values to their pages, then attends to the pages.

        Args:
            x: ``[M, D]``, prefill tokens first.
            batch: where the tokens belong.
            kv_pool: ``[La, P, 2, K, Z, H]``; only this layer's pages named by ``batch.page_ids`` change.
            last_rows: give only what :meth:`Batch.last_rows` keeps.

        Returns:
            The mixed tokens ``[M, D]``, or ``[R + B, D]``, and the pool. Of decode rows alone, and of last rows, which
            are computed as such, they may be in parts, see ``linear``.
        """
        if last_rows and batch.prefill is not None:
            # Of a prompt nobody needs but its keys and values, and what its last token makes of them, as if decoded.
            kv_pool = self._write_keys(batch.split(x)[0], batch.prefill, kv_pool)
            return self(batch.last_rows(x), Batch.of(None, batch.as_rows()), kv_pool)
        config = self.config
        tokens = x.shape[0]
        # The ops take the index as an array, not as a constant: one traced and compiled kernel serves all layers.
        layer = self.pool_layer

        # Each op reads the heads that it needs where the product has left them: nothing is cut out.
        projected = linear(x, self.qkv_proj[...], "qkv_proj")  # [M, 2NH + 2KH]
        heads = projected.reshape(tokens, -1, config.head_dim)  # [M, 2N + 2K, H]: q, gate, k, v
        gates = {"first_gate": config.num_heads}

        q, kv_pool = self._kv_write(heads, batch, kv_pool, config.num_heads)

        (q_prefill, q_decode), (heads_prefill, heads_decode) = batch.split(q), batch.split(heads)
        mixed = []
        if batch.prefill is not None:
            mixed.append(
                paged_prefill_attention(
                    q_prefill,
                    heads_prefill,
                    kv_pool,
                    layer,
                    batch.prefill.page_table,
                    batch.prefill.cu_seqlens,
                    batch.prefill.kv_lens,
                    **gates,
                    implementation=implementation_of(self.kernels, "paged_prefill_attention"),
                )
            )
        if batch.decode is not None:
            mixed.append(
                paged_decode_attention(
                    q_decode,
                    heads_decode,
                    kv_pool,
                    layer,
                    batch.decode.page_table,
                    batch.decode.kv_lens,
                    **gates,
                    implementation=implementation_of(self.kernels, "paged_decode_attention"),
                )
            )
        mixed = batch.join(mixed).reshape(tokens, -1)
        return linear(mixed, self.o_proj[...], "o_proj", in_parts=batch.prefill is None), kv_pool

    def _write_keys(self, x: Activations, prefill: PrefillInputs, kv_pool: KVPool) -> KVPool:
        """Writes keys and values of prompt tokens ``x [T, D]``; there are no queries."""
        config = self.config
        kv_dim = config.num_kv_heads * config.head_dim
        projected = linear(x, self.qkv_proj[...][:, -2 * kv_dim :], "qkv_proj")  # [T, 2KH]
        return self._kv_write(projected.reshape(x.shape[0], -1, config.head_dim), prefill, kv_pool, 0)[1]

    def _kv_write(
        self, heads: Heads, tokens: Batch | PrefillInputs, kv_pool: KVPool, num_heads: int
    ) -> tuple[Queries, KVPool]:
        """``heads [M, 2N + 2K, H]`` of tokens: their queries ``[M, N, H]``, and the pool with keys and values."""
        return kv_write(
            heads,
            self.q_norm[...],
            self.k_norm[...],
            kv_pool,
            self.pool_layer,
            tokens.page_ids,
            tokens.page_offsets,
            tokens.positions,
            num_heads=num_heads,
            rotary_dim=self.config.rotary_dim,
            rope_theta=self.config.rope_theta,
            eps=self.eps,
            implementation=implementation_of(self.kernels, "kv_write"),
        )
