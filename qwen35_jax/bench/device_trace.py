"""What the device did: kernel times read from JAX's profiler, given to the parts of the model.

:func:`profile` runs a function under the profiler and reads the trace that it writes. On a GPU every stream is a line
of kernels and copies; on a CPU there is no such line, and the trace says so instead of showing nothing.

A kernel is given to a part by the innermost scope (``jax.named_scope``) of the operation that it runs. The profiler
names the operation; its scope stands in the program's text (:func:`scopes_of`). Where the profiler gives no operation,
as for kernels inside a CUDA graph, the kernel's own name decides. A fused kernel counts for the part of its last
operation: a norm that XLA has put into the same kernel as the product before it is not seen apart. What nobody knows is
"other", and its names are kept.

The profiler runs programs kernel by kernel, without CUDA graphs: kernel times hold for the real run, the gaps between
them do not. Idle time of a step is therefore its measured time less the time of its kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

PARTS: Mapping[str, tuple[str, ...]] = {
    "GEMMs": ("in_proj", "out_proj", "qkv_proj", "o_proj", "gate_up", "down", "lm_head", "linear", "gemm"),
    "GDN": ("gdn_decode", "gdn_prefill", "causal_conv", "gated_norm"),
    "attention": ("kv_write", "paged_decode_attention", "paged_prefill_attention"),
    "sampling": ("sampling", "admit"),
    "glue": ("embed", "norm", "add_rms_norm", "swiglu", "inputs", "params", "glue"),
    "copies": ("copy_h2d", "copy_d2h", "copy_d2d", "copy_p2p", "copy", "memset"),
    "other": ("other",),
}
"""Parts of a step by group. A part is the name of a scope, or one of those that :func:`part_of` makes up: "gemm" (a
product of unknown scope), "glue" (scoped, but no part by itself: residual additions, splits), copies, "other"."""

GROUP_OF: Mapping[str, str] = {part: group for group, parts in PARTS.items() for part in parts}


def group_sums(parts: Mapping[str, float]) -> dict[str, float]:
    """Parts of a step summed by their groups; a part that no group has stands for itself."""
    sums: dict[str, float] = {}
    for part, value in parts.items():
        group = GROUP_OF.get(part, part)
        sums[group] = sums.get(group, 0.0) + value
    return sums


_MADE_UP = {"gemm", "glue", "other", *PARTS["copies"]}
_SCOPES = frozenset(GROUP_OF) - _MADE_UP
# Longer names first: paged_decode_attention_combine is not a "combine" of something else.
_KERNEL_PARTS = sorted((name for name in _SCOPES if "_" in name), key=len, reverse=True)
_INNER_JIT = re.compile(r"^jit\(_?(\w+)\)$")
_GEMM_NAMES = re.compile(r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|matmul|split_?k|triton_dot|_dot_", re.IGNORECASE)
_COPY_NAMES = re.compile(r"^\W*mem(?P<what>cpy|set)\W*(?P<way>[hdp](?:2|to)[hdp])?", re.IGNORECASE)
# Lines that the profiler derives from the streams' events: counting them would count every kernel twice.
_DERIVED_LINES = re.compile(
    r"^(Steps|XLA Modules|XLA Ops|XLA TraceMe|Async XLA Ops|Framework|TensorFlow|Source|Launch Stats|Counters)", re.I
)
_SCOPE_STATS = ("tf_op", "name", "long_name")  # where some versions put the path of scopes


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A kernel or copy.

    Attributes:
        name: of the kernel.
        scope: path of the operation, ``jit(step)/layer_0/mlp/gate_up/dot_general``; empty where it is not known.
        program: the compiled program, empty where it is not known.
        start_ns: when it began, on the trace's clock.
        duration_ns: how long it took.
        stream: line of the trace, the device's name first.
    """

    name: str
    scope: str
    program: str
    start_ns: float
    duration_ns: float
    stream: str = ""

    @property
    def end_ns(self) -> float:
        """When it ended."""
        return self.start_ns + self.duration_ns


