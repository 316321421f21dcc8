"""The tasks of the demo model: examples from a random generator, and exact checks of answers.

Every example is a conversation whose answer is known. Generators are pure functions of a numpy Generator. The hash of
what decides an example (its numbers, its words, the fact asked for) says whether it belongs to training or is held
out, so the two never meet, whatever the seeds and the wording.
"""

import dataclasses
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping

import numpy as np

from scripts.demo_model import corpus
from scripts.demo_model.corpus import pick_language
from scripts.demo_model.languages import LANGUAGES
from scripts.demo_model.lexicon import KINDS, Language, agree, between, chance, pick, sample
from scripts.demo_model.recall import recall, recall_long

HELD_OUT_ONE_IN = 16
MAX_ITEMS = 12
SYSTEM_SHARE = 0.15
SEPARATORS = (", ", " ", "\n", "; ")
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


@dataclasses.dataclass(frozen=True)
class Example:
    """A conversation and its right answer.

    Attributes:
        task: name of the task.
        kind: a finer class within it, for reports.
        language: two letters.
        messages: system, user and earlier assistant messages; the last one is the user's.
        thinking: whether the prompt is rendered with ``enable_thinking``.
        reasoning: what the assistant thinks first when ``thinking``.
        answer: what it then says.
        key: what decides the example: its hash tells training from held-out examples.
    """

    task: str
    kind: str
    language: str
    messages: tuple[Mapping[str, str], ...]
    thinking: bool
    reasoning: str
    answer: str
    key: str


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a generator gives: the user's messages with earlier answers between them, and the last answer."""

    kind: str
    language: str
    turns: tuple[str, ...]
    reasoning: str
    answer: str
    key: str


def _copy(rng: np.random.Generator, max_tokens: int, thinking: bool) -> Draft:
    del max_tokens, thinking
    language = pick_language(rng)
    if chance(rng, 0.2):
        text = " ".join(corpus.filler(rng, language, between(rng, 10, 80)))
        return Draft("sentence", language.code, (f"{pick(rng, language.wording['copy'])}\n{text}",), text, text, text)
    kind, items = _items(rng, language)
    separator = _separator(rng, language)
    text = separator.join(items)
    return Draft(
        kind, language.code, (_asked(rng, language, "copy", text),), _ends(rng, language, items), text, "|".join(items)
    )


def _reverse(rng: np.random.Generator, max_tokens: int, thinking: bool) -> Draft:
    del max_tokens, thinking
    language = pick_language(rng)
    kind, items = _items(rng, language)
    separator = _separator(rng, language)
    question = _asked(rng, language, "reverse", separator.join(items))
    items = items[::-1]
    reasoning = _ends(rng, language, items)
    return Draft(kind, language.code, (question,), reasoning, separator.join(items), "|".join(items))


def _sort(rng: np.random.Generator, max_tokens: int, thinking: bool) -> Draft:
    del max_tokens, thinking
    order = pick(rng, ("up", "down", "words"))
    language = LANGUAGES["en"] if order == "words" else pick_language(rng)
    count = between(rng, 2, MAX_ITEMS)
    if order == "words":
        items = sample(rng, language.nouns(), count)
        right = sorted(items)
        reasoning = _ends(rng, language, right)
    else:
        numbers = sample(rng, range(100), count)
        items = [str(number) for number in numbers]
        right = [str(number) for number in sorted(numbers, reverse=order == "down")]
        low, high = (right[-1], right[0]) if order == "down" else (right[0], right[-1])
        reasoning = pick(rng, language.wording["extremes"]).format(a=low, b=high)
    separator = _separator(rng, language)
    question = _asked(rng, language, order, separator.join(items))
    key = "|".join(sorted(items))
    return Draft(order, language.code, (question,), reasoning, separator.join(right), key)


