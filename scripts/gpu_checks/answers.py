"""Sections over the answers of one rig: solo against batched, overlap modes, containment of NaN."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from pallas_kernels import registry
from qwen35_jax.config import ModelConfig
from qwen35_jax.sampling_params import SamplingParams
from scripts.gpu_checks.report import Section
from scripts.gpu_checks.rig import (
    TOP,
    Difference,
    Distance,
    Forced,
    Judge,
    Rig,
    Run,
    Shapes,
    first_differences,
    reported,
)
from tests.engine_kit import Job, Result, drain, mixed_jobs, submit_all
from tests.golden_kit import BF16_RATIO, MAX_LOGPROB_ERROR, family_bar

LIVE_SIZES = (1, 2, 3, 5, 7, 33)
MAX_TOKENS = 48
LARGE_STEP = 2048  # tokens: so many that "auto" takes a kernel that it leaves out of the rig's own steps
GOLDEN_LAYERS = 4  # of the miniatures that transformers was run on
# Around the 64-token grid, the first chunk's end and the page edges; longer than a step's budget at the end.
LENGTHS = (1, 2, 3, 17, 33, 63, 64, 65, 100, 127, 128, 130, 200, 257, 300, 400, 511, 513, 700, 900)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=TOP)


def jobs_for(rig: Rig, number: int, *, seed: int = 0, greedy_only: bool = False, name: str = "r") -> list[Job]:
    """Requests of mixed lengths whose every token is reported with its alternatives; a quarter is sampled."""
    rng = np.random.default_rng([17, seed])
    room = rig.shapes.max_model_len - MAX_TOKENS
    lengths = [length for length in LENGTHS if length <= room]
    jobs = []
    for index in range(number):
        prompt = rng.integers(0, rig.num_valid, lengths[index % len(lengths)])
        params = dataclasses.replace(GREEDY, max_tokens=int(rng.integers(MAX_TOKENS // 2, MAX_TOKENS + 1)))
        if not greedy_only and index % 4 == 3:
            params = dataclasses.replace(params, temperature=1.0, seed=index)
        jobs.append(Job(f"{name}{index}", tuple(prompt.tolist()), params))
    return jobs


def greedy_of(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.params.temperature == 0]


@dataclasses.dataclass(frozen=True)
class Bar:
    """What |delta logprob| is held to: its mean, its 99th percentile (and the margin of a first difference)."""

    mean: float
    p99: float
    origin: str


def hold_to_bar(
    section: Section,
    what: str,
    results: Mapping[str, Result],
    judged: Mapping[str, Forced],
    bar: Bar,
) -> Distance:
    """The distance between what an engine reported and what the judge says of the same tokens, against the bar."""
    names = list(judged)
    found = Distance.between([reported(results[name]) for name in names], [judged[name].chosen for name in names])
    figures = (
        ("mean", found.mean, bar.mean),
        ("p99", found.p99, bar.p99),
        (f"mean of the top {TOP}", found.top_mean, bar.mean),
        (f"p99 of the top {TOP}", found.top_p99, bar.p99),
    )
    for name, value, limit in figures:
        section.at_most(f"{what}: {name} |delta logprob|", value, limit, quiet=True)
    section.number(
        f"{what}: |delta logprob| of {found.positions} tokens, bars {bar.mean:.3g} and {bar.p99:.3g}",
        {name: value for name, value, _ in figures} | {"max": found.max, f"max of the top {TOP}": found.top_max},
    )
    return found


def hold_margins(
    section: Section,
    what: str,
    number: int,
    differences: Sequence[Difference],
    judged: Mapping[str, Forced],
    bar: Bar,
) -> None:
    """Greedy rows may part only where the two most probable ids are closer than the bar."""
    section.number(f"{what}: rows equal", f"{number - len(differences)} of {number}")
    if differences:
        section.number(f"{what}: first differences", [str(difference) for difference in differences])
    below = np.concatenate([forced.margins for forced in judged.values()]) <= bar.p99
    section.number(f"{what}: share of all positions with so small a margin", float(below.mean()))
    widest = max((difference.margin for difference in differences), default=0.0)
    section.at_most(f"{what}: widest margin at a first difference", widest, bar.p99)


def ended_well(section: Section, what: str, jobs: Sequence[Job], results: Mapping[str, Result], compiles: int) -> None:
    """Everything came back whole: all tokens, no errors, greedy tokens most probable, nothing compiled."""
    whole = sum(
        results[job.name].ending[0] == "length" and len(results[job.name].tokens) == job.params.max_tokens
        for job in jobs
    )
    section.equal(f"{what}: rows with all their tokens", whole, len(jobs), quiet=True)
    ranks = [entry.rank for job in greedy_of(jobs) for entry in results[job.name].logprobs]
    section.equal(f"{what}: greedy tokens not the most probable", sum(rank != 1 for rank in ranks), 0, quiet=True)
    section.equal(f"{what}: compiles after warm-up", compiles, 0, quiet=True)


@dataclasses.dataclass
class Batched:
    """The run in company that several sections compare with, made once, and what the judge makes of it.

    Attributes:
        rig: its programs.
        rows: requests.
        exact: whether the bar comes from the same weights in float32; see :func:`bar_of`.
    """

    rig: Rig
    rows: int
    exact: bool
    jobs: list[Job] = dataclasses.field(init=False)
    run: Run = dataclasses.field(init=False)
    judged: dict[str, Forced] = dataclasses.field(init=False)

    def __post_init__(self):
        self.jobs = jobs_for(self.rig, self.rows)
        self.run = self.rig.run(self.jobs, self.mode)
        # All judges now, several at once: later runs are held to compile nothing.
        # The kernel that large_steps looks at must not be compared with itself: a judge's step is as long as a row.
        kernels = f"swiglu_product={registry.REFERENCE}"
        self._judges = {"kernels": Judge(self.rig, kernels=kernels, max_tokens=MAX_TOKENS)}
        if self.exact:
            self._judges["float32"] = Judge(self.rig, dtype="float32", kernels="reference", max_tokens=MAX_TOKENS)
        if self.exact and self.deep:
            self._judges["references"] = Judge(self.rig, kernels="reference", max_tokens=MAX_TOKENS)
        with concurrent.futures.ThreadPoolExecutor(len(self._judges)) as pool:
            list(pool.map(Judge.compile, self._judges.values()))
        self.judged = self.judge(self.jobs, self.results)

    def judge(self, jobs: Sequence[Job], results: Mapping[str, Result], name: str = "kernels") -> dict[str, Forced]:
        """What one of the judges makes of some answers: the kernels under test, the references, or float32."""
        return {job.name: self._judges[name](job, results[job.name]) for job in jobs}

    @property
    def deep(self) -> bool:
        """Whether the model has more layers than those that transformers was run on."""
        return self.rig.config.num_layers > GOLDEN_LAYERS

    @property
    def results(self) -> dict[str, Result]:
        return self.run.results

    @property
    def mode(self) -> str:
        return "device" if self.rig.options.decode_overlap == "device" else "off"

    @property
    def names(self) -> list[str]:
        return [job.name for job in self.jobs]

    @functools.cached_property
    def in_float32(self) -> dict[str, Forced]:
        """The same tokens through the references, the weights widened to float32."""
        return self.judge(self.jobs, self.results, "float32")

    def to_float32(self, found: Mapping[str, np.ndarray]) -> Distance:
        return Distance.between(
            [found[name] for name in self.names], [self.in_float32[name].chosen for name in self.names]
        )

    @functools.cached_property
    def bar(self) -> Bar:
        """The bar of every comparison of this model's runs; see :func:`bar_of`."""
        return bar_of(self)


