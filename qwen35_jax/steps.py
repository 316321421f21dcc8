"""What one program computes: from packed host fields through the model to packed results; pure functions only.

A program is named by (kind, bucket, steps, variant). It takes the flat parameter tuple, the donated
:class:`DeviceState` and ONE packed ``int32`` vector (in few pieces) with everything the host has to say about the step;
it returns the new state and ONE packed ``int32`` result array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packing import TokenOwners, token_owners
from qwen35_jax import sampling
from qwen35_jax.cache import PAGE_SIZE, Cache, cache_shapes
from qwen35_jax.config import ModelConfig
from qwen35_jax.model import DecodeInputs, PrefillInputs
from qwen35_jax.params import ParamPack
from schedulers import Bucket

ProgramKind = Literal["prefill", "decode", "unified"]
Variant = Literal["greedy", "full"]
VARIANTS: tuple[Variant, ...] = ("greedy", "full")
TOP_LOGPROBS = 20
_RESULT_HEAD = 4  # token, finite, logprob, rank


class DeviceState(NamedTuple):
    """Everything a program reads and writes on its device; donated at every dispatch.

    Attributes:
        cache: KV pages and recurrent-state slots.
        sampler: per-slot sampler records.
        last_token: ``int32[S]``, the newest token of each slot: what the next decode step reads, so that sampled
            tokens need not visit the host.
    """

    cache: Cache
    sampler: sampling.SamplerState
    last_token: jax.Array


def device_state_shapes(
    config: ModelConfig, num_pages: int, num_slots: int, dtype: jnp.dtype, state_dtype: jnp.dtype
) -> DeviceState:
    """Shapes of a device's state; ``num_pages`` and ``num_slots`` include the null ones."""
    return DeviceState(
        cache=cache_shapes(config, num_pages, num_slots, dtype, state_dtype),
        sampler=jax.eval_shape(lambda: sampling.init_state(num_slots, config.vocab_size)),
        last_token=jax.ShapeDtypeStruct((num_slots,), jnp.int32),  # type: ignore[arg-type]
    )


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """Name of a program: its kind, bucket, decode steps per dispatch and sampler variant."""

    kind: ProgramKind
    bucket: Bucket
    steps: int
    variant: Variant

    def __str__(self) -> str:
        b = self.bucket
        parts = [f"T={b.tokens} R={b.requests}"] if self.kind != "decode" else []
        parts += [f"B={b.rows}"] if self.kind != "prefill" else []
        parts += [f"W={b.width}"] + ([f"k={self.steps}"] if self.steps > 1 else [])
        return f"{self.kind} {' '.join(parts)} {self.variant}"