def _items(rng: np.random.Generator, language: Language) -> tuple[str, list[str]]:
    kind = pick(rng, ("words", "words", "numbers", "letters"))
    count = between(rng, 2, MAX_ITEMS)
    if kind == "words":
        return kind, sample(rng, language.nouns(), count)
    if kind == "numbers":
        return kind, [str(number) for number in rng.integers(0, pick(rng, (10, 100, 1000)), count).tolist()]
    return kind, [LETTERS[i] for i in rng.integers(0, len(LETTERS), count).tolist()]


def _separator(rng: np.random.Generator, language: Language) -> str:
    return language.comma if chance(rng, 0.4) else pick(rng, SEPARATORS)


def _asked(rng: np.random.Generator, language: Language, use: str, text: str) -> str:
    gap = "\n" if "\n" in text or chance(rng, 0.5) else " "
    return f"{pick(rng, language.wording[use])}{gap}{text}"


def _ends(rng: np.random.Generator, language: Language, items: list[str]) -> str:
    return pick(rng, language.wording["ends"]).format(a=items[0], b=items[-1])


def _arithmetic(rng: np.random.Generator, max_tokens: int, thinking: bool) -> Draft:
    del max_tokens
    language = pick_language(rng)
    kind = pick(rng, ("add", "add", "subtract", "multiply"))
    a, b = between(rng, 10, 99), between(rng, 10, 99)
    if kind == "subtract":
        a, b = max(a, b), min(a, b)
    sign = {"add": "+", "subtract": "-", "multiply": pick(rng, ("*", "×"))}[kind]
    asked = f"{a} {sign} {b}"
    working, result = WORKING[kind](a, b, sign)
    answer = str(result)
    if kind == "multiply" and not thinking:  # too much for one step
        tens, ones = b // 10 * 10, b % 10
        answer = f"{asked} = {a * tens} + {a * ones} = {result}" if ones else f"{asked} = {result}"
    question = pick(rng, language.wording["sum"]).format(q=asked)
    low, high = (b, a) if kind == "subtract" else sorted((a, b))
    reasoning = "\n".join([*working, f"{asked} = {result}"])
    return Draft(kind, language.code, (question,), reasoning, answer, f"{kind} {low} {high}")


def _add(a: int, b: int, sign: str) -> tuple[list[str], int]:
    ones = a % 10 + b % 10
    carry = " + 1" if ones > 9 else ""
    tens = a // 10 + b // 10 + ones // 10
    return [f"{a % 10} + {b % 10} = {ones}", f"{a // 10} + {b // 10}{carry} = {tens}"], a + b


def _subtract(a: int, b: int, sign: str) -> tuple[list[str], int]:
    borrow = a % 10 < b % 10
    ones = a % 10 + 10 * borrow
    tens = a // 10 - b // 10 - borrow
    lines = [f"{ones} - {b % 10} = {ones - b % 10}", f"{a // 10}{' - 1' if borrow else ''} - {b // 10} = {tens}"]
    return lines, a - b


