"""Trains the demo model, in legs: a leg stops in time, the next one goes on where it stopped, exactly.

    python -m scripts.demo_model.train --tokenizer=DIR --run_dir=DIR [--stop_after_seconds=500]

The run's directory holds one checkpoint (weights, optimiser, step, provenance), the log and the picture of the loss.
With --parts_out it is also written as files of at most 15 MiB, from which a leg on another machine begins with
--parts_in. Needs optax (and matplotlib for the picture): pip install '.[train]'.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qwen35_jax import runtime
from qwen35_jax.cli.common import EXIT_FAILED, CommandLine, run_command, run_with_flags
from qwen35_jax.config import ModelConfig
from qwen35_jax.params import ParamPack
from scripts.demo_model import architecture, checkpointing, transport
from scripts.demo_model.forward import ForwardOptions, Losses, loss_sums
from scripts.demo_model.leg import Leg, Params, State, Trainer
from scripts.demo_model.settings import Settings
from scripts.demo_model.sources import HostBatch


def learning_rate(settings: Settings) -> optax.Schedule:
    """A line up, then half a cosine down."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        decay_steps=max(settings.total_steps, settings.warmup_steps + 1),
        end_value=settings.learning_rate * settings.final_share,
    )


def optimiser(settings: Settings, decayed: Mapping[str, bool]) -> optax.GradientTransformation:
    """AdamW behind a clip of the whole gradient.

    The first moment is kept in bfloat16: weights and both moments of the demo model then take 56 MB, not 67.
    """
    return optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(
            learning_rate(settings),
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            weight_decay=settings.weight_decay,
            mask=dict(decayed),
            mu_dtype=jnp.bfloat16,
        ),
    )


def make_trainer(config: ModelConfig, settings: Settings, num_tasks: int) -> Trainer:
    """Builds the step of a model. The float32 weights are rounded to ``settings.dtype`` inside it."""
    master = architecture.training_pack(config)
    pack = ParamPack(config, dtype=settings.dtype, kernels="reference")
    rule = optimiser(settings, architecture.decayed(master))
    options = ForwardOptions(settings.remat, settings.recurrence_precision)
    loss = functools.partial(loss_sums, pack, num_tasks=num_tasks, options=options)

    def with_optimiser(params: Params) -> State:
        return {"params": params, "optimiser": rule.init(params), "step": jnp.zeros((), jnp.int32)}

    def init(seed: int) -> State:
        # On a named device, as a restored state is: else the first leg and the others would compile the step twice.
        return jax.jit(with_optimiser)(jax.device_put(architecture.initial_params(master, seed), jax.devices()[0]))

    @jax.jit
    def gradients(params: Params, batch: HostBatch) -> tuple[tuple[jax.Array, Losses], Params]:
        return jax.value_and_grad(lambda params: loss(params, batch, z_loss=settings.z_loss), has_aux=True)(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def descend(state: State, gradients: Params) -> tuple[State, jax.Array]:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients.values()))
        updates, inner = rule.update(gradients, state["optimiser"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimiser": inner, "step": state["step"] + 1}, norm

    def step(state: State, batch: HostBatch) -> tuple[State, dict[str, Any]]:
        (value, sums), slopes = gradients(state["params"], batch)
        state, norm = descend(state, slopes)
        return state, {"loss": value, "sums": sums, "gradient_norm": norm}

    @jax.jit
    def evaluate(params: Params, batch: HostBatch) -> Losses:
        return loss(params, batch)[1]

    shapes = {leaf.name: leaf.spec for leaf in master.leaves}
    return Trainer(
        init,
        gradients,
        step,
        evaluate,
        jax.eval_shape(with_optimiser, shapes),
        learning_rate(settings),
        {"jax": jax.__version__, "optax": optax.__version__},
    )


def main(argv: Sequence[str], started: float | None = None) -> int:
    line = CommandLine("python -m scripts.demo_model.train --tokenizer=DIR --run_dir=DIR", __doc__ or "")
    line.group("Run")
    line.define("str", "tokenizer", None, "Directory of the tokenizer (tokenizer.json).")
    line.define("str", "run_dir", None, "Directory of the run: made, or gone on with.")
    line.define("str", "parts_in", None, "Begin from these parts, if the run's directory has no checkpoint.")
    line.define("str", "parts_out", None, "Write the run's directory as parts here with every checkpoint.")
    line.define("bool", "allow_changes", False, "Go on though settings differ from the checkpoint's.")
    line.define("int", "intermediate_size", 352, "Width of the MLPs.")
    line.define("str", "compilation_cache_dir", None, "Where compiled programs are kept.")
    line.group("Training")
    text = " ".join(str(Settings.__doc__).partition("Attributes:")[2].split())
    names = [field.name for field in dataclasses.fields(Settings)]
    for field, following in zip(dataclasses.fields(Settings), [*names[1:], None], strict=True):
        help_text = text.partition(f"{field.name}: ")[2]
        help_text = help_text.partition(f" {following}: ")[0] if following else help_text
        line.define(str(field.type), field.name, field.default, help_text[:1].upper() + help_text[1:])
    return run_with_flags(line, argv, lambda line: _run(line, started))


def _run(line: CommandLine, started: float | None) -> int:
    line.require("run_dir")
    settings = Settings(**{field.name: getattr(line, field.name) for field in dataclasses.fields(Settings)})
    runtime.prepare(0.92, line.compilation_cache_dir)
    if settings.source == "random":
        config = architecture.demo_config(3072, intermediate_size=line.intermediate_size)
        source: dict[str, Any] = {"vocab_size": config.vocab_size}
    else:
        line.require("tokenizer")
        directory = pathlib.Path(line.tokenizer)
        config = architecture.config_of_tokenizer(directory, intermediate_size=line.intermediate_size)
        source = {"tokenizer_dir": directory}
    run_dir = pathlib.Path(line.run_dir)
    if line.parts_in and checkpointing.latest(run_dir) is None:
        transport.join(line.parts_in, run_dir)
    leg = Leg(
        config,
        functools.partial(make_trainer, config, settings),
        settings,
        run_dir,
        source_arguments=source,
        allow_changes=line.allow_changes,
        parts_out=pathlib.Path(line.parts_out) if line.parts_out else None,
        started=started,
        say=functools.partial(print, flush=True),
    )
    print(f"{architecture.training_pack(config).num_parameters:,} parameters; {json.dumps(config.to_dict())}")

    def stop(*_: Any) -> None:
        leg.stopping = True

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, stop)
    try:
        leg.run()
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    run_command(functools.partial(main, started=time.monotonic()))
