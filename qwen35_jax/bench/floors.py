"""Times below which no implementation can go on a device: what must be read, written and multiplied, over its ceilings.

The formulas count matrix products and the traffic of weights, recurrent state and KV, and nothing else: no norms, no
convolution tails, no sampling, no launches. A measured time over its floor is what is left to gain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from qwen35_jax.config import ModelConfig

ITEMSIZE = 2
"""Bytes of a weight, an activation and a KV value: bfloat16."""

STATE_ITEMSIZES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What a device can do; the defaults were measured on an H200.

    Attributes:
        bytes_per_s: of a device copy, bytes read and bytes written.
        flops_per_s: of a large bf16 matrix product.
    """

    bytes_per_s: float = 4.26e12
    flops_per_s: float = 780e12


H200 = Ceilings()
"""Ceilings of the device that the defaults describe."""


@dataclasses.dataclass(frozen=True)
class OfflineFloor:
    """Floor of a job whose requests are all alike.

    Attributes:
        prefill_s: a request's prompt.
        decode_s: a request's share of its decode steps.
        n_out: output tokens of a request.
    """

    prefill_s: float
    decode_s: float
    n_out: float

    @property
    def in_turns_tok_s(self) -> float:
        """Output tokens a second when prefill and decode take turns on the device."""
        return self.n_out / (self.prefill_s + self.decode_s)

    @property
    def overlapped_tok_s(self) -> float:
        """Output tokens a second if the shorter of the two hid behind the other."""
        return self.n_out / max(self.prefill_s, self.decode_s)


