"""The words of the demo model's tasks: English lists, and what every language brings (data in ``languages.py``).

Sizes are moderate on purpose: a model of five million parameters has to learn every word by heart. All of it was
written for this project and stands under its licence.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

# Keys of recall and items of lists.
NOUNS = tuple(
    """anchor apple arrow autumn baker ball banana basket beach bean bear bell bench berry bird blanket boat book
    boot bottle bowl branch bread bridge broom brush bucket butter button cabin cake camel camera candle canoe carpet
    carrot castle chair chalk cheese cherry chest circle clock cloud coat coin comb copper corn cotton crown cup
    curtain desk diamond doll donkey door dragon drum duck eagle egg engine envelope falcon farm feather fence field
    finger fire fish flag flower flute forest fork fountain fox frog garden gate ghost giraffe glass glove goat gold
    goose grape grass guitar hammer harbour hat hill honey horse house ink iron island jacket jar jewel juice jungle
    kettle key king kite knife ladder lake lamp leaf lemon letter library lion lock map market mask meadow melon milk
    mirror monkey moon mountain mouse mushroom nail needle nest night nut oak ocean olive onion orange owl oven page
    paint palace paper parrot peach pearl pencil pepper piano picture pillow pipe plate plum pocket pond potato
    pumpkin queen rabbit radio rain ring river road rocket roof room rope rose sail salt sand scarf school shell ship
    shoe silver snow soap soup spider spoon star stone storm stove street sugar summer sun table tail tea tent tiger
    tower toy train tree truck tunnel turtle umbrella valley vase violin wagon wall watch water wave wheel whistle
    window wing winter wolf wood yarn zebra""".split()
)

# Values of recall that are not numbers.
ADJECTIVES = tuple(
    """amber black blue brave bright brown calm clean clever cold dark deep dry empty fast fresh full funny gentle
    golden green grey happy heavy huge kind large light long loud new noisy old pale pink plain proud purple quick
    quiet red rich round rough sharp short shy slow small smooth soft strong sweet tall thin warm white wide wild
    wise yellow young""".split()
)

KINDS = ("city", "colour", "food", "animal", "job", "age", "item")
"""What a passage can say of a person; also the keys of extracted JSON, beside ``name``."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """One kind of statement about a person.

    Attributes:
        statements: sentences with ``{n}`` (the name) and ``{v}`` (the value); ``[a|b]`` is "a" of a man, "b" of a
            woman.
        questions: questions with ``{n}`` that the value answers.
        values: what ``{v}`` can be; empty for ages, which are numbers.
    """

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    values: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Story:
    """Sentences of small stories: ``{n}`` and ``{m}`` are people, ``{city}``, ``{animal}`` ... values of facts.

    ``[a|b]`` agrees with ``{n}``.
    """

    openings: tuple[str, ...]
    middles: tuple[str, ...]
    endings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Language:
    """What a language brings to the tasks.

    Attributes:
        code: its two letters.
        men: first names, with which sentences take their first form.
        women: first names, with which sentences take their second form.
        facts: by kind.
        wording: instructions, questions and remarks of the tasks, several of each, by use.
        story: its stories.
        comma: what separates the items of a list in a sentence.
        space: what separates sentences.
    """

    code: str
    men: tuple[str, ...]
    women: tuple[str, ...]
    facts: Mapping[str, Fact]
    wording: Mapping[str, tuple[str, ...]]
    story: Story
    comma: str = ", "
    space: str = " "

    @property
    def names(self) -> tuple[str, ...]:
        """All first names."""
        return self.men + self.women

    def nouns(self) -> tuple[str, ...]:
        """Single words for lists: English has a list of its own, the others take cities, foods and colours."""
        if self.code == "en":
            return NOUNS
        words = (*self.facts["city"].values, *self.facts["food"].values, *self.facts["colour"].values)
        return tuple(dict.fromkeys(word for word in words if " " not in word and "'" not in word))


def word_list(text: str) -> tuple[str, ...]:
    """The parts between commas, white space evened out."""
    return tuple(part.strip() for part in " ".join(text.split()).split(","))


_GENDERED = re.compile(r"\[([^|\]]*)\|([^\]]*)\]")


def agree(text: str, woman: bool) -> str:
    """Chooses the form of every ``[a|b]``."""
    return _GENDERED.sub(r"\2" if woman else r"\1", text) if "[" in text else text


def pick(rng: np.random.Generator, options: Sequence):
    """One of the options."""
    return options[int(rng.integers(len(options)))]


def sample(rng: np.random.Generator, options: Sequence, count: int) -> list:
    """So many different ones of the options, in random order."""
    return [options[i] for i in rng.permutation(len(options))[:count].tolist()]


def chance(rng: np.random.Generator, probability: float) -> bool:
    """True with this probability."""
    return bool(rng.random() < probability)


def between(rng: np.random.Generator, low: int, high: int) -> int:
    """An integer of low .. high, both included."""
    return int(rng.integers(low, high + 1))


def log_between(rng: np.random.Generator, low: float, high: float) -> int:
    """An integer of low .. high whose logarithm is uniform: small ones as often as large ones."""
    return int(round(float(np.exp(rng.uniform(np.log(low), np.log(max(low, high)))))))
