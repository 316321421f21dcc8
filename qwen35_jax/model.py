"""The Qwen3.5 text decoder: embedding, unrolled layers of two kinds, final norm, head.

``forward`` advances packed prefill tokens, decode rows, or both at once. Both ride in the same matrix products; only
the mixers tell them apart.

Dtypes and rounding points. Matrices and the residual stream are in the activation dtype; norm weights, ``A_log`` and
``dt_bias`` are fp32. A product takes operands in the activation dtype, accumulates in fp32 and rounds once (the MLP's
first may go into its activation unrounded, see ``swiglu_product``); fp32 models use ``Precision.HIGHEST``. Norms,
gates, RoPE angles, the softmax and the recurrence are fp32 inside. The public reference implementation also rounds
``beta``, the cos/sin tables, ``x_hat`` of the gated norm and ``silu(gate)`` of the MLP to the activation dtype; here
these stay in fp32, which only brings bf16 closer to the fp32 result. Logits come out of the accumulator as fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import add_rms_norm
from pallas_kernels.registry import implementation_of
from qwen35_jax.cache import Cache
from qwen35_jax.config import LayerKind, ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.layers.attention import GatedAttention
from qwen35_jax.layers.gated_delta_net import GatedDeltaNet
from qwen35_jax.layers.inputs import Batch, DecodeInputs, PrefillInputs
from qwen35_jax.layers.linear import unembed, whole
from qwen35_jax.layers.mlp import MLP
from qwen35_jax.layers.norm import rms_norm
from qwen35_jax.layers.parameters import matrix, vector
from qwen35_jax.shapes import Activations, Delta, Hidden, Logits, Vector

__all__ = ["DecodeInputs", "DecoderLayer", "ForwardOutput", "PrefillInputs", "Qwen35"]


class ForwardOutput(NamedTuple):
    """What a step leaves.

    Attributes:
        prefill_hidden: final-normed hidden state of each request's last token of this step ``[R, D]``, zeros for
            absent requests; None without prefill.
        decode_hidden: final-normed hidden states of the decode rows ``[B, D]``; None without decode. Rows of padding
            hold finite numbers without meaning.
        cache: the pools, updated.
        layer_outputs: the residual stream after every layer, ``[M, D]`` each; None unless asked for.
        prefill_all_hidden: final-normed hidden states of all prefill tokens ``[T, D]``; None unless layer outputs are
            asked for and the step has prefill tokens.
    """

    prefill_hidden: Hidden | None
    decode_hidden: Hidden | None
    cache: Cache
    layer_outputs: tuple[Activations, ...] | None = None
    prefill_all_hidden: Hidden | None = None


class DecoderLayer(nnx.Module):
    """``x + mixer(norm(x))``, then ``x + mlp(norm(x))``; the last sum is left to whoever norms it.

    Parameters: ``input_norm``, ``post_norm`` fp32 ``[D]``, and those of ``mixer`` and ``mlp``.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        pool_layer: int,
        *,
        rngs: nnx.Rngs | None,
        kernels: str,
        dtype: jnp.dtype,
    ):
        mixers = {"linear_attention": GatedDeltaNet, "full_attention": GatedAttention}
        self.eps = config.rms_norm_eps
        self.kernels = kernels
        self.input_norm = vector(config.hidden_size)
        self.mixer = mixers[kind](config, pool_layer, rngs=rngs, kernels=kernels, dtype=dtype)
        self.post_norm = vector(config.hidden_size)
        self.mlp = MLP(config, rngs=rngs, kernels=kernels, dtype=dtype)

    def __call__(
        self, x: Activations, delta: Delta | None, batch: Batch, cache: Cache, *, last_rows: bool = False
    ) -> tuple[Activations, Delta, Cache]:
        """Advances the residual stream by one layer.

        Args:
            x: ``[M, D]``, the residual stream without the result of the layer before.
            delta: ``[M, D]``, that result, or parts of it; None for the first layer.
            batch: where the tokens belong.
            cache: the pools.
            last_rows: of the last layer: its states, keys and values are those of all tokens, but all behind them is
                computed only for what :meth:`Batch.last_rows` keeps.

        Returns:
            The residual stream without the MLP's result, that result, and the pools.
        """
        with jax.named_scope("gated_delta_net" if isinstance(self.mixer, GatedDeltaNet) else "attention"):
            x, h = add_norm(x, delta, self.input_norm[...], self.eps, self.kernels)
            if isinstance(self.mixer, GatedDeltaNet):
                h, conv, state = self.mixer(h, batch, cache.conv, cache.state, last_rows=last_rows)
                cache = cache._replace(conv=conv, state=state)
            else:
                h, kv = self.mixer(h, batch, cache.kv, last_rows=last_rows)
                cache = cache._replace(kv=kv)
            x = batch.last_rows(x) if last_rows else x
        with jax.named_scope("mlp"):
            x, h = add_norm(x, h, self.post_norm[...], self.eps, self.kernels)
            return x, self.mlp(h, in_parts=batch.prefill is None), cache


