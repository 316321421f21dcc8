"""Model and engine configuration as frozen dataclasses.

The numbers of a checkpoint always come from its own ``config.json`` (:meth:`ModelConfig.from_hf`); presets exist for
benchmarks, random weights and tests. Every inconsistency is a :class:`~qwen35_jax.errors.UserInputError` that names
the field and the numbers.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal

from qwen35_jax.errors import UserInputError

LayerKind = Literal["linear_attention", "full_attention"]
LAYER_KINDS: tuple[str, ...] = ("linear_attention", "full_attention")
MODEL_DTYPES: tuple[str, ...] = ("bfloat16", "float32", "float16")
PREFILL_GRID = 64  # chunk boundaries, pages and kernel tiles share this grid


def _require_positive(owner: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserInputError(f"{owner}: {name} must be a positive integer, got {value!r}")


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

    def __post_init__(self):
        names = ("num_heads", "num_kv_heads", "head_dim", "rotary_dim")
        _require_positive("attention", {name: getattr(self, name) for name in names})
        if self.num_heads % self.num_kv_heads:
            raise UserInputError(
                f"attention: num_attention_heads ({self.num_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise UserInputError(
                f"attention: the rotary dims ({self.rotary_dim}) must be even and at most head_dim ({self.head_dim})"
            )
        if not self.rope_theta > 0:
            raise UserInputError(f"attention: rope_theta must be positive, got {self.rope_theta!r}")


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

    def __post_init__(self):
        names = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel")
        _require_positive("linear attention", {name: getattr(self, name) for name in names})
        if self.num_v_heads % self.num_k_heads:
            raise UserInputError(
                f"linear attention: linear_num_value_heads ({self.num_v_heads}) is not a multiple of "
                f"linear_num_key_heads ({self.num_k_heads})"
            )
        if self.conv_kernel != 4:
            raise UserInputError(f"linear_conv_kernel_dim = {self.conv_kernel} is not supported (only 4)")

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
class MoeConfig:
    """Routed experts of the mixture-of-experts members: read from their configs, but such models do not run yet.

    Attributes:
        num_experts: routed experts of a layer.
        num_experts_per_tok: experts a token is sent to.
        moe_intermediate_size: width of a routed expert.
        shared_expert_intermediate_size: width of the gated shared expert.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int

    def __post_init__(self):
        _require_positive("mixture of experts", dataclasses.asdict(self))
        if self.num_experts_per_tok > self.num_experts:
            raise UserInputError(
                f"mixture of experts: num_experts_per_tok ({self.num_experts_per_tok}) exceeds "
                f"num_experts ({self.num_experts})"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen3.5 text decoder.

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
        moe: the experts that replace the MLP; None for the dense members, which are the ones that run.
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
    moe: MoeConfig | None = None

    def __post_init__(self):
        names = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
        _require_positive("model", {name: getattr(self, name) for name in names})
        if not self.layer_types:
            raise UserInputError("model: layer_types is empty")
        for index, kind in enumerate(self.layer_types):
            if kind not in LAYER_KINDS:
                raise UserInputError(f"model: layer_types[{index}] is {kind!r}, not one of {', '.join(LAYER_KINDS)}")
        if not 0 < self.rms_norm_eps < 1:
            raise UserInputError(f"model: rms_norm_eps must lie between 0 and 1, got {self.rms_norm_eps!r}")
        if self.dtype not in MODEL_DTYPES:
            raise UserInputError(f"model: dtype {self.dtype!r} is not supported (one of {', '.join(MODEL_DTYPES)})")
        for token in self.eos_token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise UserInputError(f"model: eos_token_id {token!r} is not an id below vocab_size ({self.vocab_size})")

    @classmethod
    def from_hf(cls, model_dir: str | os.PathLike[str]) -> ModelConfig:
        """Reads ``config.json`` (and ``generation_config.json`` for EOS ids) of a Hugging Face directory.

        Raises:
            UserInputError: the directory or file is missing or malformed, a field is missing or inconsistent, or the
                model needs something that is not supported (named).
        """
        from qwen35_jax import hf_config

        return hf_config.read_model_config(model_dir)

    def to_hf(self, *, text_only: bool = False) -> dict[str, Any]:
        """The ``config.json`` of this model: the layout of the released checkpoints, or flat when ``text_only``."""
        from qwen35_jax import hf_config

        return hf_config.to_hf_dict(self, text_only=text_only)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ModelConfig:
        """A member of the family by name ("0.8b" ... "27b"), or a shrunken one ("tiny-0.8b", "tiny-4b", "tiny-27b").

        Args:
            name: the preset, in any case.
            **overrides: fields to replace; ``num_layers`` takes that many layers of the family's pattern.

        Raises:
            UserInputError: unknown name or inconsistent overrides.
        """
        from qwen35_jax import presets

        return presets.preset(name, **overrides)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, for metadata; :meth:`from_dict` reads them back."""
        return {
            **dataclasses.asdict(self),
            "layer_types": list(self.layer_types),
            "eos_token_ids": list(self.eos_token_ids),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            UserInputError: a field is missing, unknown or inconsistent.
        """
        try:
            values = dict(values)
            moe = values.pop("moe", None)
            return cls(
                layer_types=tuple(values.pop("layer_types")),
                attention=AttentionConfig(**values.pop("attention")),
                gdn=GatedDeltaNetConfig(**values.pop("gdn")),
                eos_token_ids=tuple(values.pop("eos_token_ids", ())),
                moe=None if moe is None else MoeConfig(**moe),
                **values,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UserInputError(f"stored model configuration is malformed: {error}") from error

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
        num_kv_pages: pages of 64 tokens that sequences can use; None takes what the memory plan allows.
        state_dtype: dtype of the recurrent state, "float32" (default) or "bfloat16".
        kernels: kernel implementation for every op: "auto", "reference", a registered name, or ``op=name`` pairs with
            commas between them, the other ops being "auto".
        overlap_dispatch: read results one dispatch late (True) or at once (False, the oracle).
        async_chunks: most prefill chunks in flight in ``device`` overlap.
        seed: default seed of sampled requests.
        load_format: "auto" or "random".
        compilation_cache_dir: directory of compiled programs, which a later start loads, and of JAX's own cache; None
            keeps both off.
        enable_prefix_caching: not built yet: True is refused by name.
        tensor_parallel_size: not built yet: anything but 1 is refused by name.
        data_parallel_size: not built yet: anything but 1 is refused by name.
        debug_poison: fill freed slots and pages with NaN (tests of state hygiene).
        skip_tokenizer_init: take and give token ids only.
        batch_invariant: not built yet: True is refused by name.
        quantization: not built yet: anything but None is refused by name.
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
    skip_tokenizer_init: bool = False
    batch_invariant: bool = False
    quantization: str | None = None

    def validate(self) -> EngineConfig:
        """Checks every option, and refuses by name those that are not built yet.

        Returns:
            self, so that it chains.

        Raises:
            UserInputError: the first option that is wrong, with its value.
        """
        self._check_types()
        self._check_choice("dtype", ("auto", "bfloat16", "float32"))
        self._check_choice("state_dtype", ("float32", "bfloat16"))
        self._check_choice("load_format", ("auto", "random"))
        self._check_choice("decode_overlap", ("off", "stream", "device"))
        if self.scheduler_policy in ("slo", "throughput"):
            raise UserInputError(
                f"scheduler_policy={self.scheduler_policy!r} is not supported yet: use 'off' or 'auto'"
            )
        self._check_choice("scheduler_policy", ("off", "auto"))
        if self.decode_steps not in (1, 8):
            raise UserInputError(f"decode_steps must be 1 or 8, got {self.decode_steps}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UserInputError(
                f"max_model_len must be at least 2 (a prompt and an output token), got {self.max_model_len}"
            )
        if self.max_num_seqs < 1:
            raise UserInputError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        if self.max_num_batched_tokens < PREFILL_GRID or self.max_num_batched_tokens % PREFILL_GRID:
            raise UserInputError(
                f"max_num_batched_tokens must be a positive multiple of {PREFILL_GRID}, "
                f"got {self.max_num_batched_tokens}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UserInputError(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}"
            )
        if self.num_kv_pages is not None and self.num_kv_pages < 1:
            raise UserInputError(f"num_kv_pages must be at least 1, got {self.num_kv_pages}")
        if self.async_chunks < 1:
            raise UserInputError(f"async_chunks must be at least 1, got {self.async_chunks}")
        if not self.kernels:
            raise UserInputError("kernels must be 'auto', 'reference' or the name of an implementation, got ''")
        if self.compilation_cache_dir == "":
            raise UserInputError("compilation_cache_dir must be a directory or None, got ''")
        for name in ("enable_prefix_caching", "batch_invariant"):
            if getattr(self, name):
                raise UserInputError(f"{name}=True is not supported yet")
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) != 1:
                raise UserInputError(f"{name}={getattr(self, name)} is not supported yet: only 1")
        if self.quantization is not None:
            raise UserInputError(f"quantization={self.quantization!r} is not supported yet")
        return self

    def activation_dtype(self, model: ModelConfig) -> str:
        """The dtype name of weights and activations: ``dtype``, or for "auto" that of the checkpoint.

        A float16 checkpoint runs in bfloat16: the kernels know bfloat16 and float32 only.
        """
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if model.dtype == "float16" else model.dtype

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise UserInputError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def _check_types(self) -> None:
        """Each field holds a value of its annotated type (an int passes for a float, a bool for neither)."""
        kinds = {"str": str, "int": int, "float": (int, float), "bool": bool}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kind, _, optional = str(field.type).partition(" | ")
            if optional and value is None:
                continue
            if not isinstance(value, kinds[kind]) or (kind != "bool" and isinstance(value, bool)):
                raise UserInputError(f"{field.name} must be {kind}{' or None' if optional else ''}, got {value!r}")
