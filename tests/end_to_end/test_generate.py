"""The whole path on real files: a directory in, answers out, judged by the float64 oracle."""

import json

import numpy as np
import pytest

from qwen35_jax import LLM, SamplingParams
from tests.oracle import tiny
from tests.oracle.qwen35_numpy import Oracle, log_softmax

CASE = "4b-untied"
LENGTHS = (1, 3, 64, 65, 130, 17)
LIMITS = {"max_model_len": 192, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / CASE
    tiny.write_hf_dir(directory, CASE, dtype="float32")
    return directory


@pytest.fixture(scope="module")
def oracle():
    return Oracle(tiny.hf_config(CASE), tiny.weights(CASE))


def prompts():
    return [tiny.token_ids(CASE, length, seed=9).tolist() for length in LENGTHS]


def check_against_oracle(outputs, oracle):
    """Every reported logprob and rank against the exact value for the same prefix; greedy tokens are its argmax."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    for prompt, output in zip(prompts(), outputs, strict=True):
        completion = output.outputs[0]
        assert output.prompt_token_ids == prompt
        assert len(completion.token_ids) == len(completion.logprobs) == 10
        exact = log_softmax(oracle.forward(np.asarray(prompt + completion.token_ids[:-1])).logits)
        for step, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            row = exact[len(prompt) - 1 + step]
            order = np.argsort(-row, kind="stable")
            for token_id, logprob in entry.items():
                assert abs(logprob.logprob - row[token_id]) < 5e-4
            assert list(entry)[0] == token
            margin = row[order[0]] - row[order[1]]
            assert token == order[0] or margin < 1e-3  # greedy


@pytest.mark.parametrize("overlap", ("off", "stream", "device"))
def test_logprobs_of_the_whole_path_are_those_of_the_oracle(overlap, model_dir, oracle):
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=4)
    with LLM(model=str(model_dir), dtype="float32", skip_tokenizer_init=True, decode_overlap=overlap, **LIMITS) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
        assert llm.engine.compiles_after_warmup == 0
    check_against_oracle(outputs, oracle)


def test_converted_checkpoint_gives_the_same_tokens(model_dir, oracle, tmp_path):
    from qwen35_jax.checkpoint import convert

    convert(str(model_dir), str(tmp_path / "converted"))
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=4)
    with LLM(model=str(tmp_path / "converted"), dtype="float32", skip_tokenizer_init=True, **LIMITS) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params, use_tqdm=False)
    check_against_oracle(outputs, oracle)


def run_cli(tmp_path, checkpoint, lines, name, *flags):
    """`qwen35-generate` in a process of its own; returns the exit code, stderr and the answers by custom_id."""
    import subprocess
    import sys

    source, target = tmp_path / f"{name}.in.jsonl", tmp_path / f"{name}.out.jsonl"
    source.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "qwen35_jax.cli.generate", f"--model={checkpoint}", f"--input={source}"]
    command += [f"--output={target}", "--max_model_len=256", "--max_num_seqs=4", "--max_num_batched_tokens=64"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=500)
    answers = {}
    if target.exists():
        for line in target.read_text(encoding="utf-8").split("\n")[:-1]:
            record = json.loads(line)
            assert record["custom_id"] not in answers
            answers[record["custom_id"]] = record
    return done.returncode, done.stderr, answers


def test_a_job_over_the_demo_checkpoint(demo_checkpoint, tmp_path):
    greedy = {"temperature": 0, "max_tokens": 12}
    lines = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": [{"role": "user", "content": "Wie heißt die Hauptstadt?"}], **greedy}},
        {"custom_id": "completion", "method": "POST", "url": "/v1/completions",
         "body": {"prompt": "नमस्ते दुनिया", "temperature": 0.9, "seed": 3, "max_tokens": 12}},
        {"custom_id": "ids", "prompt_token_ids": [5, 6, 7], **greedy, "logprobs": 2},
        {"custom_id": "bad", "prompt": "x", "temperature": -1},
        {"custom_id": "sampled", "prompt": "Once upon a time", "max_tokens": 20, "top_p": 0.9},
        {"custom_id": "too long", "prompt": "word " * 400, **greedy},
    ]  # fmt: skip
    code, stderr, answers = run_cli(tmp_path, demo_checkpoint, lines, "first")
    assert code == 0, stderr
    assert answers.keys() == {line["custom_id"] for line in lines}
    failed = {name for name, record in answers.items() if record["error"] is not None}
    assert failed == {"bad", "too long"}
    assert "temperature" in json.dumps(answers["bad"]["error"])
    # The same rows in another order and company: the same answers.
    code, stderr, again = run_cli(tmp_path, demo_checkpoint, lines[::-1][:-1], "second")
    assert code == 0, stderr

    def text(record):
        choice = record["response"]["body"]["choices"][0]
        return choice.get("text") or choice["message"]["content"]

    for name in ("completion", "ids", "sampled"):
        assert text(again[name]) == text(answers[name]), name
