"""Running text for the demo model: small stories by a grammar, and the texts of the demo tokenizer.

All of it was written for this project and stands under its licence; nothing is fetched. Stories are put together from
the sentences of ``languages.py`` with one set of people and things each, so that names and places stay the same
throughout. The texts in ``scripts/demo/text`` (essays, letters, dialogues) add real prose in the same languages; they
are small, and a model that is trained on them knows them by heart.
"""

import functools
import pathlib

import numpy as np

from scripts.demo_model.languages import LANGUAGES
from scripts.demo_model.lexicon import Language, agree, between, chance, pick, sample

TEXTS = pathlib.Path(__file__).resolve().parent.parent / "demo" / "text"
TEXT_FILES = ("english", "german", "french", "spanish", "italian", "portuguese", "hindi", "chinese")
PROSE_SHARE = 0.1
ENGLISH_SHARE = 0.5


def pick_language(rng: np.random.Generator, english: float = ENGLISH_SHARE) -> Language:
    """English with this probability, else any of the languages."""
    return LANGUAGES["en"] if chance(rng, english) else pick(rng, tuple(LANGUAGES.values()))


class Scene:
    """People and things of one story; makes its sentences."""

    def __init__(self, rng: np.random.Generator, language: Language):
        self._rng = rng
        self.language = language
        hero, friend = sample(rng, language.names, 2)
        self._woman = hero in language.women
        facts = language.facts
        self._fixed = {"n": hero, "m": friend, "city": pick(rng, facts["city"].values)}
        self._fixed |= {kind: pick(rng, facts[kind].values) for kind in ("animal", "food", "item", "colour")}

    def sentence(self, templates: tuple[str, ...]) -> str:
        """One of the templates with this story's people and things."""
        text = agree(pick(self._rng, templates), self._woman)
        if "{" not in text:
            return text
        numbers = {"num": between(self._rng, 3, 20), "num2": between(self._rng, 1, 9), "hour": between(self._rng, 6, 9)}
        return text.format(**self._fixed, **numbers)


def story(rng: np.random.Generator, language: Language, sentences: int | None = None) -> str:
    """A story of so many sentences between its opening and its ending (a few when None)."""
    scene = Scene(rng, language)
    count = between(rng, 3, 12) if sentences is None else sentences
    parts = language.story
    middles = [scene.sentence((template,)) for template in _order(rng, parts.middles, count)]
    return language.space.join([scene.sentence(parts.openings), *middles, scene.sentence(parts.endings)])


def filler(rng: np.random.Generator, language: Language, characters: int) -> list[str]:
    """Sentences of stories, at least so many characters in all."""
    out, length = [], 0
    while length < characters:
        scene = Scene(rng, language)
        for template in _order(rng, language.story.middles, 6):
            out.append(scene.sentence((template,)))
            length += len(out[-1]) + 1
            if length >= characters:
                break
    return out


@functools.cache
def prose() -> tuple[str, ...]:
    """The paragraphs of the project's own texts in the languages of the model."""
    paths = [TEXTS / f"{name}.txt" for name in TEXT_FILES]
    return tuple(part.strip() for path in paths for part in path.read_text("utf-8").split("\n\n") if part.strip())


def document(rng: np.random.Generator) -> str:
    """A story, or a paragraph of prose."""
    if chance(rng, PROSE_SHARE):
        return pick(rng, prose())
    return story(rng, pick_language(rng))


def _order(rng: np.random.Generator, templates: tuple[str, ...], count: int) -> list[str]:
    """So many templates, repeated only when there are not enough."""
    out: list[str] = []
    while len(out) < count:
        out += sample(rng, templates, count - len(out))
    return out
