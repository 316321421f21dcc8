"""One leg of a training run: from its checkpoint, or from first weights, until the time or the steps are over."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from pallas_kernels.provenance import current_commit
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from scripts.demo_model import checkpointing, curves, transport
from scripts.demo_model.forward import Losses
from scripts.demo_model.settings import FIXED, Settings
from scripts.demo_model.sources import FIELDS, HostBatch, Prefetcher, open_source

type State = dict[str, Any]
type Params = Mapping[str, jax.Array]

TOKENIZER_FILE = "tokenizer.json"


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The functions of a training run.

    Attributes:
        init: seed -> first state.
        gradients: (params, batch) -> (loss, sums by task), gradients.
        step: (state, batch) -> next state and figures; the state is donated.
        evaluate: (params, batch) -> sums by task.
        state_shapes: the state, abstractly.
        learning_rate: step -> its learning rate.
        versions: of the libraries that decide the result.
    """

    init: Callable[[int], State]
    gradients: Callable[[Params, HostBatch], tuple[tuple[jax.Array, Losses], Params]]
    step: Callable[[State, HostBatch], tuple[State, dict[str, Any]]]
    evaluate: Callable[[Params, HostBatch], Losses]
    state_shapes: State
    learning_rate: Callable[[int], Any]
    versions: Mapping[str, str]


def figures(sums: Losses, task_names: tuple[str, ...]) -> dict[str, Any]:
    """Mean loss and accuracy, over all and by task; None for a task without tokens."""
    nll, weight, correct, counted = (np.asarray(x, np.float64) for x in sums)

    def share(part: float, whole: float) -> float | None:
        return round(float(part / whole), 5) if whole > 0 else None

    return {
        "nll": share(nll.sum(), weight.sum()),
        "accuracy": share(correct.sum(), counted.sum()),
        "nll_by_task": {name: share(nll[i], weight[i]) for i, name in enumerate(task_names)},
        "accuracy_by_task": {name: share(correct[i], counted[i]) for i, name in enumerate(task_names)},
    }


def _add(sums: Losses | None, more: Losses) -> Losses:
    more = Losses(*(np.asarray(x, np.float64) for x in more))
    return more if sums is None else Losses(*(a + b for a, b in zip(sums, more, strict=True)))