def bar_of(batched: Batched) -> Bar:
    """The bfloat16 bar of the goldens, for this model: 1.25 times a bfloat16 run's distance to float32.

    A run in company and the same tokens alone are two right computations of one bfloat16 model: they may be as far
    apart as bfloat16 is from float32, and a wrong page, state or row shows as distances of order one. The goldens take
    that distance from transformers on miniatures of four layers; :func:`tests.golden_kit.family_bar` holds models of
    no more layers, whatever their width (at four layers the 4B's width gives 0.027 where the miniature's gives 0.029).
    Roundings add up over layers (0.13 for the miniature with 32), so a deeper model has its own: of the reference
    kernels in bfloat16, which the goldens hold to transformers, to the references in float32 on the same weights and
    tokens. The kernels under test have no part in it.
    """
    family = family_bar(batched.rig.config)
    if not (batched.deep and batched.exact):
        return Bar(family.mean, family.p99, f"{BF16_RATIO} x transformers' bfloat16 on {family.case}")
    rounded = batched.judge(batched.jobs, batched.results, "references")
    own = batched.to_float32({name: forced.chosen for name, forced in rounded.items()})
    origin = f"{BF16_RATIO} x this model's references, bfloat16 to float32"
    return Bar(BF16_RATIO * own.top_mean, BF16_RATIO * own.top_p99, origin)