def layer_parameters(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers: what every token, of a prompt or not, is multiplied with."""
    hidden, attention, gdn = config.hidden_size, config.attention, config.gdn
    mlp = 3 * hidden * config.intermediate_size
    # Queries and their output gate, keys, values, output; and the projections of q, k, v, z, b, a, output.
    full = hidden * attention.head_dim * (3 * attention.num_heads + 2 * attention.num_kv_heads)
    linear = hidden * (gdn.conv_dim + 2 * gdn.value_dim + 2 * gdn.num_v_heads)
    return config.num_layers * mlp + config.num_attention_layers * full + config.num_gdn_layers * linear


def _ends_in_attention(config: ModelConfig) -> bool:
    return config.layer_types[-1] == "full_attention"


def prompt_parameters(config: ModelConfig) -> int:
    """Of them those that every token of a prompt is multiplied with.

    Of the last layer only states, keys and values of all tokens are needed: its queries, gates, output and MLP only for
    the last token of a prompt, as the head.
    """
    hidden, attention, gdn = config.hidden_size, config.attention, config.gdn
    full, linear = 3 * attention.num_heads * attention.head_dim, 2 * gdn.value_dim
    last = hidden * (3 * config.intermediate_size + (full if _ends_in_attention(config) else linear))
    return layer_parameters(config) - last


def decode_parameters(config: ModelConfig) -> int:
    """Numbers in the matrices of a decode step: the layers and the head, tied or not (embedding rows are few)."""
    return layer_parameters(config) + config.hidden_size * config.vocab_size


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of weights that a decode step reads."""
    return ITEMSIZE * decode_parameters(config)


def state_bytes(config: ModelConfig, state_dtype: str = "float32") -> int:
    """Bytes of one sequence's recurrent state; a decode step reads and writes them."""
    gdn = config.gdn
    numbers = config.num_gdn_layers * gdn.num_v_heads * gdn.head_v_dim * gdn.head_k_dim
    return numbers * STATE_ITEMSIZES[state_dtype]


def kv_token_bytes(config: ModelConfig) -> int:
    """Bytes of keys and values of one token of context."""
    attention = config.attention
    return ITEMSIZE * 2 * config.num_attention_layers * attention.num_kv_heads * attention.head_dim


def prefix_attention_flops(config: ModelConfig, start: int, length: int) -> int:
    """Operations of causal attention of ``length`` tokens that follow ``start`` others, all layers.

    If the last layer is one of attention, its only query is that of the last token.
    """
    attention, last = config.attention, _ends_in_attention(config)
    pairs = length * start + length * (length + 1) // 2
    pairs = (config.num_attention_layers - last) * pairs + last * (start + length)
    return 4 * attention.num_heads * attention.head_dim * pairs


def causal_attention_flops(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Operations of causal attention over whole prompts: scores and weighted values, all layers."""
    return sum(prefix_attention_flops(config, 0, length) for length in lengths)


def decode_gemm_floor_s(config: ModelConfig, rows: int, ceilings: Ceilings = H200) -> float:
    """The matrix products of a decode step: reading the weights or multiplying, whichever takes longer."""
    reading = weight_bytes(config) / ceilings.bytes_per_s
    multiplying = 2 * decode_parameters(config) * rows / ceilings.flops_per_s
    return max(reading, multiplying)


def decode_step_floor_s(
    config: ModelConfig,
    rows: int,
    context: float,
    *,
    state_dtype: str = "float32",
    ceilings: Ceilings = H200,
) -> float:
    """One decode step: its matrix products, and the state and KV of every row.

    Args:
        config: the model.
        rows: sequences.
        context: tokens of each of them, on average.
        state_dtype: dtype of the recurrent state, "float32" or "bfloat16".
        ceilings: of the device.
    """
    return sum(decode_part_floors_s(config, rows, context, state_dtype=state_dtype, ceilings=ceilings).values())


def decode_part_floors_s(
    config: ModelConfig,
    rows: int,
    context: float,
    *,
    state_dtype: str = "float32",
    ceilings: Ceilings = H200,
) -> dict[str, float]:
    """The same step by its parts, named as :data:`~qwen35_jax.bench.device_trace.PARTS` does; their sum is the step's.

    ``GEMMs`` (all of them together): the weights, or the products. ``gdn_decode``: every row's state read and written.
    ``paged_decode_attention``: every row's keys and values read.

    Args:
        config: the model.
        rows: sequences.
        context: tokens of each of them, on average.
        state_dtype: dtype of the recurrent state, "float32" or "bfloat16".
        ceilings: of the device.
    """
    return {
        "GEMMs": decode_gemm_floor_s(config, rows, ceilings),
        "gdn_decode": rows * 2 * state_bytes(config, state_dtype) / ceilings.bytes_per_s,
        "paged_decode_attention": rows * context * kv_token_bytes(config) / ceilings.bytes_per_s,
    }


def prefill_floor_s(
    config: ModelConfig,
    tokens: float,
    *,
    lengths: Sequence[int] | None = None,
    ceilings: Ceilings = H200,
) -> float:
    """Prompt tokens: the matrix products of the layers.

    What only the last token of a prompt needs is left out: the head, and most of the last layer
    (:func:`prompt_parameters`).

    Args:
        config: the model.
        tokens: prompt tokens in all.
        lengths: of the prompts; given, the operations of causal attention are counted too.
        ceilings: of the device.
    """
    operations = 2 * prompt_parameters(config) * tokens
    if lengths is not None:
        operations += causal_attention_flops(config, lengths)
    reading = ITEMSIZE * layer_parameters(config) / ceilings.bytes_per_s
    return max(reading, operations / ceilings.flops_per_s)


def chunk_part_floors_s(config: ModelConfig, start: int, length: int, *, ceilings: Ceilings = H200) -> dict[str, float]:
    """A chunk of a long prompt, of which ``start`` tokens are in the cache: what grows with them and what does not.

    ``GEMMs`` is :func:`prefill_floor_s`. ``paged_prefill_attention``: the products of every token with its prefix and
    the chunk up to itself, or the keys and values of prefix and chunk read once, whichever takes longer. Their sum is
    the floor of the chunk.

    Args:
        config: the model.
        start: tokens of the prompt before the chunk.
        length: tokens of the chunk.
        ceilings: of the device.
    """
    products = prefix_attention_flops(config, start, length) / ceilings.flops_per_s
    reading = (start + length) * kv_token_bytes(config) / ceilings.bytes_per_s
    return {
        "GEMMs": prefill_floor_s(config, length, ceilings=ceilings),
        "paged_prefill_attention": max(products, reading),
    }


def chunk_floors_s(
    config: ModelConfig, chunks: Sequence[tuple[int, int]], *, ceilings: Ceilings = H200
) -> tuple[float, ...]:
    """Floors of the chunks of a long prompt, each a (start, length); see :func:`chunk_part_floors_s`."""
    return tuple(sum(chunk_part_floors_s(config, *chunk, ceilings=ceilings).values()) for chunk in chunks)


def prefill_part_floors_s(
    config: ModelConfig,
    lengths: Sequence[int],
    *,
    state_dtype: str = "float32",
    ceilings: Ceilings = H200,
) -> dict[str, float]:
    """Whole prompts, by the parts of a prefill, named as :data:`~qwen35_jax.bench.device_trace.PARTS` does.

    ``GEMMs`` is :func:`prefill_floor_s`, the floor of the step. The others are floors of kernels of their own: their
    inputs read once and their outputs written once through the device's memory. A product that did such a part's work
    on the way would save it, and what the L2 cache still has from the kernel before need not be read, which is why
    these are no terms of the step's floor. Of all layers together, in numbers of ``ITEMSIZE`` a token:

    - ``causal_conv``: its channels in and out; a request's tail out.
    - ``gdn_prefill``: queries, keys, values and two gates a value head in, outputs out; a request's state out (no
      products: how many there are depends on the form of the algorithm).
    - ``gated_norm``: outputs and gates in, outputs out.
    - ``kv_write``: queries, keys and values in and out.
    - ``paged_prefill_attention``: the products of causal attention, or queries, gates, keys and values in and outputs
      out, whichever takes longer.
    - ``add_rms_norm``: the residual stream and what is added in, the stream and its norm out; twice a layer, without
      the first norm, which adds nothing, and the last two, which only see the last tokens.
    - ``swiglu``: two halves in, one out.

    What the last layer does for the last tokens alone is not counted.

    Args:
        config: the model.
        lengths: tokens of each prompt, none of them seen before.
        state_dtype: dtype of the recurrent state, "float32" or "bfloat16".
        ceilings: of the device.
    """
    attention, gdn, tokens = config.attention, config.gdn, sum(lengths)
    linear, full = config.num_gdn_layers, config.num_attention_layers
    queries, keys = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    asking = full - _ends_in_attention(config)  # attention layers with a query of every token
    gated = linear - (not _ends_in_attention(config))
    tail = gdn.conv_dim * (gdn.conv_kernel - 1)
    numbers = {
        "causal_conv": linear * (2 * tokens * gdn.conv_dim + len(lengths) * tail),
        "gdn_prefill": linear * tokens * (gdn.conv_dim + 2 * gdn.num_v_heads + gdn.value_dim),
        "gated_norm": gated * tokens * 3 * gdn.value_dim,
        "kv_write": tokens * 2 * (asking * queries + full * 2 * keys),
        "paged_prefill_attention": asking * tokens * (3 * queries + 2 * keys),
        "add_rms_norm": (2 * config.num_layers - 2) * tokens * 4 * config.hidden_size,
        "swiglu": (config.num_layers - 1) * tokens * 3 * config.intermediate_size,
    }
    floors = {part: ITEMSIZE * number / ceilings.bytes_per_s for part, number in numbers.items()}
    floors["gdn_prefill"] += len(lengths) * state_bytes(config, state_dtype) / ceilings.bytes_per_s
    products = causal_attention_flops(config, lengths) / ceilings.flops_per_s
    floors["paged_prefill_attention"] = max(floors["paged_prefill_attention"], products)
    return {"GEMMs": prefill_floor_s(config, tokens, ceilings=ceilings), **floors}


def offline_floor(
    config: ModelConfig,
    n_in: float,
    n_out: float,
    rows: int,
    *,
    state_dtype: str = "float32",
    ceilings: Ceilings = H200,
) -> OfflineFloor:
    """A long job of equal requests, ``rows`` of them decoding at any time.

    Args:
        config: the model.
        n_in: prompt tokens of a request.
        n_out: output tokens of a request.
        rows: sequences decoding together.
        state_dtype: dtype of the recurrent state.
        ceilings: of the device.
    """
    context = n_in + n_out / 2
    step = decode_step_floor_s(config, rows, context, state_dtype=state_dtype, ceilings=ceilings)
    prefill = 2 * prompt_parameters(config) * n_in / ceilings.flops_per_s
    return OfflineFloor(prefill_s=prefill, decode_s=n_out * step / rows, n_out=n_out)
