"""KV page pool and recurrent-state slot pools as one donated pytree, and the memory plan that sizes them.

All bytes of the engine are added up before anything is allocated (:func:`plan_memory`): a job that does not fit is
told so with the numbers, and one that fits in part has its ``max_num_seqs`` clamped with a warning.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen35_jax.config import ModelConfig

PAGE_SIZE = 64
"""Tokens of a KV page: equal to the chunk grid of prefill and to the tile of the kernels."""

_TYPICAL_PAGES = 16  # pages a sequence is assumed to want when slots and pages compete for memory (about 1k tokens)


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


def cache_shapes(
    config: ModelConfig, num_pages: int, num_slots: int, dtype: jnp.dtype, state_dtype: jnp.dtype
) -> Cache:
    """Shapes and dtypes of the pools; ``num_pages`` and ``num_slots`` include the null page and slot."""
    attention, gdn = config.attention, config.gdn
    return Cache(
        kv=jax.ShapeDtypeStruct(  # type: ignore[arg-type]
            (config.num_attention_layers, num_pages, 2, attention.num_kv_heads, PAGE_SIZE, attention.head_dim), dtype
        ),
        conv=jax.ShapeDtypeStruct(  # type: ignore[arg-type]
            (config.num_gdn_layers, num_slots, gdn.conv_kernel - 1, gdn.conv_dim), dtype
        ),
        state=jax.ShapeDtypeStruct(  # type: ignore[arg-type]
            (config.num_gdn_layers, num_slots, gdn.num_v_heads, gdn.head_v_dim, gdn.head_k_dim), state_dtype
        ),
    )


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays (or shape structs) in a pytree."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def page_bytes(config: ModelConfig, dtype: jnp.dtype) -> int:
    """Bytes of one KV page over all full-attention layers."""
    attention = config.attention
    itemsize = jnp.dtype(dtype).itemsize
    return config.num_attention_layers * 2 * attention.num_kv_heads * PAGE_SIZE * attention.head_dim * itemsize


def slot_bytes(config: ModelConfig, dtype: jnp.dtype, state_dtype: jnp.dtype) -> int:
    """Bytes of one sequence's recurrent state and conv tail over all GDN layers."""
    gdn = config.gdn
    state = gdn.num_v_heads * gdn.head_v_dim * gdn.head_k_dim * jnp.dtype(state_dtype).itemsize
    conv = (gdn.conv_kernel - 1) * gdn.conv_dim * jnp.dtype(dtype).itemsize
    return config.num_gdn_layers * (state + conv)


def sampler_row_bytes(config: ModelConfig) -> int:
    """Bytes of one sequence's sampler record: 16 bits a vocabulary row, plus its scalars and stop ids."""
    return 2 * config.vocab_size + 4 * 80


# Copies of the logits that the head and the sampler hold at most: adjusted and scaled ones, counts, the lists of the
# top-k. XLA fuses more of them on a GPU. Seen in the memory analysis of compiled programs.
_LOGITS_COPIES = {"cpu": 6, "gpu": 4}


def workspace_bytes(config: ModelConfig, tokens: int, rows: int, dtype: jnp.dtype, platform: str) -> int:
    """Estimate of the largest program's scratch: activations of one layer and the sampler's logits.

    The live set of a layer is the residual stream (twice), the widest fused projection and its split copy. The partial
    sums of decode attention are not counted: they are gone before there are logits, which take more with the vocabulary
    of the family.

    Args:
        config: the model.
        tokens: rows of the residual stream, prefill tokens and decode rows together.
        rows: rows that the head and the sampler see.
        dtype: activation dtype.
        platform: "cpu" or "gpu".
    """
    gdn, attention = config.gdn, config.attention
    widest = max(
        2 * config.intermediate_size,
        gdn.conv_dim + gdn.value_dim + 2 * gdn.num_v_heads,
        2 * (attention.num_heads + attention.num_kv_heads) * attention.head_dim,
    )
    itemsize = jnp.dtype(dtype).itemsize
    layer = tokens * (2 * config.hidden_size + 2 * widest) * itemsize
    gdn_core = tokens * (gdn.conv_dim + gdn.value_dim) * 4  # fp32 q, k, v and output of the chunked rule
    head = rows * config.vocab_size * 4 * _LOGITS_COPIES[platform]
    return layer + gdn_core + head