def batching(section: Section, batched: Batched, *, solo_rows: int) -> None:
    """Solo against batched, in the distance of given tokens; odd numbers of live rows in the same process.

    Args:
        section: what to fill.
        batched: the run in company.
        solo_rows: greedy requests that also run alone.
    """
    rig, bar, family = batched.rig, batched.bar, family_bar(batched.rig.config)
    depth = f"{rig.config.num_layers} layers"
    section.number(f"{depth}: bar ({bar.origin})", {"mean": bar.mean, "p99": bar.p99})
    what = f"{depth}, {batched.rows} rows"
    ended_well(section, what, batched.jobs, batched.results, batched.run.compiles)
    found = hold_to_bar(section, what, batched.results, batched.judged, bar)
    section.number(
        f"{what}: share of the bar of the miniature {family.case} ({family.mean:.3g}, {family.p99:.3g})",
        {"mean": found.mean / family.mean, "p99": found.p99 / family.p99},
    )

    alone = greedy_of(batched.jobs)[:solo_rows]
    results: dict[str, Result] = {}
    engine = rig.engine("off")
    for job in alone:
        submit_all(engine, [job])
        drain(engine, results)
    compiles = engine.compiles_after_warmup
    engine.close()
    ended_well(section, f"{depth}, solo", alone, results, compiles)
    differences = first_differences(batched.results, results, batched.judged)
    hold_margins(section, f"{depth}, solo and batched", len(alone), differences, batched.judged, bar)

    for size in LIVE_SIZES:
        if size > rig.shapes.max_num_seqs:
            section.skip(f"{size} live rows", f"max_num_seqs is {rig.shapes.max_num_seqs}")
            continue
        jobs = jobs_for(rig, size, seed=size)
        run = rig.run(jobs, "off")
        ended_well(section, f"{depth}, {size} live rows", jobs, run.results, run.compiles)
        judged = batched.judge(jobs, run.results)
        hold_to_bar(section, f"{depth}, {size} live rows", run.results, judged, bar)
    if not batched.exact:
        section.skip(f"{depth}: distance to float32", "--noexact")
        return
    # Company must not cost accuracy: 1.25 is the room that the goldens give.
    company = batched.to_float32({name: reported(batched.results[name]) for name in batched.names})
    single = batched.to_float32({name: batched.judged[name].chosen for name in batched.names})
    section.number(f"{depth}, to float32, top {TOP}: batched mean, p99", [company.top_mean, company.top_p99])
    section.number(f"{depth}, to float32, top {TOP}: solo mean, p99", [single.top_mean, single.top_p99])
    for name in ("top_mean", "top_p99"):
        ratio = getattr(company, name) / getattr(single, name)
        section.at_most(f"{depth}: batched / solo distance to float32, {name}", ratio, BF16_RATIO)


