"""How to train: the flags of ``train.py`` as a dataclass."""

from __future__ import annotations

import dataclasses

from qwen35_jax.errors import UserInputError
from scripts.demo_model.sources import SOURCES

# What decides the next step beside the state: a leg that changes one of these says so.
FIXED = (
    *("seed", "total_steps", "warmup_steps", "learning_rate", "final_share", "weight_decay"),
    *("clip", "z_loss", "dtype", "recurrence_precision", "source", "batch_size", "seq_len"),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train; the fields are the command's flags.

    Attributes:
        seed: of the first weights and of the data.
        batch_size: rows of a step.
        seq_len: tokens of a row.
        total_steps: steps of the whole run: the learning rate falls to its end over them.
        warmup_steps: steps over which it rises.
        learning_rate: its highest value.
        final_share: its last value, as a share of the highest.
        weight_decay: of matrices and the embedding.
        clip: longest gradient.
        z_loss: weight of the squared log of the partition function.
        dtype: of activations and of the matrices in products.
        recurrence_precision: of the delta rule's products: highest (float32) or default (TF32 on a GPU).
        remat: compute layers again in the backward pass rather than keep what is inside them.
        source: where batches come from: tasks or random.
        data_workers: processes that make batches; 0: a thread.
        log_every: steps of a record in the log.
        eval_every: steps between evaluations; 0: none.
        eval_batches: held-out batches of an evaluation.
        save_every_seconds: time between checkpoints.
        stop_after_seconds: time after which the leg stops, from the start of the process; 0: never.
        max_steps: steps of this leg at most; 0: as many as there are.
    """

    seed: int = 0
    batch_size: int = 64
    seq_len: int = 4096
    total_steps: int = 6000
    warmup_steps: int = 200
    learning_rate: float = 2e-3
    final_share: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    z_loss: float = 1e-4
    dtype: str = "bfloat16"
    recurrence_precision: str = "highest"
    remat: bool = True
    source: str = "tasks"
    data_workers: int = 0
    log_every: int = 20
    eval_every: int = 200
    eval_batches: int = 2
    save_every_seconds: float = 150.0
    stop_after_seconds: float = 500.0
    max_steps: int = 0

    def __post_init__(self):
        for name in ("batch_size", "seq_len", "total_steps", "log_every"):
            if getattr(self, name) < 1:
                raise UserInputError(f"--{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup_steps", "data_workers", "eval_every", "eval_batches", "max_steps", "stop_after_seconds"):
            if getattr(self, name) < 0:
                raise UserInputError(f"--{name} must not be negative, got {getattr(self, name)}")
        for name, choices in (
            ("dtype", ("bfloat16", "float32")),
            ("recurrence_precision", ("highest", "default")),
            ("source", tuple(SOURCES)),
        ):
            if getattr(self, name) not in choices:
                raise UserInputError(f"--{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")
        if self.eval_every and not self.eval_batches:
            raise UserInputError("--eval_batches must be positive unless --eval_every=0")