class Leg:
    """Runs a leg; making it opens the run's checkpoint.

    Args:
        config: the model.
        trainer: its functions, given the number of tasks.
        settings: how to train.
        run_dir: directory of the run.
        source_arguments: of the batch source, beside seed, sizes and split.
        allow_changes: go on though a setting that decides the next step has changed.
        parts_out: where to write the run's directory as parts with every checkpoint.
        started: ``time.monotonic()`` that the leg's time counts from.
        say: told of what happens.
    """

    def __init__(
        self,
        config: ModelConfig,
        trainer: Callable[[int], Trainer],
        settings: Settings,
        run_dir: pathlib.Path,
        *,
        source_arguments: Mapping[str, Any] | None = None,
        allow_changes: bool = False,
        parts_out: pathlib.Path | None = None,
        started: float | None = None,
        say: Callable[[str], None] = print,
    ):
        self.config, self.settings, self.run_dir, self.parts_out, self.say = config, settings, run_dir, parts_out, say
        self.started = time.monotonic() if started is None else started
        self.stopping = False
        sizes = {"seed": settings.seed, "batch_size": settings.batch_size, "seq_len": settings.seq_len}
        self._source = {"tokenizer_dir": None, **(source_arguments or {}), **sizes}
        # One source of this process answers for the names; the batches come from the workers.
        self.task_names = tuple(open_source(settings.source, **self._source, split="train").task_names)
        self.trainer = trainer(len(self.task_names))
        self.device = jax.devices()[0]

        run_dir.mkdir(parents=True, exist_ok=True)
        checkpoint = checkpointing.latest(run_dir)
        if checkpoint is None:
            self.state, self.legs = self.trainer.init(settings.seed), []
            self.first_step = 0
        else:
            provenance = checkpointing.read_provenance(checkpoint)
            self._check(checkpoint, provenance, allow_changes)
            self.state, self.legs = checkpointing.restore(checkpoint, self.trainer.state_shapes), provenance["legs"]
            self.first_step = int(self.state["step"])
        self.step, self.saved_step = self.first_step, None if checkpoint is None else self.first_step
        # What was logged after the checkpoint will happen again.
        self.log = run_dir / curves.LOG
        curves.write_log(self.log, [r for r in curves.read_log(self.log) if r["step"] <= self.first_step])
        say(f"{self.device.device_kind}: {'first step' if checkpoint is None else f'on from step {self.first_step}'}")

    def _check(self, checkpoint: pathlib.Path, provenance: dict[str, Any], allow_changes: bool) -> None:
        if ModelConfig.from_dict(provenance["model_config"]) != self.config:
            raise UserInputError(f"{checkpoint} is of another model: {provenance['model_config']}")
        if list(self.task_names) != provenance["task_names"]:
            self.say(f"warning: the tasks were {provenance['task_names']}, now {list(self.task_names)}")
        if provenance["tokenizer_sha256"] != self._tokenizer_digest():
            raise UserInputError(
                f"{checkpoint} was trained with another tokenizer than {self._source['tokenizer_dir']}"
            )
        before = provenance["settings"]
        for name in FIXED:
            now = getattr(self.settings, name)
            if before[name] != now:
                if not allow_changes:
                    raise UserInputError(
                        f"--{name}={now!r} was {before[name]!r} in {checkpoint.name}; --allow_changes goes on with it"
                    )
                self.say(f"{name}: {before[name]!r} before, {now!r} from here on")

    def run(self) -> int:
        """Trains; returns the number of steps that the run has behind it.

        Raises:
            FloatingPointError: the loss is not finite; the last checkpoint stays.
        """
        settings = self.settings
        last = settings.total_steps
        if settings.max_steps:
            last = min(last, self.first_step + settings.max_steps)
        if self.first_step >= last:
            self.say(f"nothing to do: {self.first_step} of {settings.total_steps} steps are done")
            return self.first_step
        workers = settings.data_workers
        prefetcher = Prefetcher(
            settings.source, {**self._source, "split": "train"}, self.first_step, workers=workers, depth=4
        )
        held_out = None
        try:
            if settings.eval_every:
                held_out = self._held_out()
            self._train(iter(prefetcher), held_out, last)
        finally:
            prefetcher.close()
        self._save()
        return self.step

    def _held_out(self) -> list[HostBatch]:
        count, workers = self.settings.eval_batches, self.settings.data_workers
        reader = Prefetcher(
            self.settings.source, {**self._source, "split": "held_out"}, 0, workers=min(workers, count), depth=count
        )
        try:
            return [jax.device_put(_checked(batch)) for batch, _ in zip(reader, range(count), strict=False)]
        finally:
            reader.close()

    def _train(self, batches: Iterator[HostBatch], held_out: list[HostBatch] | None, last: int) -> None:
        settings = self.settings
        tokens_of_step = settings.batch_size * settings.seq_len
        running: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
        window: Losses | None = None
        saved_at = time.monotonic()
        since, since_step = None, self.step  # of the log's record; None until compiled

        def collect() -> None:
            """Reads the figures of the oldest step under way, and logs when a record is full."""
            nonlocal window, since, since_step
            step, out = running.popleft()
            value = float(out["loss"])
            if not math.isfinite(value):
                raise FloatingPointError(f"step {step}: the loss is {value}; the last checkpoint stays")
            window = _add(window, out["sums"])
            now = time.monotonic()
            if since is None:
                self.say(f"first step after {now - self.started:.1f} s; {self._memory()}")
            elif step % settings.log_every == 0 or step == last:
                rate = (step - since_step) * tokens_of_step / (now - since)
                record = {
                    "kind": "train",
                    "step": step,
                    "loss": round(value, 5),
                    **figures(window, self.task_names),
                    "gradient_norm": round(float(out["gradient_norm"]), 4),
                    "learning_rate": float(self.trainer.learning_rate(step - 1)),
                    "tokens_per_s": round(rate),
                    "seconds": round(now - self.started, 1),
                }
                curves.append_log(self.log, record)
                self.say(
                    f"step {step}: loss {record['loss']:.4f}, answers {_percent(record['accuracy'])}, "
                    f"{rate / 1e6:.3f}M tokens/s"
                )
                window = None
            else:
                return
            since, since_step = now, step

        while self.step < last and not self.stopping:
            batch = jax.device_put(_checked(next(batches)))
            self.state, out = self.trainer.step(self.state, batch)
            self.step += 1
            running.append((self.step, out))
            # Two steps under way keep the device busy; more would make the clock below lie.
            while len(running) > 2 or (running and self.step == self.first_step + 1):
                collect()
            if held_out and (self.step % settings.eval_every == 0 or self.step == last):
                while running:
                    collect()
                self._evaluate(held_out)
                since, since_step = time.monotonic(), self.step
            now = time.monotonic()
            if settings.stop_after_seconds and now - self.started > settings.stop_after_seconds:
                self.say(f"stopping after {now - self.started:.0f} s")
                break
            if now - saved_at > settings.save_every_seconds:
                while running:
                    collect()
                self._save()
                saved_at = since = time.monotonic()
                since_step = self.step
        while running:
            collect()

    def _evaluate(self, held_out: list[HostBatch]) -> None:
        sums = None
        for batch in held_out:
            sums = _add(sums, self.trainer.evaluate(self.state["params"], batch))
        if sums is None:
            return
        record = {"kind": "eval", "step": self.step, **figures(sums, self.task_names)}
        curves.append_log(self.log, record)
        shares = ", ".join(f"{name} {_percent(share)}" for name, share in record["accuracy_by_task"].items())
        self.say(f"step {self.step}: held out: loss {record['nll']}, answers {shares}")

    def _tokenizer_digest(self) -> str | None:
        directory = self._source["tokenizer_dir"]
        return None if directory is None else checkpointing.file_digest(pathlib.Path(directory) / TOKENIZER_FILE)

    def _memory(self) -> str:
        stats = self.device.memory_stats() or {}
        peak = stats.get("peak_bytes_in_use")
        return "peak memory unknown" if peak is None else f"peak memory {peak / 2**30:.1f} GiB"

    def _save(self) -> None:
        if self.step != self.saved_step:
            leg = {
                "first_step": self.first_step,
                "last_step": self.step,
                "batch_size": self.settings.batch_size,
                "seq_len": self.settings.seq_len,
                "total_steps": self.settings.total_steps,
                "seconds": round(time.monotonic() - self.started, 1),
                "device": self.device.device_kind,
                "versions": dict(self.trainer.versions),
                "commit": current_commit(),
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            provenance = {
                "step": self.step,
                "model_config": self.config.to_dict(),
                "settings": dataclasses.asdict(self.settings),
                "task_names": list(self.task_names),
                "tokenizer_sha256": self._tokenizer_digest(),
                "legs": [*self.legs, leg],
            }
            checkpointing.save(self.run_dir, self.step, self.state, provenance)
            self.saved_step = self.step
        try:
            curves.draw(curves.read_log(self.log), self.run_dir / curves.PICTURE)
        except UserInputError as error:  # a picture is no reason to lose a leg
            self.say(f"warning: {error}")
        if self.parts_out is not None:
            count = transport.split(self.run_dir, self.parts_out)
            self.say(f"step {self.step}: saved, and written as {count} parts")
        else:
            self.say(f"step {self.step}: saved")


def _checked(batch: HostBatch) -> dict[str, np.ndarray]:
    """The fields that the step takes, in their types; a source without tasks has one."""
    out = {name: np.asarray(batch[name], np.float32 if name == "weights" else np.int32) for name in FIELDS[:3]}
    tasks = batch["tasks"] if "tasks" in batch else np.zeros_like(out["tokens"])
    return out | {"tasks": np.asarray(tasks, np.int32)}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
