"""The commands around checkpoints: qwen35-convert and make_random_checkpoint, as processes and as functions."""

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from qwen35_jax import checkpoint
from qwen35_jax.checkpoint import convert, open_model_dir
from qwen35_jax.cli import convert as convert_command
from qwen35_jax.config import ModelConfig
from qwen35_jax.errors import UserInputError
from qwen35_jax.progress import silent
from qwen35_jax.weights import load_params, plan_load
from tests.oracle import tiny
from tests.oracle.qwen35_numpy import Oracle

ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def run(capsys):
    """Runs the command in this process: exit code, stdout, stderr."""

    def call(*args, main=convert_command.main):
        code = main(["command", *args])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    tiny.write_hf_dir(path, "0.8b-tied", shards=2, skipped_tensors=True)
    return path


def left_behind(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != "source")


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_converts(source, tmp_path, run):
    output = tmp_path / "new" / "model"
    code, out, err = run(f"--model={source}", f"--output={output}")
    assert (code, out.count("\n")) == (0, 1), err
    assert "parameters in bfloat16" in out and "4 tensors" in out
    assert "converting weights" in err
    assert open_model_dir(output) == "orbax"
    assert left_behind(output.parent) == ["model"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model=/nowhere/at-all", "--output={tmp}/out"], "error: model directory '/nowhere/at-all' does not exist"),
        (["--output={tmp}/out"], "error: --model is needed"),
        (["--model={tmp}", "--output={tmp}/out", "--dtpye=auto"], "error: Unknown command line flag 'dtpye'"),
        (["--model={tmp}", "--output={tmp}/out", "--dtype=int4"], "error: --dtype must be one of auto, bfloat16"),
        (["--model={tmp}", "--output={tmp}/out", "stray"], "error: unexpected argument 'stray'"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(tmp_path, run, args, message):
    code, out, err = run(*[arg.format(tmp=tmp_path) for arg in args])
    assert code == 2
    assert out == ""
    assert err.startswith(message) and err.count("\n") == 1, err
    assert left_behind(tmp_path) == []


def test_termination_leaves_nothing_behind(source, tmp_path):
    """SIGTERM in the middle of a conversion that never ends."""
    script = (
        "import sys, time\n"
        "from qwen35_jax import checkpoint\n"
        "def save_part(*args):\n"
        "    print('saving', flush=True)\n"
        "    while True: time.sleep(0.05)\n"
        "checkpoint.save_part = save_part\n"
        "from qwen35_jax.cli.convert import run\n"
        "run()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, f"--model={source}", f"--output={tmp_path / 'out'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout.readline() == "saving\n"
        assert any(".out.partial-" in name for name in left_behind(tmp_path))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    assert left_behind(tmp_path) == []


# ---- refusals, without the process ---------------------------------------------------------------------------------


def break_index(path):
    (path / "model-00002-of-00002.safetensors").unlink()


def break_shard(path):
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def break_config(path):
    (path / "config.json").write_text("{")


def unknown_model_type(path):
    (path / "config.json").write_text(json.dumps(tiny.edited_config("0.8b-tied", root={"model_type": "llama"})))


def missing_tensor(path):
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"][tiny.PREFIX + "norm.weight"]
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_index, "names model-00002-of-00002.safetensors"),
        (break_shard, "model-00002-of-00002.safetensors is truncated"),
        (break_config, r"config\.json is not valid JSON"),
        (unknown_model_type, "model_type = 'llama'"),
        (missing_tensor, r"missing tensors: model\.language_model\.norm\.weight"),
    ],
)
def test_bad_sources_make_no_output(source, tmp_path, damage, message):
    damage(source)
    with pytest.raises(UserInputError, match=message):
        convert(source, tmp_path / "deep" / "out")
    assert left_behind(tmp_path) == []


def test_outputs_that_are_there_are_refused(source, tmp_path):
    with pytest.raises(UserInputError, match="is the model directory itself"):
        convert(source, tmp_path / "." / "source")
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("x")
    with pytest.raises(UserInputError, match="exists and is not an empty directory"):
        convert(source, full)
    with pytest.raises(UserInputError, match="exists and is not an empty directory"):
        convert(source, full / "precious")
    with pytest.raises(UserInputError, match="cannot write to .*precious"):
        convert(source, full / "precious" / "out")
    assert [path.name for path in full.iterdir()] == ["precious"]


def test_an_empty_output_directory_is_used(source, tmp_path):
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out")
    assert open_model_dir(tmp_path / "out") == "orbax"


@pytest.mark.parametrize("there", [True, False])
def test_an_output_behind_a_link_stays_one(source, tmp_path, there):
    if there:
        (tmp_path / "target").mkdir()
    os.symlink("target", tmp_path / "out")
    convert(source, tmp_path / "out", progress=silent)
    assert left_behind(tmp_path) == ["out", "target"] and (tmp_path / "out").is_symlink()
    assert open_model_dir(tmp_path / "target") == "orbax"


@pytest.mark.parametrize("length", [240, 300])
def test_a_name_that_is_too_long_is_told(source, tmp_path, length):
    with pytest.raises(UserInputError, match="cannot write to .*: File name too long"):
        convert(source, tmp_path / ("a" * length), progress=silent)
    assert left_behind(tmp_path) == []


def test_a_full_disk_is_told_beforehand(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 900, 100))
    with pytest.raises(UserInputError, match=r"output '.*out' needs \d+\.\d GiB, .* has 0\.0 GiB left"):
        convert(source, tmp_path / "out")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing(source, tmp_path, monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(checkpoint, "write_manifest", fail)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "out")
    assert left_behind(tmp_path) == []


