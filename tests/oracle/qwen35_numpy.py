"""The mathematics of the Qwen3.5 text decoder in float64 numpy, one token after another: the oracle of the tests.

It shares nothing with the product: Hugging Face tensor names and a Hugging Face configuration go in; every layer's
output, logits and log-probabilities come out. The recurrence runs token by token and attention looks at every earlier
key, so there is no chunking, padding, packing or paging to get wrong. :class:`OracleState` carries a sequence on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray


@dataclasses.dataclass
class OracleState:
    """What a sequence leaves behind, one entry a layer (None before the first token).

    Attributes:
        length: tokens seen so far.
        layers: (keys, values), each [S, K, H], of a full-attention layer; (last raw convolution inputs [3, C],
            recurrent state [Hv, Dk, Dv]) of a linear-attention layer.
    """

    length: int
    layers: list[tuple[Array, Array] | None]


@dataclasses.dataclass(frozen=True)
class OracleOutput:
    """Results for T tokens in float64.

    Attributes:
        layer_outputs: residual stream after each layer, [L, T, D].
        hidden: after the final norm, [T, D].
        logits: [T, V].
        logprobs: log-softmax of the logits, [T, V].
    """

    layer_outputs: Array
    hidden: Array
    logits: Array
    logprobs: Array


def log_softmax(logits: Array) -> Array:
    """Log-softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _softplus(x: Array) -> Array:
    return np.logaddexp(0.0, x)