class HostLayout:
    """Named int32 fields end to end in one vector, sent in few pieces: a dispatch has one or two arrays, not a dozen.

    Fields start at multiples of 256 bytes. On a GPU XLA hands a slice of a parameter to a custom kernel in place when
    the slice's *size* is such a multiple, wherever it starts, and Mosaic refuses operands that start elsewhere.

    Pieces are short because the GPU client seems to stage only short host arrays: with fields of more than 100 KiB the
    host was held up for as long as the program before ran, with shorter ones it was not.
    """

    PIECE = 24 * 1024  # words, a multiple of the alignment: below the 100 KiB up to which a transfer is staged
    _ALIGNMENT = 64  # words

    def __init__(self, fields: Mapping[str, tuple[int, ...]]):
        self.fields = dict(fields)
        self.offsets: dict[str, int] = {}
        end = 0
        for name, shape in self.fields.items():
            self.offsets[name] = -(-end // self._ALIGNMENT) * self._ALIGNMENT
            end = self.offsets[name] + math.prod(shape)
        self.size = end

    @property
    def pieces(self) -> tuple[int, ...]:
        """Words of each piece."""
        return tuple(min(self.PIECE, self.size - start) for start in range(0, self.size, self.PIECE))

    def pack(self, values: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Lay ``values`` (one array a field, exact shapes) into fresh ``int32`` pieces."""
        out = np.zeros(self.size, np.int32)
        for name, shape in self.fields.items():
            value = values[name]
            if value.shape != shape:
                raise ValueError(f"host field {name!r} has shape {value.shape}, the program wants {shape}")
            offset = self.offsets[name]
            out[offset : offset + math.prod(shape)] = value.reshape(-1)
        return tuple(out[start : start + self.PIECE] for start in range(0, self.size, self.PIECE))

    def unpack(self, pieces: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """The fields as static slices, inside a trace."""
        vector = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
        return {
            name: vector[offset : offset + math.prod(self.fields[name])].reshape(self.fields[name])
            for name, offset in self.offsets.items()
        }


def prefill_fields(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    """Host fields of the prefill half of a program."""
    return {
        "tokens": (bucket.tokens,),
        "cu_seqlens": (bucket.requests + 1,),
        "prefill_slots": (bucket.requests,),
        "starts": (bucket.requests,),  # tokens of the request already in the cache
        "sample": (bucket.requests,),  # 1 where this chunk ends the prompt
        "sampler_rows": (bucket.requests, sampling.ROW_WORDS),
        "prefill_pages": (bucket.requests, bucket.width),
    }


def decode_fields(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    """Host fields of the decode half of a program."""
    return {
        "decode_slots": (bucket.rows,),
        "positions": (bucket.rows,),  # where the input token is written
        "steps": (bucket.rows,),  # steps this row takes part in; 0 for padding
        "decode_pages": (bucket.rows, bucket.width),
    }


def layout_of(kind: ProgramKind, bucket: Bucket) -> HostLayout:
    """The packed vector of a program kind."""
    fields: dict[str, tuple[int, ...]] = {}
    if kind != "decode":
        fields |= prefill_fields(bucket)
    if kind != "prefill":
        fields |= decode_fields(bucket)
    return HostLayout(fields)


def result_columns(variant: Variant) -> int:
    """Columns of a result row: token, finite, and in the full variant logprob, rank and the top 20."""
    return 2 if variant == "greedy" else _RESULT_HEAD + 2 * TOP_LOGPROBS


def result_shape(key: ProgramKey) -> tuple[int, int]:
    """Shape of a program's results: a row for each prefill request, then one for each decode row and step."""
    return key.bucket.requests + key.bucket.rows * key.steps, result_columns(key.variant)


def _result_rows(out: sampling.SampleOutput, variant: Variant) -> jax.Array:
    """Pack a sampler's output as int32 rows, floats bitcast."""
    head = [out.tokens, out.finite.astype(jnp.int32)]
    if variant == "greedy":
        return jnp.stack(head, axis=-1)

    def bits(x):
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    head = jnp.stack([*head, bits(out.logprob), out.rank], axis=-1)
    return jnp.concatenate([head, out.top_ids, bits(out.top_logprobs)], axis=-1)


@dataclasses.dataclass(frozen=True)
class ResultRows:
    """Results of a dispatch on the host, one entry a row (numpy).

    Attributes:
        tokens: ``int32[N]``.
        finite: ``bool[N]``, False where the row's logits were not finite.
        logprob: ``float32[N]`` or None in the greedy variant.
        rank: ``int32[N]`` or None.
        top_ids: ``int32[N, 20]`` or None.
        top_logprobs: ``float32[N, 20]`` or None.
    """

    tokens: np.ndarray
    finite: np.ndarray
    logprob: np.ndarray | None = None
    rank: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    @classmethod
    def unpack(cls, rows: np.ndarray) -> ResultRows:
        """Read the packed ``int32[N, columns]`` array of a program."""
        tokens, finite = rows[:, 0], rows[:, 1] != 0
        if rows.shape[1] == result_columns("greedy"):
            return cls(tokens, finite)
        top = _RESULT_HEAD + TOP_LOGPROBS
        return cls(
            tokens,
            finite,
            logprob=np.ascontiguousarray(rows[:, 2]).view(np.float32),
            rank=rows[:, 3],
            top_ids=rows[:, _RESULT_HEAD:top],
            top_logprobs=np.ascontiguousarray(rows[:, top:]).view(np.float32),
        )


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What all programs of a model share, static in every trace.

    Attributes:
        pack: merges the flat parameter tuple into the module, inside the trace.
        num_valid: ids below this are real; the padded rest of the vocabulary is masked.
    """

    pack: ParamPack
    num_valid: int


def _token_places(page_table: jax.Array, owner: jax.Array, position: jax.Array, valid: jax.Array):
    """Page id and offset of every token; the null page for padding."""
    page = page_table[owner, jnp.where(valid, position // PAGE_SIZE, 0)]
    return jnp.where(valid, page, 0), jnp.where(valid, position % PAGE_SIZE, 0)


@jax.named_scope("inputs")
def _prefill_inputs(fields: Mapping[str, jax.Array], bucket: Bucket) -> tuple[PrefillInputs, TokenOwners]:
    """Prefill inputs of the model, and the owner of every token."""
    cu, starts = fields["cu_seqlens"], fields["starts"]
    owners = token_owners(cu, bucket.tokens)
    position = jnp.where(owners.real, starts[owners.request] + owners.offset, 0)
    page_ids, page_offsets = _token_places(fields["prefill_pages"], owners.request, position, owners.real)
    lengths = cu[1:] - cu[:-1]
    inputs = PrefillInputs(
        tokens=fields["tokens"],
        positions=position,
        page_ids=page_ids,
        page_offsets=page_offsets,
        cu_seqlens=cu,
        slot_ids=fields["prefill_slots"],
        has_state=starts > 0,
        page_table=fields["prefill_pages"],
        kv_lens=jnp.where(lengths > 0, starts + lengths, 0),
    )
    return inputs, owners


@jax.named_scope("inputs")
def _decode_inputs(fields: Mapping[str, jax.Array], bucket: Bucket, last_token: jax.Array, step) -> DecodeInputs:
    """Decode inputs of the model at ``step`` of a dispatch; rows past their steps turn into padding."""
    active = step < fields["steps"]
    slots = jnp.where(active, fields["decode_slots"], 0)
    position = jnp.where(active, fields["positions"] + step, 0)
    rows = jnp.arange(bucket.rows, dtype=jnp.int32)
    page_ids, page_offsets = _token_places(fields["decode_pages"], rows, position, active)
    return DecodeInputs(
        tokens=jnp.where(active, last_token[slots], 0),
        positions=position,
        page_ids=page_ids,
        page_offsets=page_offsets,
        slot_ids=slots,
        page_table=fields["decode_pages"],
        kv_lens=jnp.where(active, position + 1, 0),
    )


def make_step(spec: StepSpec, key: ProgramKey) -> Callable[..., tuple[DeviceState, jax.Array]]:
    """The pure function of one program: ``(params, state, packed) -> (state, results int32[N, columns])``.

    Result rows: the R prefill requests first (where the kind has them), then the B decode rows, step by step.
    """
    layout, bucket = layout_of(key.kind, key.bucket), key.bucket
    with_prefill, with_decode = key.kind != "decode", key.kind != "prefill"
    if key.steps > 1 and with_prefill:
        raise ValueError(f"several steps a dispatch exist for decode programs only, not for {key}")

    @jax.named_scope("sampling")
    def draw(model, state: DeviceState, hidden, slots, active):
        out, sampler = sampling.sample(
            state.sampler, model.logits(hidden), slots, active, variant=key.variant, num_valid=spec.num_valid
        )
        # Rows that do not sample write to the null slot, so that no real slot's token is touched.
        last_token = state.last_token.at[jnp.where(active, slots, 0)].set(out.tokens)
        return state._replace(sampler=sampler, last_token=last_token), _result_rows(out, key.variant)

    def step(params, state: DeviceState, packed):
        with jax.named_scope("params"):
            model = spec.pack.unpack(params, in_place=True)
        fields = layout.unpack(packed)
        prefill = decode = None
        if with_prefill:
            prefill, owners = _prefill_inputs(fields, bucket)
            slots, starts = fields["prefill_slots"], fields["starts"]
            with jax.named_scope("admit"):
                sampler = sampling.admit(state.sampler, slots, fields["sampler_rows"], starts == 0)
                if key.variant == "full":
                    token_slots = jnp.where(owners.real, slots[owners.request], 0)
                    sampler = sampling.record_prompt(sampler, fields["tokens"], token_slots)
                state = state._replace(sampler=sampler)

        if key.kind == "decode":

            def body(carry: DeviceState, index):
                inputs = _decode_inputs(fields, bucket, carry.last_token, index)
                out = model.forward(None, inputs, carry.cache)
                carry = carry._replace(cache=out.cache)
                return draw(model, carry, out.decode_hidden, inputs.slot_ids, index < fields["steps"])

            if key.steps == 1:
                return body(state, jnp.int32(0))
            state, rows = jax.lax.scan(body, state, jnp.arange(key.steps, dtype=jnp.int32))
            return state, rows.reshape(-1, rows.shape[-1])

        if with_decode:
            decode = _decode_inputs(fields, bucket, state.last_token, 0)
        out = model.forward(prefill, decode, state.cache)
        state = state._replace(cache=out.cache)
        hidden, row_slots, active = out.prefill_hidden, fields["prefill_slots"], fields["sample"] > 0
        if decode is not None:
            assert hidden is not None and out.decode_hidden is not None
            hidden = jnp.concatenate([hidden, out.decode_hidden])
            row_slots = jnp.concatenate([row_slots, decode.slot_ids])
            active = jnp.concatenate([active, fields["steps"] > 0])
        return draw(model, state, hidden, row_slots, active)

    return step
