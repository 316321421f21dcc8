"""How fast a prefill's matrix products are for as long as a job goes on, alone and in the model's order.

    python scripts/bench_products.py --preset=4b --results=benchmarks/results/products.json

Cells ``product/<size>/<name>-<tokens>``: the first program after a pause, and programs that follow others at the
device's limit of power, with clock and power beside them. ``gate_up`` is one kernel with its activation; ``@reference``
are the same products as the compiler makes them, a kernel for what is between them. ``@zeros`` multiplies zeros, which
costs less power than numbers do: what it gains is the least that the limit takes.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence

import jax

from pallas_kernels import registry
from pallas_kernels.records import aligned
from qwen35_jax import runtime
from qwen35_jax.bench import products
from qwen35_jax.bench.clocks import reader
from qwen35_jax.bench.products import CHAIN, GATE_UP, SQUARE, Product, Rate, Timing
from qwen35_jax.bench.records import append_records, check_results, make_record, own_commit
from qwen35_jax.cli.common import CommandLine, names_in_order, run_command, run_with_flags
from qwen35_jax.config import EngineConfig, ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.presets import PRESETS

OF_KERNELS = (GATE_UP, CHAIN)
"""Products that have the compiler's version beside them."""
FARTHEST = {GATE_UP: 0.01, CHAIN: 0.03}
"""Distance of ours from the compiler's: two roundings to bf16 of 2^-9 at the most are 0.004 of a number's size; through
32 layers of them, each of which passes on what it gets, a chain's distances add up as its roundings do."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A rate to measure.

    Attributes:
        name: of the product.
        kernels: "auto" or "reference".
        zeros: whether zeros are multiplied.
    """

    name: str
    kernels: str = registry.AUTO
    zeros: bool = False

    def full_name(self, size: str, tokens: int) -> str:
        """As results files have it."""
        suffix = "" if self.kernels == registry.AUTO else f"@{self.kernels}"
        return f"product/{size}/{self.name}-{tokens}{suffix}" + ("@zeros" if self.zeros else "")


def cells_of(names: Sequence[str]) -> list[Cell]:
    """Each product, beside the compiler's where there is another, the square one beside that of zeros."""
    found = []
    for name in names:
        found.append(Cell(name))
        if name in OF_KERNELS:
            found.append(Cell(name, kernels=registry.REFERENCE))
        if name == SQUARE:
            found.append(Cell(name, zeros=True))
    return found


def make(cell: Cell, config: ModelConfig, tokens: int) -> Product:
    """A cell's program, its numbers on the device."""
    if cell.name == CHAIN:
        return products.chain(config, tokens, kernels=cell.kernels, zeros=cell.zeros)
    return products.alone(cell.name, config, tokens, kernels=cell.kernels, zeros=cell.zeros)


def checks_of(cell: Cell, product: Product, config: ModelConfig, tokens: int) -> dict[str, object]:
    """Whether a product with kernels of ours gives what the compiler's does; the others are the compiler's."""
    if cell.name not in OF_KERNELS or cell.kernels != registry.AUTO:
        return {}
    reference = make(dataclasses.replace(cell, kernels=registry.REFERENCE), config, tokens)
    far = products.difference(product, reference)
    wrong = None if far <= FARTHEST[cell.name] else f"{far:.2g} from the reference, allowed {FARTHEST[cell.name]}"
    return {"relative_difference": far if math.isfinite(far) else None, "first_mismatch": wrong}


def table(rates: Sequence[tuple[str, Rate]]) -> str:
    """The rates as text."""
    rows = [("cell", "TFLOP/s", "after a pause", "spread", "SM clock, MHz", "W", "capped")]
    for name, rate in rates:
        told = [
            "-" if (value := rate.clocks.get(key)) is None else form.format(value)
            for key, form in (("sm_clock_mhz", "{:.0f}"), ("power_w", "{:.0f}"), ("power_capped_share", "{:.0%}"))
        ]
        rows.append((name, f"{rate.lasting / 1e12:.1f}", f"{rate.first / 1e12:.1f}", f"{rate.spread:.1%}", *told))
    return "\n".join(aligned(rows))


def command_line() -> CommandLine:
    line = CommandLine("bench_products.py [--preset=4b] [--flag=value ...]", __doc__ or "")
    line.group("What")
    line.define("str", "preset", "4b", f"Model: {', '.join(PRESETS)}.")
    line.define("int", "tokens", 8192, "Rows of every product.")
    line.define(
        "str", "products", None, "Names, with commas between them; the default is all of the model's, chain, square."
    )
    line.group("How")
    line.define("float", "pause", Timing.pause, "Seconds of rest before a first program.")
    line.define("float", "settle", Timing.settle, "Seconds of work before the samples.")
    line.define("int", "samples", Timing.samples, f"Samples of {Timing.sample} s.")
    line.define("str", "results", None, "Results file to append the records to.")
    return line


def _run(line: CommandLine) -> int:
    """Measure what the flags ask for; 1 if a kernel of ours gave something else than the compiler."""
    own_commit()
    if line.preset not in PRESETS:
        raise UserInputError(f"--preset: no model {line.preset!r} (there are {', '.join(PRESETS)})")
    for name, least in (("tokens", 1), ("samples", 1), ("pause", 0), ("settle", 0)):
        if not least <= getattr(line, name) < math.inf:
            raise UserInputError(f"--{name} must be a number of at least {least}, got {getattr(line, name)}")
    if line.results:
        check_results(line.results)
    config = ModelConfig.preset(line.preset)
    known = products.names_of(config)
    cells = cells_of(names_in_order("products", line.products, known) if line.products else known)
    runtime.prepare(EngineConfig.gpu_memory_utilization, None)
    device = jax.devices()[0]
    timing = Timing(line.pause, line.settle, samples=line.samples)
    rates: list[tuple[str, Rate]] = []
    broken = False
    for number, cell in enumerate(cells, 1):
        name = cell.full_name(line.preset, line.tokens)
        print(f"{number} of {len(cells)}: {name}", file=sys.stderr, flush=True)
        product = make(cell, config, line.tokens)
        rate = products.measure(product, timing, reader(device))
        checks = checks_of(cell, product, config, line.tokens)
        rates.append((name, rate))
        if line.results:
            settings = {"tokens": line.tokens, "dtype": products.DTYPE, "kernels": cell.kernels}
            settings |= dataclasses.asdict(timing)
            append_records(line.results, [make_record(name, rate.metrics, settings=settings, checks=checks)])
        broken |= checks.get("first_mismatch") is not None
        del product  # its weights: the next one's come beside no others
    print(f"{device.device_kind}, {line.tokens} tokens\n{table(rates)}")
    return int(broken)


def main(argv: Sequence[str]) -> int:
    return run_with_flags(command_line(), argv, _run)


if __name__ == "__main__":
    run_command(main)