def add_norm(
    x: Activations, delta: Delta | None, weight: Vector, eps: float, kernels: str
) -> tuple[Activations, Activations]:
    """``x + delta`` (x alone without a delta) and its RMS norm."""
    if delta is None:
        return x, rms_norm(x, weight, eps)
    return add_rms_norm(x, delta, weight, eps=eps, implementation=implementation_of(kernels, "add_rms_norm"))


class Qwen35(nnx.Module):
    """A dense Qwen3.5 text decoder.

    Parameters: ``embed [vocab, D]``, ``layers``, ``final_norm`` fp32 ``[D]``, and ``lm_head [D, vocab]`` when the
    embeddings are untied.

    Attributes:
        config: the model's numbers.
        dtype: activation dtype.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        kernels: str = "auto",
        param_dtype: jax.typing.DTypeLike | None = None,
    ):
        """Makes the parameters.

        Args:
            config: the model's numbers; ``layer_types`` decides the kind of every layer.
            rngs: source of random weights; None makes matrices of zeros, to be filled (under ``nnx.eval_shape``
                nothing is allocated at all).
            kernels: implementation of every kernel: "auto", "reference", a registered name, or ``op=name`` pairs.
            param_dtype: dtype of matrices and activations; None takes ``config.dtype``.

        Raises:
            UserInputError: a mixture-of-experts model, which is not built yet.
        """
        if config.moe is not None:
            raise UserInputError("mixture-of-experts models (qwen3_5_moe) are not supported yet")
        dtype = jnp.dtype(config.dtype if param_dtype is None else param_dtype)
        self.config = config
        self.dtype = dtype
        self.kernels = kernels
        self.embed = matrix(rngs, (config.vocab_size, config.hidden_size), dtype)
        layers, seen = [], dict.fromkeys(config.layer_types, 0)
        for kind in config.layer_types:
            # A layer's place in the pools of its kind: pools hold only the layers that use them.
            layers.append(DecoderLayer(config, kind, seen[kind], rngs=rngs, kernels=kernels, dtype=dtype))
            seen[kind] += 1
        self.layers = nnx.List(layers)
        self.final_norm = vector(config.hidden_size)
        if not config.tie_word_embeddings:
            self.lm_head = matrix(rngs, (config.hidden_size, config.vocab_size), dtype)

    def forward(
        self,
        prefill: PrefillInputs | None,
        decode: DecodeInputs | None,
        cache: Cache,
        *,
        layer_outputs: bool = False,
    ) -> ForwardOutput:
        """Advances the sequences of a step.

        Args:
            prefill: packed prompt tokens, or None.
            decode: decode rows, or None.
            cache: the pools; inside a program they are updated in place when the caller donates them.
            layer_outputs: also return what every layer left (for comparison with a reference).

        Returns:
            Hidden states that the head needs, and the updated pools.

        Raises:
            ValueError: neither prefill nor decode inputs.
        """
        batch = Batch.of(prefill, decode)
        with jax.named_scope("embed"):
            x = jnp.take(self.embed[...], batch.tokens, axis=0, mode="clip")  # [M, D]
        delta, collected, all_hidden = None, [], None
        for index, layer in enumerate(self.layers):
            # Nobody reads what the last layer makes of other tokens than the last of a request.
            last_rows = index == len(self.layers) - 1 and not layer_outputs
            with jax.named_scope(f"layer_{index}"):
                x, delta, cache = layer(x, delta, batch, cache, last_rows=last_rows)
            if layer_outputs:
                delta = whole(delta, x.dtype)
                collected.append(x + delta)

        with jax.named_scope("final_norm"):
            if layer_outputs:
                if prefill is not None:
                    all_hidden = self._normed(batch.split(x)[0], batch.split(delta)[0])
                x, delta = batch.last_rows(x), batch.last_rows(delta)
            hidden = self._normed(x, delta)  # [R + B, D]
            of_prefill, of_decode = jnp.split(hidden, [0 if prefill is None else prefill.kv_lens.shape[0]])
            return ForwardOutput(
                prefill_hidden=None if prefill is None else _present(of_prefill, prefill),
                decode_hidden=None if decode is None else of_decode,
                cache=cache,
                layer_outputs=tuple(collected) if layer_outputs else None,
                prefill_all_hidden=all_hidden,
            )

    def logits(self, hidden: Hidden) -> Logits:
        """Scores of every row of the vocabulary: fp32 ``[M, vocab]`` from final-normed ``hidden [M, D]``."""
        with jax.named_scope("lm_head"):
            if self.config.tie_word_embeddings:
                return unembed(hidden, self.embed[...], transposed=True)
            return unembed(hidden, self.lm_head[...], transposed=False)

    def _normed(self, x: Activations, delta: Delta) -> Hidden:
        return add_norm(x, delta, self.final_norm[...], self.config.rms_norm_eps, self.kernels)[1]


def _present(hidden: Hidden, prefill: PrefillInputs) -> Hidden:
    """``hidden [R, D]`` with zeros for requests without tokens."""
    present = jnp.diff(prefill.cu_seqlens) > 0
    return jnp.where(present[:, None], hidden, jnp.zeros_like(hidden))