class MemoryPlanError(ValueError):
    """The model, or one sequence of the asked length, does not fit in the device's memory."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything an engine puts on one device, and the sizes that follow from them.

    Attributes:
        limit: bytes the plan may use.
        weights: parameters.
        pools: KV pages and state slots, null page and slot included.
        sampler: sampler records of all slots.
        staging: pools and records of the staging side (device overlap only).
        workspace: scratch of the largest program (estimate).
        num_pages: pages of the KV pool, null page included.
        num_seqs: sequences admitted at once (slots less the null slot).
        max_model_len: longest prompt + output.
        warnings: what was clamped, in words.
    """

    limit: int
    weights: int
    pools: int
    sampler: int
    staging: int
    workspace: int
    num_pages: int
    num_seqs: int
    max_model_len: int
    warnings: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Bytes planned in all."""
        return self.weights + self.pools + self.sampler + self.staging + self.workspace

    def describe(self) -> str:
        """The plan as a small table in MiB."""
        rows = [
            ("weights", self.weights),
            (f"pools ({self.num_pages} pages, {self.num_seqs} + 1 slots)", self.pools),
            ("sampler records", self.sampler),
            ("staging", self.staging),
            ("workspace (estimate)", self.workspace),
            ("total", self.total),
            ("limit", self.limit),
        ]
        return "\n".join(f"  {name:<42} {value / 2**20:>12,.1f} MiB" for name, value in rows)


def pages_for(tokens: int) -> int:
    """Pages that hold ``tokens`` tokens."""
    return -(-tokens // PAGE_SIZE)


def round_down(amount: int) -> int:
    """An amount without what comes after its eight leading bits: less by no more than 1/128, 0 for less than 0.

    How much memory is free differs from start to start. Sizes that followed every byte of it would make other programs
    each time, and none that an earlier start has kept would fit.
    """
    return amount >> (shift := max(0, amount.bit_length() - 8)) << shift if amount > 0 else 0


def plan_memory(
    config: ModelConfig,
    *,
    limit: int,
    dtype: jnp.dtype,
    state_dtype: jnp.dtype,
    weights: int,
    max_num_seqs: int,
    max_model_len: int,
    max_model_len_is_default: bool,
    max_num_batched_tokens: int,
    sampled_rows: int,
    num_kv_pages: int | None = None,
    staging: int = 0,
    platform: str = "cpu",
) -> MemoryPlan:
    """Size the pools so that everything fits in ``limit`` bytes.

    A sequence costs one slot whatever its length and one page per 64 tokens. The pool is never larger than every
    admitted sequence at full length could use. When memory is short the number of sequences is clamped (each is
    assumed to want about a thousand tokens). A default ``max_model_len`` gives way before that: to ``num_kv_pages``,
    and so far that one sequence of full length takes no more than half of the room, or a job of short prompts would
    run one at a time for the sake of a length that nobody asked for.

    Sizes follow from free memory in steps of about one percent (:func:`round_down`), so that the same options give the
    same sizes, and with them the same programs, at the next start.

    Args:
        config: the model.
        limit: bytes the plan may use on this device.
        dtype: activation, weight and KV dtype.
        state_dtype: dtype of the recurrent state.
        weights: bytes of the parameters on this device.
        max_num_seqs: asked number of sequences.
        max_model_len: asked longest prompt + output in tokens.
        max_model_len_is_default: whether ``max_model_len`` may be lowered without asking.
        max_num_batched_tokens: prefill tokens of the largest program.
        sampled_rows: rows that the head of the largest program sees.
        num_kv_pages: pages asked for by hand, null page not counted; None takes what fits.
        staging: bytes of the staging side when it shares this device.
        platform: "cpu" or "gpu": the scratch of programs differs.

    Raises:
        MemoryPlanError: weights and one sequence do not fit; the message has the numbers.
    """
    page, slot, record = page_bytes(config, dtype), slot_bytes(config, dtype, state_dtype), sampler_row_bytes(config)
    workspace = workspace_bytes(config, max_num_batched_tokens + max_num_seqs, sampled_rows, dtype, platform)
    left = limit - weights - workspace - staging - page - slot - record  # null page, slot and record
    steady = round_down(left)
    warnings = []

    def mib(value: float) -> str:
        return f"{value / 2**20:,.1f} MiB"

    full = pages_for(max_model_len)
    room = left
    if max_model_len_is_default and num_kv_pages is not None and num_kv_pages < full:
        full = num_kv_pages
        warnings.append(f"max_model_len lowered from {max_model_len} to {full * PAGE_SIZE}, what num_kv_pages holds")
        max_model_len = full * PAGE_SIZE
    elif max_model_len_is_default and num_kv_pages is None:
        room = max(steady // 2, min(left, page + slot + record))
    if room < full * page + slot + record:
        affordable = (room - slot - record) // page * PAGE_SIZE
        if affordable < PAGE_SIZE or not max_model_len_is_default:
            raise MemoryPlanError(
                f"one sequence of max_model_len={max_model_len} tokens does not fit: it needs "
                f"{mib(full * page + slot + record)} of pools, and {mib(max(left, 0))} are left of {mib(limit)} after "
                f"weights ({mib(weights)}), workspace ({mib(workspace)}) and staging ({mib(staging)}); "
                f"lower max_model_len, max_num_batched_tokens or raise gpu_memory_utilization"
            )
        warnings.append(f"max_model_len lowered from {max_model_len} to {affordable}: that is what memory allows")
        max_model_len, full = affordable, pages_for(affordable)
    if num_kv_pages is not None:
        if num_kv_pages < full:
            raise MemoryPlanError(
                f"num_kv_pages={num_kv_pages} holds {num_kv_pages * PAGE_SIZE} tokens, fewer than "
                f"max_model_len={max_model_len}"
            )
        if num_kv_pages * page + slot + record > left:
            raise MemoryPlanError(f"num_kv_pages={num_kv_pages} needs {mib(num_kv_pages * page)}, {mib(left)} are left")
        # One sequence fits, as was just seen. What was asked for and fits does not follow free memory: no steps.
        asked = num_kv_pages * page + max_num_seqs * (slot + record)
        room = left if asked <= left else steady
        num_seqs = min(max_num_seqs, max(1, (room - num_kv_pages * page) // (slot + record)))
        num_pages = num_kv_pages
    else:
        # One sequence at full length must always fit beside the slots; the others share what is left.
        one = full * page + slot + record
        per_seq = slot + record + min(full, _TYPICAL_PAGES) * page
        # What was asked for and fits does not follow free memory: no steps.
        asked = one + (max_num_seqs - 1) * per_seq
        steady = max(steady, asked if asked <= left else one)
        num_seqs = min(max_num_seqs, 1 + (steady - one) // per_seq)
        num_pages = min((steady - num_seqs * (slot + record)) // page, num_seqs * full)
    if num_seqs < max_num_seqs:
        warnings.append(
            f"max_num_seqs clamped from {max_num_seqs} to {num_seqs}: a sequence's state and sampler record take "
            f"{mib(slot + record)}"
        )
    return MemoryPlan(
        limit=limit,
        weights=weights,
        pools=(num_pages + 1) * page + (num_seqs + 1) * slot,
        sampler=(num_seqs + 1) * record,
        staging=staging,
        workspace=workspace,
        num_pages=num_pages + 1,
        num_seqs=num_seqs,
        max_model_len=max_model_len,
        warnings=tuple(warnings),
    )
