"""Key-value recall: a list of pairs, perhaps in or before running text, and questions about some of them."""

import numpy as np

from scripts.demo_model import corpus
from scripts.demo_model.corpus import pick_language
from scripts.demo_model.lexicon import ADJECTIVES, Language, between, chance, log_between, pick, sample

MAX_PAIRS = 200
SHORTEST = 48
LONG_FROM = 1024
# How a pair is written, and what stands between two of them; None: the language's own sentence.
STYLES = (
    ("{k}: {v}", "\n"),
    ("{k} = {v}", "\n"),
    ("{k}: {v}", ", "),
    ("| {k} | {v} |", "\n"),
    ("{k} -> {v}", "\n"),
    (None, ""),
)
# Tokens, about; as the tokenizer of examples/demo-model has it, rounded up.
TOKENS_OF_PAIR = 7
TOKENS_OF_SENTENCE_PAIR = 12
TOKENS_AROUND = 40
CHARACTERS_PER_TOKEN = {"en": 4.1, "hi": 3.3, "zh": 0.8}
OTHER_CHARACTERS_PER_TOKEN = 2.5
ROOM = 0.9

Parts = tuple[str, str, tuple[str, ...], str, str, str]
"""Kind, language, turns, reasoning, answer and key of an example."""


def recall(rng: np.random.Generator, max_tokens: int) -> Parts:
    """An example of up to ``max_tokens`` tokens, short ones as often as long ones."""
    high = min(max_tokens * ROOM, LONG_FROM)
    return _recall(rng, pick_language(rng, english=0.7), log_between(rng, min(SHORTEST, high), high))


def recall_long(rng: np.random.Generator, max_tokens: int) -> Parts:
    """An example of 1k tokens to ``max_tokens``."""
    return _recall(rng, pick_language(rng, english=0.9), between(rng, LONG_FROM, int(max_tokens * ROOM)))


def _recall(rng: np.random.Generator, language: Language, tokens: int) -> Parts:
    style, gap = pick(rng, STYLES)
    each = TOKENS_OF_SENTENCE_PAIR if style is None else TOKENS_OF_PAIR
    nouns = language.nouns()
    fit = int((tokens - TOKENS_AROUND) / each)
    count = log_between(rng, 2, max(2, min(MAX_PAIRS, len(nouns), fit)))
    keys = sample(rng, nouns, count)
    if language.code != "en" or chance(rng, 0.5):
        values = [str(value) for value in rng.integers(10, 1000, count).tolist()]
    else:
        values = [pick(rng, ADJECTIVES) for _ in keys]
    template = pick(rng, language.wording["pair"]) if style is None else style
    pairs = [template.format(k=key, v=value) for key, value in zip(keys, values, strict=True)]

    rate = CHARACTERS_PER_TOKEN.get(language.code, OTHER_CHARACTERS_PER_TOKEN)
    room = (tokens - TOKENS_AROUND - count * each) * rate
    text = _layout(rng, language, pairs, None if style is None else gap, room)

    chosen = rng.permutation(count)[: between(rng, 2, 8)].tolist()
    wording = language.wording
    form = pick(rng, ("one", "many", "turns"))
    if form == "many":
        asked = [keys[i] for i in chosen]
        listed = language.comma.join(asked)
        turns = (f"{text}\n\n{pick(rng, wording['many']).format(k=listed)}",)
        reasoning = pick(rng, wording["needed"]).format(f=listed)
        answer = "\n".join(f"{keys[i]}: {values[i]}" for i in chosen)
    else:
        chosen = chosen[: 6 if form == "turns" else 1]
        dialogue = []
        for i in chosen:
            dialogue += [pick(rng, wording["ask"]).format(k=keys[i]), values[i]]
        dialogue[0] = f"{text}\n\n{dialogue[0]}"
        turns, answer = tuple(dialogue[:-1]), dialogue[-1]
        reasoning = pick(rng, wording["quote"]).format(s=pairs[chosen[-1]])
    key = "|".join(f"{keys[i]}={values[i]}" for i in chosen)
    return form, language.code, turns, reasoning, answer, key


def _layout(rng: np.random.Generator, language: Language, pairs: list[str], gap: str | None, room: float) -> str:
    """The pairs and running text of about ``room`` characters: sentences among it, lists before or after it."""
    sentences = corpus.filler(rng, language, int(room)) if room > 60 and (room > 2000 or chance(rng, 0.5)) else []
    if gap is None:
        places = sorted(rng.integers(0, len(sentences) + 1, len(pairs)).tolist(), reverse=True)
        for place, pair in zip(places, reversed(pairs), strict=True):
            sentences.insert(place, pair)
        return language.space.join(sentences)
    block = f"{pick(rng, language.wording['list'])}\n{gap.join(pairs)}"
    if not sentences:
        return block
    cut = int(rng.integers(0, len(sentences) + 1)) if chance(rng, 0.3) else 0  # text after the list: distance
    before, after = language.space.join(sentences[:cut]), language.space.join(sentences[cut:])
    return "\n\n".join(part for part in (before, block, after) if part)
