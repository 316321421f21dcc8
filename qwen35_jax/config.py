"""Model and engine configuration as frozen dataclasses.

The numbers of a checkpoint always come from its own ``config.json`` (:meth:`ModelConfig.from_hf`); presets exist for
benchmarks, random weights and tests.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

LayerKind = Literal["linear_attention", "full_attention"]


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Gated full attention.

    Attributes:
        num_heads: query heads N.
        num_kv_heads: key/value heads K (N is a multiple of K).
        head_dim: H.
        rotary_dim: leading dims of a head that RoPE rotates (even, <= H).
        rope_theta: RoPE base.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int = 256
    rotary_dim: int = 64
    rope_theta: float = 1e7


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Gated DeltaNet (linear attention).

    Attributes:
        num_k_heads: key/query heads Hk.
        num_v_heads: value heads Hv (a multiple of Hk; value head h uses key head ``h // (Hv // Hk)``).
        head_k_dim: Dk.
        head_v_dim: Dv.
        conv_kernel: taps of the causal depthwise convolution.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int = 128
    head_v_dim: int = 128
    conv_kernel: int = 4

    @property
    def key_dim(self) -> int:
        """Hk * Dk."""
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        """Hv * Dv."""
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense Qwen3.5 text decoder.

    Attributes:
        hidden_size: D.
        intermediate_size: width F of the SwiGLU MLP.
        vocab_size: rows of the embedding (may exceed the tokenizer's ids; the rest is padding).
        layer_types: kind of every layer, in order.
        attention: the full-attention layers.
        gdn: the linear-attention layers.
        rms_norm_eps: epsilon of every RMSNorm.
        max_position_embeddings: longest context.
        tie_word_embeddings: whether the head is the embedding.
        dtype: dtype name of the checkpoint's matrices ("bfloat16", "float32", "float16").
        eos_token_ids: EOS ids named by the model's own config files (config.json and generation_config.json).
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layer_types: tuple[LayerKind, ...]
    attention: AttentionConfig
    gdn: GatedDeltaNetConfig
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 262144
    tie_word_embeddings: bool = True
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers L."""
        return len(self.layer_types)

    @property
    def num_attention_layers(self) -> int:
        """Number of full-attention layers La."""
        return sum(kind == "full_attention" for kind in self.layer_types)

    @property
    def num_gdn_layers(self) -> int:
        """Number of Gated DeltaNet layers Lg."""
        return sum(kind == "linear_attention" for kind in self.layer_types)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Everything that shapes an engine; the fields are the arguments of :class:`qwen35_jax.LLM` and the CLI flags.

    Attributes:
        dtype: "auto" (the checkpoint's), "bfloat16" or "float32": weights, activations, KV.
        max_model_len: longest prompt + output in tokens; None takes the model's limit, clamped to the memory plan.
        max_num_seqs: most sequences admitted at once (clamped to memory with a warning).
        max_num_batched_tokens: hard cap on prefill tokens of a step; a multiple of 64. Decode rows are not counted.
        gpu_memory_utilization: share of the device's memory that the plan may use.
        scheduler_policy: "off" or "auto" ("slo" and "throughput" are refused by name until built).
        decode_overlap: "off", "stream" or "device".
        decode_steps: decode steps per dispatch when nothing waits for prefill, 1 or 8.
        num_kv_pages: pages of 64 tokens in the KV pool; None takes what the memory plan allows.
        state_dtype: dtype of the recurrent state, "float32" (default) or "bfloat16".
        kernels: kernel implementation for every op: "auto", "reference" or a registered name.
        overlap_dispatch: read results one dispatch late (True) or at once (False, the oracle).
        async_chunks: most prefill chunks in flight in ``device`` overlap.
        seed: default seed of sampled requests.
        load_format: "auto" or "random".
        compilation_cache_dir: directory of the persistent compilation cache; None keeps it off.
        enable_prefix_caching: not built yet: True is refused by name.
        tensor_parallel_size: not built yet: anything but 1 is refused by name.
        data_parallel_size: not built yet: anything but 1 is refused by name.
        debug_poison: fill freed slots and pages with NaN (tests of state hygiene).
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    scheduler_policy: str = "off"
    decode_overlap: str = "off"
    decode_steps: int = 1
    num_kv_pages: int | None = None
    state_dtype: str = "float32"
    kernels: str = "auto"
    overlap_dispatch: bool = True
    async_chunks: int = 1
    seed: int = 0
    load_format: str = "auto"
    compilation_cache_dir: str | None = None
    enable_prefix_caching: bool = False
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    debug_poison: bool = False
