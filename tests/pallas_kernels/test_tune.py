"""The search for settings: what is tried, what is chosen, what is written. Kernels are interpreted here."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench, registry, tune, tuned
from pallas_kernels.paged_decode_attention.triton import Tiling
from pallas_kernels.spec import specs_of, tiny_specs_of
from pallas_kernels.tune import Tried
from pallas_kernels.tuned import Entry, Tunable

TUNABLE = Tunable(
    "paged_decode_attention",
    "triton",
    default=lambda arguments: Tiling(),
    key=lambda arguments: ({"group": 4}, {"rows": 5}),
    steps=({"keys": (16, 64), "warps": (2, 4)}, {"programs": (264, 528)}),
    possible=lambda tiling, arguments: (tiling.keys, tiling.warps) != (16, 2),
)


class FakeWork:
    """Times by settings, no kernels."""

    arguments: dict = {}

    def __init__(self, time, broken=()):
        self.time, self.broken, self.asked = time, broken, []

    def lower(self, settings):
        self.asked.append(settings)
        if settings in self.broken:
            raise ValueError("too much shared memory\nand more")

        class Lowered:
            def compile(self):
                return settings

        return Lowered(), Lowered()

    def measure(self, settings, programs, **how):
        assert programs == (settings, settings)
        return Tried(settings, self.time(settings), fault="wrong" if self.time(settings) == 1 else "")


@pytest.fixture
def threads():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool


def test_steps_build_on_one_another(threads):
    work = FakeWork(lambda s: 10 + s.keys / 16 - (s.programs == 264) * (s.keys == 16))
    best, tried = tune.tune(TUNABLE, work, threads, 0.01)
    assert best == Tiling(keys=16, programs=264)
    assert len(tried) == 4 and Tiling(keys=16, warps=2) not in work.asked, "what cannot run is not tried"
    assert len(work.asked) == len(set(work.asked)), "nothing is tried twice"


def test_the_default_stays_within_the_margin(threads):
    slightly = FakeWork(lambda s: 100 - (s.keys == 16))
    assert tune.tune(TUNABLE, slightly, threads, 0.02)[0] == Tiling()
    assert tune.tune(TUNABLE, slightly, threads, 0.005)[0] == Tiling(keys=16)


def test_the_wrong_and_the_broken_are_out(threads):
    work = FakeWork(lambda s: 1 if s.warps == 2 else 5, broken=[Tiling(keys=16)])
    best, tried = tune.tune(TUNABLE, work, threads, 0.01)
    assert best == Tiling()
    faults = {one.settings: one.fault for one in tried if one.fault}
    assert faults == {Tiling(warps=2): "wrong", Tiling(keys=16): "ValueError: too much shared memory"}
    assert "out: keys=16 warps=4 stages=3 programs=528: ValueError" in tune.table(Tiling(), best, tried, 1)
    with pytest.raises(RuntimeError, match="no settings are right: .*wrong"):
        tune.tune(TUNABLE, FakeWork(lambda s: 1), threads, 0.01)


def test_specs_that_an_entry_cannot_tell_apart_share_the_best_for_all():
    def tried(**microseconds):
        one = [Tried(Tiling(), microseconds["home"])]
        return [*one, *(Tried(Tiling(keys=int(name[1:])), us) for name, us in microseconds.items() if name != "home")]

    short, long = tried(home=10.0, k16=5.0, k32=6.0), tried(home=1000.0, k16=2000.0, k32=1100.0)
    assert tune.best_of_all(Tiling(), [short], 0.01) == Tiling(keys=16)
    assert tune.best_of_all(Tiling(), [short, long], 0.01) == Tiling(keys=32), "ratios count, not microseconds"
    assert tune.best_of_all(Tiling(), [long, short], 0.01) == Tiling(keys=32), "in any order"
    assert tune.best_of_all(Tiling(), [short, long], 0.5) == Tiling(), "within the margin"
    spoiled = [dataclasses.replace(one, fault="wrong" if one.settings.keys == 32 else "") for one in long]
    assert tune.best_of_all(Tiling(), [short, spoiled], 0.01) == Tiling(), "what is wrong for one is out for all"
    nothing = [dataclasses.replace(one, fault="wrong" if one.settings != Tiling(keys=16) else "") for one in long]
    assert tune.best_of_all(Tiling(), [short, nothing], 0.01) == Tiling(keys=16)
    with pytest.raises(RuntimeError, match="are right for all"):
        tune.best_of_all(Tiling(), [short[:1], nothing], 0.01)


def test_entries_are_merged_by_what_they_are_found_by(tmp_path):
    one = Entry("triton", "NVIDIA H200", {"group": 4}, {"rows": 64}, {"keys": 32}, {"spec": "a", "commit": "1"})
    small, other = dataclasses.replace(one, sizes={"rows": 8}), dataclasses.replace(one, device="NVIDIA L4")
    newer = dataclasses.replace(one, use={"keys": 64})
    path = tmp_path / "tuned.json"
    tune.write(path, tune.merged([one, other], [newer, small]))
    assert tuned.read(path) == (small, newer, other)
    assert path.read_text().count("\n") == 5, "an entry a line"


def test_a_run_on_a_small_workload(tmp_path, capsys, monkeypatch):
    """A real kernel, interpreted, in two settings."""
    op = "paged_decode_attention"
    few = [
        dataclasses.replace(one, steps=({name: values[:2] for name, values in list(step.items())[:1]},))
        for one in tune.tunables_of(op)
        for step in one.steps[:1]
        if one.implementation == "triton"
    ]
    monkeypatch.setattr(tune, "tunables_of", lambda name: tuple(few) if name == op else ())
    argv = ["--tiny", f"--op={op}", "--spec=tiny1-*", "--calls=1", "--dispatches=1", "--samples=1"]
    assert tune.main([*argv, f"--directory={tmp_path}"]) == 0
    (entry,) = tuned.read(tmp_path / op / "tuned.json")
    assert entry.device == jax.devices()[0].device_kind and entry.measured["spec"] == "tiny1-rows5"
    assert entry.use.keys() == {field.name for field in dataclasses.fields(few[0].default(arguments_of(op)))}
    printed = capsys.readouterr().out
    assert "<- default" in printed and "out:" not in printed


def test_a_run_makes_one_entry_of_specs_of_one_key(tmp_path, capsys, monkeypatch):
    op = "paged_decode_attention"
    spec = tiny_specs_of(op)["tiny1-rows5"]
    specs = {name: dataclasses.replace(spec, name=name) for name in ("first", "second")}
    monkeypatch.setattr(tune, "tiny_specs_of", lambda name: specs if name == op else {})
    tried = {
        "first": [Tried(Tiling(), 10.0), Tried(Tiling(keys=16), 5.0), Tried(Tiling(keys=32), 6.0)],
        "second": [Tried(Tiling(), 100.0), Tried(Tiling(keys=16), 200.0), Tried(Tiling(keys=32), 90.0)],
    }
    monkeypatch.setattr(tune, "tunables_of", lambda name: (TUNABLE,) if name == op else ())
    monkeypatch.setattr(tune, "Workload", lambda tunable, spec, **how: FakeWork(spec.name))

    def measured(tunable, work, *_, **how):
        mine = tried[work.time]  # the spec's name
        return min(mine, key=lambda one: one.microseconds).settings, mine

    monkeypatch.setattr(tune, "tune", measured)
    argv = ["--tiny", f"--op={op}", "--spec=*", f"--directory={tmp_path}"]
    assert tune.main(argv) == 0
    (entry,) = tuned.read(tmp_path / op / "tuned.json")
    assert entry.measured["spec"] == "first, second" and entry.use["keys"] == 32, (
        "second alone would have chosen it too"
    )
    tried["second"][1] = Tried(Tiling(keys=16), 91.0)
    assert tune.main(argv) == 0
    (entry,) = tuned.read(tmp_path / op / "tuned.json")
    assert entry.use["keys"] == 16, "first has more to lose"
    assert "for first and second: keys=16" in capsys.readouterr().out

    specs |= {name: dataclasses.replace(spec, name=name) for name in ("third", "fourth")}
    tried["third"] = [Tried(Tiling(), 9.0, fault="wrong"), Tried(Tiling(keys=64, warps=2), 1.0)]
    tried["fourth"] = [Tried(Tiling(), 1.0), Tried(Tiling(keys=16), 0.5)]
    assert tune.main(argv) == 1, "third has nothing in common with the others"
    (entry,) = tuned.read(tmp_path / op / "tuned.json")
    assert entry.measured["spec"] == "first, second, fourth" and entry.use["keys"] == 16
    assert "third: no settings that were tried for all" in capsys.readouterr().err


def arguments_of(op):
    case = tiny_specs_of(op)["tiny1-rows5"].case()
    return case.arguments | case.options


def test_a_wrong_kernel_is_noticed(monkeypatch):
    """Settings are held to the reference in the run that times them."""
    spec = tiny_specs_of("paged_decode_attention")["tiny1-rows5"]
    work = tune.Workload(TUNABLE, spec, calls=1, rounds=1, interpret=True)
    right = work._registered.function
    spoiled = dataclasses.replace(work._registered, function=lambda **arguments: right(**arguments) + 1)
    monkeypatch.setattr(work, "_registered", spoiled)
    programs = tuple(program.compile() for program in work.lower(Tiling()))
    tried = work.measure(Tiling(), programs, dispatches=1, samples=1)
    assert tried.fault.startswith("wrong: {'output'")


def test_an_implementation_of_ones_own_can_be_timed():
    spec = tiny_specs_of("kv_write")["tiny1-ragged"]
    arguments, options = bench._device_case(spec, 0)
    registered = registry.get_op("kv_write").implementations["reference"]
    got, _ = bench._op(spec, registered, options)(arguments)
    want, _ = bench._op(spec, "reference", options)(arguments)
    assert (got == want).all()


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("gdn_decode", "4b-rows64"),
        ("paged_decode_attention", "4b-1x1k"),
        ("kv_write", "4b-8x1024"),
        ("gated_rms_norm", "4b-rows8192"),
    ],
)
@pytest.mark.host
def test_whatever_is_tried_lowers_for_an_h200(op, name):
    """On the 4B shapes: the first, the last and some between of each step, beside the defaults."""
    spec = specs_of(op)[name]
    options = {}

    def make():
        case = spec.case()
        options.update(case.options)
        return {name: jnp.asarray(array) for name, array in case.arguments.items()}

    arguments = jax.eval_shape(make)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        for tunable in tune.tunables_of(op):
            function = registry.get_op(op).implementations[tunable.implementation].function
            default = tunable.default(arguments | options)
            wanted = [one for step in tunable.steps for one in tune.combinations(default, step)]
            wanted = [one for one in wanted if tunable.possible(one, arguments | options)]
            assert default in wanted and len(wanted) > 3
            for settings in (*wanted[:: 3 if len(wanted) > 4 else 1], wanted[-1]):
                run = functools.partial(function, **options, tiling=settings)
                jax.jit(lambda a, run=run: run(**a)).trace(arguments).lower(lowering_platforms=("cuda",))


def test_nothing_matches(capsys):
    with pytest.raises(SystemExit):
        tune.main(["--op=add_rms_norm"])
    assert "nothing matches --op=add_rms_norm" in capsys.readouterr().err
    assert json.dumps(tune.tunables_of("add_rms_norm")) == "[]"