def large_steps(section: Section, batched: Batched, *, tokens: int = LARGE_STEP) -> None:
    """First tokens after prompts that share steps of many tokens, where "auto" fuses the MLP's first product.

    The judge has a step for each row, and the reference of that product.

    Args:
        section: what to fill.
        batched: whose model, judges and bar are used.
        tokens: of a step.
    """
    rig, config = batched.rig, batched.rig.config
    what = f"{config.num_layers} layers, steps of {tokens} tokens"
    jobs = [
        dataclasses.replace(job, params=dataclasses.replace(job.params, max_tokens=1))
        for job in jobs_for(rig, batched.rows, seed=tokens, greedy_only=True)
    ]
    engine = rig.prefill_engine(tokens)
    try:
        submit_all(engine, jobs)
        results, compiles = drain(engine), engine.compiles_after_warmup
    finally:
        engine.close()
    ended_well(section, what, jobs, results, compiles)
    hold_to_bar(section, what, results, batched.judge(jobs, results), batched.bar)
    chosen = swiglu_kernel(config, rig.dtype, tokens)
    section.number(f"{what}: swiglu_product", chosen)
    if registry.current_target().compute_capability == "9.0" and rig.dtype == "bfloat16":
        fused = chosen != registry.REFERENCE
        section.equal(f"{what}: swiglu_product is a kernel of its own", fused, True, quiet=True)
    else:
        section.skip(f"{what}: a fused swiglu_product", f"{chosen} is chosen for {rig.dtype} on this device")


def swiglu_kernel(config: ModelConfig, dtype: str, tokens: int) -> str:
    """The implementation of ``swiglu_product`` that "auto" takes in a step of so many tokens."""
    shapes = {"x": (tokens, config.hidden_size), "weight": (config.hidden_size, 2 * config.intermediate_size)}
    arguments = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return registry.get_op("swiglu_product").select(registry.AUTO, arguments).name


def overlap_float32(section: Section, preset: str, *, num_devices: int) -> None:
    """Overlap modes on a miniature in float32: the very same tokens, and logprobs to rounding."""
    config = ModelConfig.preset(preset, dtype="float32")
    shapes = Shapes(max_num_seqs=8, max_model_len=512, max_num_batched_tokens=128, row_rungs=(8,))
    jobs = mixed_jobs()
    rig = Rig(config, "float32", shapes, num_valid=config.vocab_size - 100)
    off, compiles, _ = plain = rig.run(jobs, "off")
    section.equal(f"{preset} off: compiles after warm-up", compiles, 0)
    section.equal(f"{preset} off: overlapped dispatches", plain.overlapped, 0)
    runs = {"stream": rig}
    if num_devices > 1:
        runs["device"] = Rig(config, "float32", shapes, overlap="device", num_valid=rig.num_valid)
    else:
        section.skip(f"{preset} device", "one device")
    for mode, made in runs.items():
        results, compiles, _ = run = made.run(jobs, mode)
        section.at_least(f"{preset} {mode}: overlapped dispatches", run.overlapped, 1)
        section.equal(f"{preset} {mode}: compiles after warm-up", compiles, 0)
        different = [
            name
            for name, want in off.items()
            if (results[name].tokens, results[name].ending) != (want.tokens, want.ending)
        ]
        if different:
            section.number(f"{preset} {mode}: rows that differ", different)
        section.equal(f"{preset} {mode}: rows of {len(off)} with other tokens than off", len(different), 0)
        deltas = [
            abs(a.logprob - b.logprob)
            for name, want in off.items()
            if name not in different
            for a, b in zip(results[name].logprobs, want.logprobs, strict=True)
        ]
        worst = float(np.max(deltas)) if deltas else float("nan")
        section.at_most(f"{preset} {mode}: max |delta logprob| of {len(deltas)} tokens", worst, MAX_LOGPROB_ERROR)