def test_a_disk_that_fills_up_is_one_line(source, tmp_path, run, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_part", fail)
    code, _, err = run(f"--model={source}", f"--output={tmp_path / 'out'}")
    assert code == 1 and left_behind(tmp_path) == []
    assert err.splitlines()[-1].startswith("error: the conversion broke off: ") and "No space left" in err


# ---- make_random_checkpoint ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_random_checkpoint", ROOT / "scripts/make_random_checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write(script, path, config, **options):
    path.mkdir()
    arguments = {"seed": 0, "max_shard_bytes": 1 << 20, "tokenizer_from": None, "progress": silent}
    script.write_checkpoint(path, config, **{**arguments, **options})
    return path


def read_tensors(path):
    from safetensors.numpy import load_file

    out = {}
    for file in sorted(path.glob("*.safetensors")):
        out |= load_file(file)
    return out


def test_random_checkpoints_are_complete(script, tmp_path):
    config = ModelConfig.preset("tiny-27b", num_layers=4, vocab_size=256)
    path = write(script, tmp_path / "a", config)
    assert ModelConfig.from_hf(path) == config
    plan = plan_load(path, config)
    assert plan.layout == "full" and len(plan.shards) > 2
    tensors = read_tensors(path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    a_log = tensors["model.language_model.layers.0.linear_attn.A_log"]
    assert a_log.dtype == np.float32 and tensors["lm_head.weight"].dtype.name == "bfloat16"
    assert all(np.isfinite(tensor.astype(np.float32)).all() for tensor in tensors.values())
    assert load_params(path, config)


def test_random_checkpoints_depend_on_the_seed_only(script, tmp_path, monkeypatch):
    config = ModelConfig.preset("tiny-0.8b", vocab_size=256, dtype="float32")
    one = read_tensors(write(script, tmp_path / "a", config))
    two = read_tensors(write(script, tmp_path / "b", config, max_shard_bytes=1 << 30))
    monkeypatch.setattr(script, "BLOCK_VALUES", 1000)
    three = read_tensors(write(script, tmp_path / "c", config, seed=1))
    four = read_tensors(write(script, tmp_path / "d", config))
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, two[name])
        np.testing.assert_array_equal(tensor, four[name])
        assert not np.array_equal(tensor, three[name])


def test_random_checkpoints_keep_activations_sane(script, tmp_path):
    config = ModelConfig.preset("tiny-4b", vocab_size=256, dtype="float32")
    path = write(script, tmp_path / "a", config)
    tokens = np.random.default_rng(0).integers(0, 256, 48)
    output = Oracle(json.loads((path / "config.json").read_text()), read_tensors(path)).forward(tokens)
    assert 0.7 < output.logits.std() < 6
    probabilities = np.exp(output.logits - output.logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    assert probabilities.max() < 0.999


def test_random_checkpoints_with_a_tokenizer(script, tmp_path):
    from tokenizers import Tokenizer, models

    tokenizer = tmp_path / "tok"
    tokenizer.mkdir()
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0")).save(
        str(tokenizer / "tokenizer.json")
    )
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": [98, 99]}')
    (tokenizer / "chat_template.jinja").write_text("x")
    config = ModelConfig.preset("tiny-0.8b", vocab_size=128)
    path = write(script, tmp_path / "a", config, tokenizer_from=str(tokenizer))
    assert ModelConfig.from_hf(path).eos_token_ids == (98, 99)
    assert {"tokenizer.json", "chat_template.jinja"} <= {file.name for file in path.iterdir()}
    small = ModelConfig.preset("tiny-0.8b", vocab_size=64)
    with pytest.raises(UserInputError, match="knows ids up to 99, the model has 64"):
        write(script, tmp_path / "b", small, tokenizer_from=str(tokenizer))
    with pytest.raises(UserInputError, match=r"'.*source-less' has no tokenizer\.json"):
        write(script, tmp_path / "c", config, tokenizer_from=str(tmp_path / "source-less"))


def test_the_script_makes_a_directory_or_nothing(script, tmp_path):
    made = script.make_random_checkpoint("tiny-0.8b", tmp_path / "m", shard_size_mb=1, vocab_size=300)
    assert left_behind(tmp_path) == ["m"]
    assert len(plan_load(tmp_path / "m", made).shards) > 1
    with pytest.raises(UserInputError, match="exists and is not an empty directory"):
        script.make_random_checkpoint("tiny-0.8b", tmp_path / "m")
    with pytest.raises(UserInputError, match=r"unknown preset '7b'; known: 0\.8b"):
        script.make_random_checkpoint("7b", tmp_path / "n")
    with pytest.raises(UserInputError, match=r"has no tokenizer\.json"):
        script.make_random_checkpoint("tiny-0.8b", tmp_path / "n", tokenizer_from=str(tmp_path))
    assert left_behind(tmp_path) == ["m"]


def test_the_script_is_a_command(script, run, tmp_path):
    code, out, err = run("--preset=tiny-0.8b", "--vocab_size=300", f"--output={tmp_path / 'm'}", main=script.main)
    assert (code, out.count("\n")) == (0, 1) and "writing weights" in err
    assert ModelConfig.from_hf(tmp_path / "m").vocab_size == 300
    code, out, err = run("--preset=7b", f"--output={tmp_path / 'n'}", main=script.main)
    assert (code, out) == (2, "") and err.startswith("error: unknown preset '7b'; known: 0.8b")
    code, out, err = run("--preset=4b", f"--output={tmp_path / 'n'}", "--dtype=int8", main=script.main)
    assert (code, out) == (2, "") and "dtype 'int8' is not supported" in err
    code, out, err = run("--help", main=script.main)
    assert code == 0 and "--tokenizer_from" in out


def test_help_names_every_flag(run):
    code, out, err = run("--help")
    assert code == 0 and all(flag in out for flag in ("--model", "--output", "--dtype"))