def _normalise(x: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _l2_normalise(x: Array) -> Array:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


class Oracle:
    """A Qwen3.5 text decoder.

    Args:
        config: config.json as a dict, full (with `text_config`) or flat.
        tensors: Hugging Face name -> array, prefixed `model.language_model.` or `model.`; matrices are [out, in].
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]):
        self.config = text = config.get("text_config", config)
        full_export = any(name.startswith("model.language_model.") for name in tensors)
        self._prefix = "model.language_model." if full_export else "model."
        self._tensors = tensors
        self.eps = text["rms_norm_eps"]
        self.layer_types: Sequence[str] = text["layer_types"]
        self.embed = self._get("embed_tokens.weight")
        self.head = self.embed if text["tie_word_embeddings"] else tensors["lm_head.weight"].astype(np.float64)
        self.layers = [self._layer_tensors(i) for i in range(len(self.layer_types))]
        self.final_norm = self._get("norm.weight")
        rope = text["rope_parameters"]
        rotary = int(text["head_dim"] * rope["partial_rotary_factor"])
        self.frequencies = float(rope["rope_theta"]) ** (-np.arange(0, rotary, 2) / rotary)  # [rotary / 2]

    def _get(self, name: str) -> Array:
        return self._tensors[self._prefix + name].astype(np.float64)

    def _layer_tensors(self, i: int) -> dict[str, Array]:
        start = f"{self._prefix}layers.{i}."
        return {n.removeprefix(start): t.astype(np.float64) for n, t in self._tensors.items() if n.startswith(start)}

    def new_state(self) -> OracleState:
        """The state of an empty sequence."""
        return OracleState(0, [None] * len(self.layer_types))

    def forward(self, tokens: Sequence[int] | Array, state: OracleState | None = None) -> OracleOutput:
        """Runs T tokens that follow those of `state`, which is advanced in place (an empty one by default)."""
        state = self.new_state() if state is None else state
        tokens = np.asarray(tokens)
        positions = state.length + np.arange(len(tokens))
        x = self.embed[tokens]
        outputs = []
        for i, (kind, w) in enumerate(zip(self.layer_types, self.layers, strict=True)):
            mixer = self._linear_attention if kind == "linear_attention" else self._full_attention
            normed = _normalise(x, self.eps) * (1.0 + w["input_layernorm.weight"])
            mixed, state.layers[i] = mixer(w, normed, positions, state.layers[i])
            x = x + mixed
            normed = _normalise(x, self.eps) * (1.0 + w["post_attention_layernorm.weight"])
            gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
            x = x + (_silu(gate) * up) @ w["mlp.down_proj.weight"].T
            outputs.append(x)
        state.length += len(tokens)
        hidden = _normalise(x, self.eps) * (1.0 + self.final_norm)
        logits = hidden @ self.head.T
        return OracleOutput(np.stack(outputs), hidden, logits, log_softmax(logits))

    def _full_attention(self, w: dict[str, Array], x: Array, positions: Array, past) -> tuple[Array, tuple]:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim, count = self.config["head_dim"], len(x)
        q_and_gate = (x @ w["self_attn.q_proj.weight"].T).reshape(count, heads, 2, dim)
        q, gate = q_and_gate[:, :, 0], q_and_gate[:, :, 1]
        k = (x @ w["self_attn.k_proj.weight"].T).reshape(count, kv_heads, dim)
        v = (x @ w["self_attn.v_proj.weight"].T).reshape(count, kv_heads, dim)
        q = self._rotate(_normalise(q, self.eps) * (1.0 + w["self_attn.q_norm.weight"]), positions)
        k = self._rotate(_normalise(k, self.eps) * (1.0 + w["self_attn.k_norm.weight"]), positions)
        if past is not None:
            k, v = np.concatenate([past[0], k]), np.concatenate([past[1], v])
        out = np.empty((count, heads, dim))
        visible = np.arange(len(k)) <= positions[:, None]  # [T, S]
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(dim)
            out[:, head] = np.exp(log_softmax(np.where(visible, scores, -np.inf))) @ v[:, kv_head]
        out = out * _sigmoid(gate)
        return out.reshape(count, heads * dim) @ w["self_attn.o_proj.weight"].T, (k, v)

    def _rotate(self, x: Array, positions: Array) -> Array:
        """Rotates dims (i, i + half) of the leading rotary dims of x [T, heads, H] by position * frequency i."""
        half = len(self.frequencies)
        angles = positions[:, None, None] * self.frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    def _linear_attention(self, w: dict[str, Array], x: Array, positions: Array, past) -> tuple[Array, tuple]:
        c = self.config
        k_heads, v_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        k_dim, v_dim, taps = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
        count = len(x)
        raw = x @ w["linear_attn.in_proj_qkv.weight"].T
        z = (x @ w["linear_attn.in_proj_z.weight"].T).reshape(count, v_heads, v_dim)
        beta = _sigmoid(x @ w["linear_attn.in_proj_b.weight"].T)
        a = x @ w["linear_attn.in_proj_a.weight"].T
        log_decay = -np.exp(w["linear_attn.A_log"]) * _softplus(a + w["linear_attn.dt_bias"])

        if past is None:
            past = (np.zeros((taps - 1, raw.shape[1])), np.zeros((v_heads, k_dim, v_dim)))
        window = np.concatenate([past[0], raw])
        kernel = w["linear_attn.conv1d.weight"][:, 0]  # [C, taps], the last tap meets the current token
        qkv = _silu(sum(window[t : t + count] * kernel[:, t] for t in range(taps)))

        split = k_heads * k_dim
        of_value_head = np.arange(v_heads) // (v_heads // k_heads)
        q = _l2_normalise(qkv[:, :split].reshape(count, k_heads, k_dim))[:, of_value_head] / np.sqrt(k_dim)
        k = _l2_normalise(qkv[:, split : 2 * split].reshape(count, k_heads, k_dim))[:, of_value_head]
        v = qkv[:, 2 * split :].reshape(count, v_heads, v_dim)

        memory = past[1]  # [Hv, Dk, Dv]
        out = np.empty((count, v_heads, v_dim))
        for t in range(count):
            memory = memory * np.exp(log_decay[t])[:, None, None]
            correction = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", memory, k[t]))
            memory = memory + k[t][:, :, None] * correction[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", memory, q[t])
        out = _normalise(out, self.eps) * w["linear_attn.norm.weight"] * _silu(z)
        mixed = out.reshape(count, v_heads * v_dim) @ w["linear_attn.out_proj.weight"].T
        return mixed, (window[-(taps - 1) :], memory)