def overlap_bfloat16(section: Section, batched: Batched, mode: str) -> None:
    """An overlap mode on the real member: the distance and the margins that :func:`batching` holds."""
    bar, run, judged = batched.bar, batched.run, batched.judged
    if batched.mode != mode:
        section.equal(f"{batched.mode}: overlapped dispatches", run.overlapped, 0, quiet=True)
        run = batched.rig.run(batched.jobs, mode)
        judged = batched.judge(batched.jobs, run.results)
    section.at_least(f"{mode}: overlapped dispatches", run.overlapped, 1)
    ended_well(section, f"{mode}, {batched.rows} rows", batched.jobs, run.results, run.compiles)
    hold_to_bar(section, f"{mode}, {batched.rows} rows", run.results, judged, bar)
    if batched.mode == mode:
        return
    greedy = [job.name for job in greedy_of(batched.jobs)]
    differences = first_differences(batched.results, {name: run.results[name] for name in greedy}, batched.judged)
    hold_margins(section, f"{mode} and {batched.mode}", len(greedy), differences, batched.judged, bar)


def nan_containment(section: Section, rig: Rig) -> None:
    """A row whose state or pages turn into NaN fails alone; in the same buckets its neighbours keep every bit."""
    number = next(rung for rung in rig.shapes.row_rungs if rung >= 4) - 1  # without the row that fails, the same bucket
    rng = np.random.default_rng(23)
    params = dataclasses.replace(GREEDY, max_tokens=MAX_TOKENS)

    def some(name: str) -> list[Job]:
        # Short enough that one step takes all prompts: the company of every row is the same in every run.
        lengths = rng.integers(1, rig.shapes.max_num_batched_tokens // number, number)
        return [Job(f"{name}{i}", tuple(rng.integers(0, rig.num_valid, n).tolist()), params)
                for i, n in enumerate(lengths)]  # fmt: skip

    jobs, others = some("r"), some("o")
    clean, compiles, _ = rig.run(jobs, "off")
    ended_well(section, "clean", jobs, clean, compiles)
    again = rig.run(jobs, "off").results
    section.equal("clean, again: rows that differ in a bit", _different(again, clean), 0)
    victim = jobs[number // 2].name
    for what in ("state", "pages"):
        engine = rig.engine("off")
        submit_all(engine, jobs)
        poisoned: list[int] = []

        def poison(results, engine=engine, what=what, poisoned=poisoned) -> None:
            if poisoned or len(results.get(victim, Result()).tokens) < 3:
                return
            held = engine.scheduler._decoding[victim]
            slot, pages = (held.slot, ()) if what == "state" else (0, held.pages)
            engine._state = engine.programs.fill(engine._state, float("nan"), slot, pages)
            poisoned.append(slot)

        results = drain(engine, after_step=poison)
        failed = results.pop(victim)
        ending = failed.last.error if failed.last is not None and failed.last.error else "none"
        section.number(f"{what}: the row's end", f"{failed.ending[0]} after {len(failed.tokens)} tokens: {ending}")
        section.equal(f"{what}: the row's own error names non-finite logits", "non-finite" in ending, True)
        kept = clean[victim].tokens[: len(failed.tokens)] == failed.tokens
        section.equal(f"{what}: its tokens before are those of the clean run", kept, True)
        neighbours = {name: result for name, result in clean.items() if name != victim}
        section.equal(f"{what}: of {len(neighbours)} neighbours, differ in a bit", _different(results, neighbours), 0)
        submit_all(engine, jobs)
        section.equal(f"{what}: slots used again, rows that differ in a bit", _different(drain(engine), clean), 0)
        section.equal(f"{what}: compiles after warm-up", engine.compiles_after_warmup, 0)
        engine.close()
    engine = rig.engine("off", debug_poison=True)
    submit_all(engine, others)
    drain(engine)
    submit_all(engine, jobs)
    section.equal("all freed memory NaN: rows that differ in a bit", _different(drain(engine), clean), 0)
    engine.close()


def _different(found: Mapping[str, Result], wanted: Mapping[str, Result]) -> int:
    """Rows whose tokens, endings or reported floats are not the very same; missing ones count."""
    return sum(
        name not in found
        or found[name].tokens != want.tokens
        or found[name].ending != want.ending
        or found[name].logprobs != want.logprobs
        for name, want in wanted.items()
    )


def num_devices() -> int:
    return len(jax.local_devices())