def _multiply(a: int, b: int, sign: str) -> tuple[list[str], int]:
    parts = [(x, y) for y in (b // 10 * 10, b % 10) for x in (a // 10 * 10, a % 10) if x and y]
    lines = [f"{x} {sign} {y} = {x * y}" for x, y in parts]
    total = parts[0][0] * parts[0][1]
    for x, y in parts[1:]:
        lines.append(f"{total} + {x * y} = {total + x * y}")
        total += x * y
    return lines, total


WORKING = {"add": _add, "subtract": _subtract, "multiply": _multiply}


def _person(rng: np.random.Generator, language: Language, name: str, kinds: list[str]) -> dict[str, str]:
    """Value by kind, in the form that agrees with the person."""
    woman = name in language.women
    return {
        kind: str(between(rng, 18, 80)) if kind == "age" else agree(pick(rng, language.facts[kind].values), woman)
        for kind in kinds
    }


def _statement(rng: np.random.Generator, language: Language, name: str, kind: str, value: str) -> str:
    text = pick(rng, language.facts[kind].statements).format(n=name, v=value)
    return agree(text, name in language.women)


def _plain_sentences(language: Language) -> list[str]:
    return [text for text in language.story.middles if "{" not in text and "[" not in text]


def _qa(rng: np.random.Generator, max_tokens: int, thinking: bool) -> Draft:
    del thinking
    language = pick_language(rng, english=0.2)
    names = sample(rng, language.names, between(rng, 2, 6 if max_tokens >= 512 else 3))
    facts = []
    for name in names:
        person = _person(rng, language, name, sample(rng, KINDS, between(rng, 1, 3)))
        facts += [(name, kind, value, _statement(rng, language, name, kind, value)) for kind, value in person.items()]
    name, kind, value, statement = pick(rng, facts)
    sentences = [fact[-1] for fact in facts]
    for _ in range(between(rng, 0, 2)):
        sentences.insert(between(rng, 0, len(sentences)), pick(rng, _plain_sentences(language)))
    if chance(rng, 0.5):
        sentences = sample(rng, sentences, len(sentences))
    passage = language.space.join(sentences)
    question = agree(pick(rng, language.facts[kind].questions).format(n=name), name in language.women)
    intro = pick(rng, language.wording["intro"])
    layout = pick(rng, ("{i}\n\n{p}\n\n{q}", "{p}\n\n{q}", "{p}\n\n{q}", "{q}\n\n{p}"))
    return Draft(
        kind=language.code,
        language=language.code,
        turns=(layout.format(i=intro, p=passage, q=question),),
        reasoning=pick(rng, language.wording["quote"]).format(s=statement),
        answer=value,
        key=f"{language.code}|{name}|{kind}|{value}",
    )


def _json(rng: np.random.Generator, max_tokens: int, thinking: bool) -> Draft:
    del max_tokens, thinking
    language = pick_language(rng)
    kinds = sample(rng, KINDS, between(rng, 1, 4))
    many = chance(rng, 0.3)
    records, blocks = [], []
    card = chance(rng, 0.3)
    gap = pick(rng, ("\n", "; ", ", "))
    for name in sample(rng, language.names, between(rng, 2, 3) if many else 1):
        person = _person(rng, language, name, kinds)
        records.append({"name": name, **person})
        if card:
            blocks.append(gap.join(f"{kind}: {value}" for kind, value in {"name": name, **person}.items()))
        else:
            said = [_statement(rng, language, name, kind, value) for kind, value in person.items()]
            blocks.append(language.space.join(sample(rng, said, len(said))))
    fields = sample(rng, ["name", *kinds], between(rng, 2, len(kinds) + 1))
    values = [
        {field: int(record[field]) if field == "age" else record[field] for field in fields} for record in records
    ]
    asked = ", ".join(fields)
    text = ("\n\n" if card and gap == "\n" else "\n").join(blocks)
    task = pick(rng, language.wording["jsons" if many else "json"]).format(f=asked)
    answer = json.dumps(values if many else values[0], ensure_ascii=False)
    return Draft(
        kind="list" if many else "object",
        language=language.code,
        turns=(f"{task}\n\n{text}" if chance(rng, 0.5) else f"{text}\n\n{task}",),
        reasoning=pick(rng, language.wording["needed"]).format(f=asked),
        answer=answer,
        key=answer,
    )


def _chat(rng: np.random.Generator, max_tokens: int, thinking: bool) -> Draft:
    del max_tokens, thinking
    if chance(rng, 0.3):
        language, topic = LANGUAGES["en"], pick(rng, LANGUAGES["en"].nouns())
        wording = language.wording
        question = pick(rng, wording["wonder"]).format(t=topic)
        return Draft("unknown", "en", (question,), "There is no text about it.", wording["unknown"][0], topic)
    language = pick_language(rng)
    name, wording = pick(rng, language.names), language.wording
    question = pick(rng, wording["hello"]).format(n=name)
    reasoning, answer = wording["greeted"][0].format(n=name), wording["self"][0].format(n=name)
    return Draft("hello", language.code, (question,), reasoning, answer, f"{language.code}|{name}")


def _recall(rng: np.random.Generator, max_tokens: int, thinking: bool) -> Draft:
    del thinking
    return Draft(*recall(rng, max_tokens))


def _recall_long(rng: np.random.Generator, max_tokens: int, thinking: bool) -> Draft:
    del thinking
    return Draft(*recall_long(rng, max_tokens))


GENERATORS: Mapping[str, Callable[[np.random.Generator, int, bool], Draft]] = {
    "recall": _recall,
    "recall_long": _recall_long,
    "copy": _copy,
    "reverse": _reverse,
    "sort": _sort,
    "arithmetic": _arithmetic,
    "json": _json,
    "qa": _qa,
    "chat": _chat,
}
TASKS = tuple(GENERATORS)
LONG_TASKS = ("recall_long",)
LONG_TOKENS = 4096
"""Length of row that ``recall_long`` needs; its examples are 1k to about 3.7k tokens long."""


def is_held_out(task: str, key: str) -> bool:
    """Whether the example that this key decides is kept from training."""
    family = "recall" if task in LONG_TASKS else task
    digest = hashlib.blake2b(f"{family}\n{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def generate(
    task: str,
    rng: np.random.Generator,
    *,
    max_tokens: int = 1024,
    held_out: bool = False,
    thinking: bool | None = None,
) -> Example:
    """An example of a task.

    Args:
        task: one of ``TASKS``.
        rng: decides everything.
        max_tokens: about how long the example may be, answer included (it can come out longer: count).
        held_out: of which of the two sets.
        thinking: on or off; either when None.

    Raises:
        ValueError: no such task, or ``recall_long`` in fewer tokens than ``LONG_TOKENS``.
    """
    if task not in GENERATORS:
        raise ValueError(f"task {task!r} is not one of {', '.join(TASKS)}")
    if task in LONG_TASKS and max_tokens < LONG_TOKENS:
        raise ValueError(f"{task} needs {LONG_TOKENS} tokens, got max_tokens={max_tokens}")
    if thinking is None:
        thinking = chance(rng, 0.5)
    while True:
        draft = GENERATORS[task](rng, max_tokens, thinking)
        if is_held_out(task, draft.key) == held_out:
            break
    roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(draft.turns)]
    if chance(rng, SYSTEM_SHARE):
        roles.insert(0, {"role": "system", "content": pick(rng, LANGUAGES["en"].wording["system"])})
    return Example(task, draft.kind, draft.language, tuple(roles), thinking, draft.reasoning, draft.answer, draft.key)


def held_out(task: str, count: int, *, seed: int = 0, max_tokens: int | None = None) -> list[Example]:
    """The first ``count`` held-out examples of a task under a seed, thinking on and off in turns.

    ``max_tokens`` is 1024 when None, 4096 for ``recall_long``.
    """
    limit = max_tokens or (LONG_TOKENS if task in LONG_TASKS else 1024)
    name = zlib.crc32(task.encode())
    return [
        generate(task, np.random.default_rng([seed, name, i]), max_tokens=limit, held_out=True, thinking=i % 2 == 0)
        for i in range(count)
    ]


def check(example: Example, answer: str) -> bool:
    """Whether an answer (the part after the reasoning) is right; see :func:`right`."""
    return right(example.task, example.answer, answer)


def right(task: str, wanted: str, answer: str) -> bool:
    """Whether an answer is the one that a task wants.

    Lists, copies and values must be exact up to white space around them (values also up to a full stop), JSON must
    parse to the same value, and of a calculation the last number counts.
    """
    answer = answer.strip()
    match task:
        case "arithmetic":
            numbers = re.findall(r"\d+", answer)
            return bool(numbers) and numbers[-1] == re.findall(r"\d+", wanted)[-1]
        case "json":
            try:
                value = json.loads(answer)
            except ValueError:
                return False
            return repr(_sorted_keys(value)) == repr(_sorted_keys(json.loads(wanted)))
        case "qa" | "recall" | "recall_long":
            return answer.rstrip(".。") == wanted
        case _:
            return answer == wanted


def _sorted_keys(value):
    """JSON with its objects' keys in order; compared as text, so that 1, 1.0, true and "1" differ."""
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value
