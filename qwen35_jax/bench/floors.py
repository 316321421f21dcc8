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


def causal_attention_flops(config: ModelConfig, lengths: Sequence[int]) -> int:
    """Operations of causal attention over whole prompts: scores and weighted values, all layers."""
    attention = config.attention
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return 4 * config.num_attention_layers * attention.num_heads * attention.head_dim * pairs


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
    per_row = 2 * state_bytes(config, state_dtype) + context * kv_token_bytes(config)
    return decode_gemm_floor_s(config, rows, ceilings) + rows * per_row / ceilings.bytes_per_s


def prefill_floor_s(
    config: ModelConfig,
    tokens: float,
    *,
    lengths: Sequence[int] | None = None,
    ceilings: Ceilings = H200,
) -> float:
    """Prompt tokens: the matrix products of the layers (the head sees one token a prompt, which is left out).

    Args:
        config: the model.
        tokens: prompt tokens in all.
        lengths: of the prompts; given, the operations of causal attention are counted too.
        ceilings: of the device.
    """
    operations = 2 * layer_parameters(config) * tokens
    if lengths is not None:
        operations += causal_attention_flops(config, lengths)
    reading = ITEMSIZE * layer_parameters(config) / ceilings.bytes_per_s
    return max(reading, operations / ceilings.flops_per_s)


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
    prefill = 2 * layer_parameters(config) * n_in / ceilings.flops_per_s
    return OfflineFloor(prefill_s=prefill, decode_s=n_out * step / rows, n_out=n_out)