@dataclasses.dataclass(frozen=True)
class PartTime:
    """What one part took.

    Attributes:
        seconds: sum of its kernels.
        kernels: number of them.
        names: seconds by name of the kernel, longest first.
    """

    seconds: float
    kernels: int
    names: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class DeviceTrace:
    """The events of one device.

    Attributes:
        events: by start.
        note: why there are none; empty otherwise.
        skipped_lines: lines of the device that were not counted, with their numbers of events.
        clocks: of the device meanwhile, see :attr:`~qwen35_jax.bench.clocks.Clocks.figures`.
    """

    events: tuple[DeviceEvent, ...]
    note: str = ""
    skipped_lines: Mapping[str, int] = dataclasses.field(default_factory=dict)
    clocks: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def last_steps(self, number: int, of: int) -> DeviceTrace:
        """The trace of the last ``number`` of ``of`` steps that are alike, so that each has as many events."""
        return dataclasses.replace(self, events=self.events[len(self.events) * (of - number) // of :])

    @property
    def busy_s(self) -> float:
        """Time during which at least one event ran."""
        return sum(end - start for start, end in self._busy) * 1e-9

    @property
    def span_s(self) -> float:
        """From the first event's start to the last one's end."""
        return (self._busy[-1][1] - self._busy[0][0]) * 1e-9 if self._busy else 0.0

    @property
    def idle_share(self) -> float | None:
        """Share of the span during which nothing ran; None without events."""
        return 1 - self.busy_s / self.span_s if self.span_s else None

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """The pauses between events, in order."""
        return tuple((b[0] - a[1]) * 1e-9 for a, b in zip(self._busy, self._busy[1:], strict=False))

    @functools.cached_property
    def _busy(self) -> list[tuple[float, float]]:
        """Union of the events' intervals."""
        union: list[tuple[float, float]] = []
        for event in self.events:
            if union and event.start_ns <= union[-1][1]:
                union[-1] = (union[-1][0], max(union[-1][1], event.end_ns))
            else:
                union.append((event.start_ns, event.end_ns))
        return union

    def by_part(self, classify: Callable[[DeviceEvent], str] | None = None) -> dict[str, PartTime]:
        """Time by part, longest first.

        Args:
            classify: part of an event; None takes :func:`part_of`.
        """
        classify = classify or part_of
        seconds: dict[str, Counter[str]] = {}
        kernels: Counter[str] = Counter()
        for event in self.events:
            part = classify(event)
            kernels[part] += 1
            seconds.setdefault(part, Counter())[event.name] += event.duration_ns * 1e-9  # type: ignore[assignment]
        parts = {
            part: PartTime(sum(names.values()), kernels[part], dict(names.most_common()))
            for part, names in seconds.items()
        }
        return dict(sorted(parts.items(), key=lambda item: -item[1].seconds))


def part_of(event: DeviceEvent) -> str:
    """The part that an event belongs to, one of those in :data:`PARTS`."""
    if copy := _COPY_NAMES.match(event.name):
        if copy["what"].lower() == "set":
            return "memset"
        way = (copy["way"] or "").lower().replace("to", "2")
        return f"copy_{way}" if f"copy_{way}" in GROUP_OF else "copy"
    for scope in reversed(event.scope.split("/")):
        name = _INNER_JIT.sub(r"\1", scope)  # an op's own jit bears its name: jit(_gdn_decode)
        if name in _SCOPES:
            return name
    for part in _KERNEL_PARTS:
        if part in event.name:
            return part
    if _GEMM_NAMES.search(event.name):
        return "gemm"
    return "glue" if event.scope else "other"


ANCHORS: Mapping[str, Mapping[str, str]] = {
    "decode": {"linear_attention": "gdn_decode", "full_attention": "kv_write"},
    "prefill": {"linear_attention": "causal_conv", "full_attention": "kv_write"},
}
"""By kind of step and of layer, the op that launches exactly one kernel of its name in every layer, but for the last
layer of a prefill: if it is one of attention it writes the keys of all tokens, and those of the last ones with their
queries."""


@dataclasses.dataclass(frozen=True)
class Launches:
    """Kernels and copies of one step.

    Attributes:
        gdn_layer: of a linear-attention layer, its MLP included.
        attention_layer: of a full-attention layer, its MLP included.
        other: outside of layers: copies of the host's fields, embedding, head, sampling; and what the last layer of a
            prefill has more than its like.
    """

    gdn_layer: float
    attention_layer: float
    other: float


def launches_of(events: Sequence[DeviceEvent], kind: str, layer_types: Sequence[str], steps: int) -> Launches | None:
    """Launches a layer, from the order of the kernels.

    Scopes cannot tell: XLA gives layers that are alike one kernel, which bears the scope of the first, and products of
    a library bear none. But in every layer one kernel has the name of its mixer's op (:data:`ANCHORS`). From one to the
    next there is the end of a layer and the start of another. Between two linear layers that is the number of a linear
    layer; from a linear one over a full one to the next linear one it is the number of both.

    Args:
        events: by start, of one stream of work.
        kind: "decode" or "prefill".
        layer_types: of the model.
        steps: steps in the trace.

    Returns:
        Means over the steps; None where the kernels are not those of the layers one after the other (other
        implementations of these ops), or where no two neighbours of a kind are there.
    """
    anchors = [
        (position, layer_type)
        for position, event in enumerate(events)
        for layer_type, op in ANCHORS[kind].items()
        if op in event.name and part_of(event) == op
    ]
    linear, full = ANCHORS[kind]
    expected = list(layer_types)
    if kind == "prefill" and expected[-1:] == [full]:
        expected.append(full)
    if not steps or [layer_type for _, layer_type in anchors] != expected * steps:
        return None
    periods: dict[tuple[str, str], list[int]] = {}
    for number in range(len(anchors) - 1):
        if (number + 1) % len(expected):  # from the last layer to the next step's first there is more than layers
            (here, before), (there, after) = anchors[number : number + 2]
            periods.setdefault((before, after), []).append(there - here)
    try:
        alike, into, out = (
            sum(periods[pair]) / len(periods[pair]) for pair in ((linear, linear), (linear, full), (full, linear))
        )
    except KeyError:
        return None
    number_full = list(layer_types).count(full)
    both = into + out - alike
    inside = (len(layer_types) - number_full) * alike + number_full * both
    return Launches(alike, both, len(events) / steps - inside)


def scopes_of(hlo_text: str) -> dict[str, str]:
    """Path of scopes of every instruction of a compiled program.

    A fusion that has none of its own takes that of its last operation, or of any operation in it.

    Args:
        hlo_text: ``compiled.as_text()``. A program from JAX's compilation cache has the scopes of when it was compiled:
            they are no part of that cache's key. Without a text the profiler's own names have to do.
    """
    scopes: dict[str, str] = {}
    roots: dict[str, str] = {}  # computation -> scope of its root, or of the latest instruction that has one
    calls: dict[str, str] = {}
    computation, fixed = "", False
    for line in hlo_text.splitlines():
        if header := _COMPUTATION.match(line):
            computation, fixed = header[1], False
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction is None:
            continue
        is_root, name = instruction.groups()
        if path := _OP_NAME.search(line):
            scopes[name] = path[1]
            if not fixed:
                roots[computation], fixed = path[1], bool(is_root)
        elif called := _CALLS.search(line):
            calls[name] = called[1]
    for name, called in calls.items():
        if called in roots:
            scopes[name] = roots[called]
    return scopes


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")


def read_profile(profile_data: Any, scopes: Mapping[str, str] | None = None, device: int = 0) -> DeviceTrace:
    """The events of one device in a profile.

    Args:
        profile_data: a :class:`jax.profiler.ProfileData`, or anything with its planes, lines, events and stats.
        scopes: of the program that ran, see :func:`scopes_of`.
        device: number of the device.
    """
    planes = list(profile_data.planes)
    devices = [plane for plane in planes if re.match(r"/device:(?!CUSTOM)", plane.name)]
    found = [plane for plane in devices if plane.name.split()[0].endswith(f":{device}")]
    if not found:
        names = ", ".join(plane.name for plane in planes) or "none at all"
        return DeviceTrace((), f"the profile has no plane of device {device}, so it holds no device events ({names})")
    events, skipped = [], {}
    for plane in found:
        lines = list(plane.lines)
        streams = [line for line in lines if line.name.startswith("Stream")]
        streams = streams or [line for line in lines if not _DERIVED_LINES.match(line.name)]
        for line in lines:
            if line in streams:
                stream = f"{plane.name.removeprefix('/device:')}/{line.name}"
                events += _events_of(line.events, stream, scopes or {})
            else:
                skipped[line.name] = sum(1 for _ in line.events)
    events.sort(key=lambda event: event.start_ns)
    return DeviceTrace(tuple(events), "" if events else f"{found[0].name}: no event on any stream", skipped)


def _events_of(events: Iterable[Any], stream: str, scopes: Mapping[str, str]) -> Iterator[DeviceEvent]:
    kernel_scopes = {_kernel_name(name): path for name, path in scopes.items()}
    for event in events:
        stats = {name: value for name, value in event.stats if isinstance(value, str)}
        operation = stats.get("hlo_op", "")
        own = next((stats[name] for name in _SCOPE_STATS if "/" in stats.get(name, "")), "")
        scope = scopes.get(operation) or own or kernel_scopes.get(event.name, "")
        yield DeviceEvent(event.name, scope, stats.get("hlo_module", ""), event.start_ns, event.duration_ns, stream)


def _kernel_name(instruction: str) -> str:
    """The name that XLA gives the kernel of an instruction."""
    return re.sub(r"\W", "_", instruction)


def kernel_list(trace: DeviceTrace, steps: int) -> str:
    """Every kernel of the first of ``steps`` steps in order: start, length, part, scope, name; tabs between them."""
    events = trace.events[: len(trace.events) // max(1, steps)]
    first = events[0].start_ns if events else 0
    return "".join(
        f"{(e.start_ns - first) * 1e-3:.1f}\t{e.duration_ns * 1e-3:.2f}\t{part_of(e)}\t{e.scope}\t{e.name}\n"
        for e in events
    )


def profile(
    function: Callable[[], Any],
    directory: str | pathlib.Path | None = None,
    *,
    scopes: Mapping[str, str] | None = None,
    device: int = 0,
) -> DeviceTrace:
    """Run ``function`` once under the profiler and read what the device did.

    Args:
        function: waits for what it has dispatched before it returns.
        directory: where the profiler's files stay (TensorBoard reads them); None keeps none.
        scopes: of the program that runs, see :func:`scopes_of`.
        device: number of the device.

    Raises:
        RuntimeError: the profiler left no file.
    """
    with tempfile.TemporaryDirectory(prefix="profile-") as scratch:
        where = pathlib.Path(directory or scratch)
        before = set(where.rglob("*.xplane.pb"))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls are many, and not what is asked for
        options.host_tracer_level = 1
        with jax.profiler.trace(where, profiler_options=options):
            function()
        files = sorted(set(where.rglob("*.xplane.pb")) - before)
        if not files:
            raise RuntimeError(f"the profiler left no *.xplane.pb under {where}")
        return read_profile(jax.profiler.ProfileData.from_file(str(files[-1])), scopes, device)
