"""The section that runs a job as users do: lines in a file, one record each in another, resume, memory, compiles."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qwen35_jax import LLM, SamplingParams
from qwen35_jax.batch.job import BatchJob, JobSpec, Summary
from qwen35_jax.batch.manifest import Manifest
from qwen35_jax.engine import Engine
from scripts.gpu_checks.answers import LIVE_SIZES
from scripts.gpu_checks.report import Section
from scripts.gpu_checks.rig import Rig

MEMORY_TOLERANCE = 0.05
_SMALL_PLAN = 1 << 30  # below it the allocator's own rounding and library workspaces are most of what is used
_MANIFEST = Manifest(model_files={}, options={}, sampling={}, chat_template_kwargs={})
BAD = {"ids": "invalid_token_id", "key": "unknown_key", "long": "context_length_exceeded"}


def options_of(index: int) -> dict[str, Any]:
    """Sampling options of a line: every kind in turn."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0, "logprobs": 5},
        {"temperature": 1.0, "seed": index},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": 20},
        {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 1.5, "frequency_penalty": 0.3},
        {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 1},
        {"temperature": 1.2, "top_p": 0.95, "min_tokens": 4},
    )
    return dict(kinds[index % len(kinds)])


def job_lines(
    number: int, num_valid: int, max_model_len: int, stops: dict[tuple[int, ...], int] | None = None
) -> list[dict[str, Any]]:
    """Lines of mixed lengths and options; three that cannot run, and some that a stop id ends.

    Args:
        number: of lines.
        num_valid: ids are below this.
        max_model_len: of the engine.
        stops: prompts whose greedy answer is known, each with the id that shall end it.
    """
    rng = np.random.default_rng(31)
    lines: list[dict[str, Any]] = []
    for prompt, stop in (stops or {}).items():
        body = {"prompt_token_ids": list(prompt), "temperature": 0, "stop_token_ids": [stop], "max_tokens": 48}
        lines.append({"custom_id": f"stop-{len(lines)}", **body, "ignore_eos": True})
    wrong: list[dict[str, Any]] = [
        {"custom_id": "bad-ids", "prompt_token_ids": [1, num_valid]},
        {"custom_id": "bad-key", "prompt_token_ids": [1], "temprature": 1},
        {"custom_id": "bad-long", "prompt_token_ids": [1] * (max_model_len + 1)},
    ]
    longest = max(2, max_model_len // 2)
    while len(lines) < number - len(wrong):
        index = len(lines)
        length = int(np.clip(rng.lognormal(4.5, 1.0), 1, longest))
        line = {"custom_id": f"row-{index}", "prompt_token_ids": rng.integers(0, num_valid, length).tolist()}
        line |= options_of(index) | {"ignore_eos": index % 2 == 0}
        line["max_tokens"] = int(rng.integers(line.get("min_tokens", 1), 65))
        lines.append(line)
    for line in wrong:  # among the others
        lines.insert(int(rng.integers(0, len(lines) + 1)), line)
    return lines


def faults_of(lines: list[dict[str, Any]], records: list[dict[str, Any]]) -> dict[str, int]:
    """What is wrong with a job's output, by kind; empty when every line has its one right record."""
    found: collections.Counter[str] = collections.Counter()
    by_id = collections.Counter(record["custom_id"] for record in records)
    found["lines without a record"] = sum(line["custom_id"] not in by_id for line in lines)
    found["records too many"] = sum(by_id.values()) - len(by_id)
    wanted = {line["custom_id"]: line for line in lines}
    for record in records:
        line = wanted.get(record["custom_id"])
        if line is None:
            found["records of no line"] += 1
            continue
        kind, _, what = line["custom_id"].partition("-")
        code = record["error"] and record["error"]["code"]
        if kind == "bad":
            found["bad lines with another end"] += code != BAD[what]
            continue
        if code is not None:
            found[f"failed: {code}: {record['error'].get('message')}"] += 1
            continue
        body = record["response"]["body"]
        choice, tokens = body["choices"][0], body["usage"]["completion_tokens"]
        found["prompts of another length"] += body["usage"]["prompt_tokens"] != len(line["prompt_token_ids"])
        if choice["finish_reason"] == "length":
            found["answers of another length"] += tokens != line["max_tokens"]
        elif choice["finish_reason"] == "stop":
            may = "stop_token_ids" in line or not line["ignore_eos"]
            found["stopped without a reason"] += not may or tokens > line["max_tokens"]
        else:
            found[f"ended by {choice['finish_reason']}"] += 1
        found["logprobs missing"] += ("logprobs" in line) and not choice.get("logprobs")
    return {name: number for name, number in found.items() if number}


def job(section: Section, rig: Rig, folder: Path, *, lines: int) -> None:
    """A job, its resume, and odd numbers of live rows through one engine.

    Args:
        section: what to fill.
        rig: its first engine is used: the one that loading made, in the rig's overlap mode (``stream``).
        folder: for input and output.
        lines: of the input.
    """
    engine = rig.first()
    llm = LLM.from_engine(engine, rig.config, None)
    try:
        content = job_lines(lines, rig.num_valid, rig.shapes.max_model_len, known_stops(llm, rig.num_valid))
        source, target = folder / "in.jsonl", folder / "out.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in content))
        summary = run_job(llm, source, target)
        records = read(target)
        section.equal("lines", len(content), lines)
        section.equal("records", len(records), lines)
        section.equal("answered", summary.answered, lines - len(BAD))
        section.equal("failed (they were to fail)", summary.failed, len(BAD))
        section.equal("faults", json.dumps(faults_of(content, records)), "{}")
        stopped = sum(
            record["custom_id"].startswith("stop-")
            and record["response"]["body"]["choices"][0]["finish_reason"] == "stop"
            for record in records
        )
        section.at_least("rows ended by their stop id", stopped, 1)
        section.number("overlap mode", engine.config.decode_overlap)
        section.number("prompt tokens, output tokens", [summary.prompt_tokens, summary.completion_tokens])
        section.number("steps by kind", dict(collections.Counter(str(r.kind) for r in engine.trace.records)))
        check_resume(section, llm, source, target, content)
        for size in LIVE_SIZES:
            check_live_rows(section, llm, engine, size, rig.num_valid)
        section.equal("compiles after warm-up", engine.compiles_after_warmup, 0)
        check_memory(section, rig)
    finally:
        llm.close()


def known_stops(llm: LLM, num_valid: int) -> dict[tuple[int, ...], int]:
    """Prompts and an id of each one's greedy answer; in other company a near tie may fall the other way."""
    rng = np.random.default_rng(37)
    prompts = [tuple(rng.integers(0, num_valid, 20 + 3 * i).tolist()) for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    return {prompt: output.outputs[0].token_ids[4] for prompt, output in zip(prompts, outputs, strict=True)}


def run_job(llm: LLM, source: Path, target: Path) -> Summary:
    with BatchJob(JobSpec(str(source), str(target), "random weights"), _MANIFEST) as batch:
        return batch.run(llm)


def read(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def check_resume(section: Section, llm: LLM, source: Path, target: Path, content: list[dict[str, Any]]) -> None:
    """A finished job adds nothing; one whose last records are lost gets exactly those back."""
    before = target.read_bytes()
    with BatchJob(JobSpec(str(source), str(target), "random weights"), _MANIFEST) as batch:
        section.equal("resumed: nothing is left to run", batch.finished, True)
        summary = batch.run(llm)
    section.equal("resumed: rows run again", summary.answered + summary.failed, 0)
    section.equal("resumed: bytes added to the output", len(target.read_bytes()) - len(before), 0)
    records = before.splitlines(keepends=True)
    lost = len(records) // 10
    kept = b"".join(records[: len(records) - lost])
    target.write_bytes(kept)
    summary = run_job(llm, source, target)
    section.equal("cut and resumed: rows run again", summary.answered + summary.failed, lost)
    section.equal("cut and resumed: the kept records are the same bytes", target.read_bytes().startswith(kept), True)
    section.equal("cut and resumed: faults", json.dumps(faults_of(content, read(target))), "{}")


def check_live_rows(section: Section, llm: LLM, engine: Engine, size: int, num_valid: int) -> None:
    """So many rows at once and no more: all answered, and the engine did decode that number together."""
    rng = np.random.default_rng([41, size])
    prompts = [{"prompt_token_ids": rng.integers(0, num_valid, 5 + i % 11).tolist()} for i in range(size)]
    begun = len(engine.trace.records)
    params = [SamplingParams(**(options_of(i) | {"max_tokens": 12, "ignore_eos": True})) for i in range(size)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    whole = sum(output.error is None and len(output.outputs[0].token_ids) == 12 for output in outputs)
    most = max(record.decode_rows for record in list(engine.trace.records)[begun:])
    section.equal(f"{size} rows: answered in full", whole, size)
    section.equal(f"{size} rows: decoded together", most, min(size, engine.max_num_seqs))


def check_memory(section: Section, rig: Rig) -> None:
    """The device's peak against the plan."""
    stats = rig.programs.device.memory_stats() or {}
    peak, planned = stats.get("peak_bytes_in_use"), rig.plan.total
    section.number("planned, MiB", round(planned / 2**20, 1))
    if peak is None:
        if rig.programs.device.platform != "cpu":
            section.fail("the device reports no peak_bytes_in_use")
        section.skip("peak memory against the plan", f"{jax.default_backend()} devices do not report their peak")
        return
    section.number("peak, MiB", round(peak / 2**20, 1))
    if planned < _SMALL_PLAN:
        section.skip("peak memory against the plan", f"a plan below {_SMALL_PLAN / 2**20:.0f} MiB says nothing")
        return
    section.at_most("|peak / plan - 1|", abs(peak / planned - 1), MEMORY_TOLERANCE)
