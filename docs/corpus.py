"""Write the corpus that `atlas` and `discover` read by default: varied, made up, and the same on every run.

Prose, lists, letters, dialogue, recipes, tables and code come from hand-written sentences with slots; the prompts
of our tasks are mixed in. Slots are filled from one seeded generator, names are kept within a passage, and things
named early come back later, so that a head has something to look back for. ``python docs/corpus.py`` writes
``src/qkscope/data/corpus.txt``.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from qkscope import tasks

PEOPLE = [
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Elena",
    "Felix",
    "Greta",
    "Hugo",
    "Irene",
    "Jonas",
    "Karla",
    "Leon",
    "Maria",
    "Nadia",
    "Oscar",
    "Paula",
    "Quentin",
    "Rosa",
    "Simon",
    "Tessa",
    "Ulrich",
    "Vera",
    "Walter",
    "Yusuf",
    "Zoe",
    "Amir",
    "Bella",
    "Carlos",
    "Dora",
    "Emil",
]
PLACES = (
    "the harbour",
    "the old mill",
    "the library",
    "the market",
    "the river bank",
    "the station",
    "the north tower",
    "the garden",
    "the school",
    "the bakery",
    "the museum",
    "the valley",
    "the workshop",
    "the lighthouse",
    "the bridge",
    "the orchard",
)
THINGS = (
    "lamp",
    "map",
    "violin",
    "basket",
    "clock",
    "letter",
    "kettle",
    "bicycle",
    "ladder",
    "blanket",
    "camera",
    "notebook",
    "umbrella",
    "hammer",
    "mirror",
    "key",
    "painting",
    "telescope",
    "wallet",
    "rope",
)
ANIMALS = ["dog", "cat", "horse", "owl", "fox", "heron", "goat", "rabbit", "swan", "badger", "crow", "otter"]
FOODS = (
    "bread",
    "soup",
    "cheese",
    "apples",
    "rice",
    "honey",
    "beans",
    "butter",
    "onions",
    "pears",
    "salt",
    "eggs",
    "carrots",
    "olives",
    "noodles",
    "plums",
)
COLOURS = ["red", "green", "blue", "yellow", "grey", "brown", "white", "black", "orange", "violet"]
TOWNS = (
    "Harwick",
    "Lindau",
    "Port Ellis",
    "Marrow",
    "Ostheim",
    "Vell",
    "Carrow",
    "Tannberg",
    "Sandwick",
    "Aldery",
    "Brunnen",
    "Kestrel Bay",
)
JOBS = (
    "baker",
    "teacher",
    "sailor",
    "carpenter",
    "nurse",
    "painter",
    "farmer",
    "clerk",
    "doctor",
    "printer",
    "engineer",
    "gardener",
)
FEELINGS = ["glad", "tired", "curious", "worried", "calm", "proud", "angry", "surprised", "hungry", "lonely"]
VERBS = (
    ("found", "find"),
    ("sold", "sell"),
    ("lost", "lose"),
    ("repaired", "repair"),
    ("borrowed", "borrow"),
    ("carried", "carry"),
    ("painted", "paint"),
    ("hid", "hide"),
)
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
SUBJECTS = ("rivers", "glass", "bees", "maps", "bridges", "paper", "tides", "clocks", "salt", "wool", "rust", "ink")
FACTS = {
    "rivers": (
        "Water wears stone slowly, a grain at a time, until a bend becomes an island.",
        "A river that floods its meadows leaves mud behind, and the mud feeds next year's grass.",
        "Where two rivers meet, the colder one slides under the warmer one for a while before they mix.",
    ),
    "glass": (
        "Glass is sand that forgot how to be a crystal.",
        "Old panes are uneven because they were spun.",
        "A scratch weakens glass far more than a thin spot does, which is why a cutter only scores it.",
    ),
    "bees": (
        "A hive warms itself by shivering.",
        "The same bee cleans first, then nurses, then builds, then flies.",
        "When a scout returns, the angle of her dance tells the others where to go.",
    ),
    "maps": (
        "A map that showed everything would be as large as the country.",
        "Coasts grow longer the closer one measures them.",
        "Early sailors drew the winds before they drew the shore.",
    ),
    "bridges": (
        "An arch pushes outward as hard as it holds up.",
        "A long bridge breathes: it is longer in August.",
        "Soldiers break step on a bridge so that it does not learn their rhythm.",
    ),
    "paper": (
        "Paper remembers a fold because some of its fibres break.",
        "Rag paper outlives wood paper by centuries.",
        "The grain of a sheet decides which way it curls when it is wet.",
    ),
    "tides": (
        "The sea rises twice a day because the earth turns under two heaps of water.",
        "In a narrow bay the tide can climb higher than a house.",
        "Tides slow the turning of the earth by a hair.",
    ),
    "clocks": (
        "A pendulum keeps time because its swing hardly depends on how far it swings.",
        "Cold makes the rod shorter and the clock hurry.",
        "Two clocks on one beam will come to agree.",
    ),
    "salt": (
        "Salt was once worth walking across a desert for.",
        "It draws water out of meat, and life out of snails.",
        "A salt lake leaves a white ring for every dry year.",
    ),
    "wool": (
        "Wool keeps warm even when it is wet.",
        "The scales of its fibres catch on each other, which makes felt.",
        "Sheep on poor ground grow finer wool.",
    ),
    "rust": (
        "Iron rusts from the edges, where air and water both reach.",
        "Paint only keeps the rust waiting.",
        "A little zinc gives itself up so that the iron can stay whole.",
    ),
    "ink": (
        "Ink from oak galls goes on pale and turns black in the air.",
        "Lampblack never fades, but it can be washed off.",
        "A good ink bites the paper without eating it.",
    ),
}
CODE_NAMES = (
    "total",
    "count",
    "items",
    "result",
    "index",
    "value",
    "buffer",
    "limit",
    "offset",
    "rows",
    "names",
    "scores",
    "path",
    "cache",
)


class Writer:
    """Draws words for one passage; people and things come back."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.a, self.b, self.c = rng.sample(PEOPLE, 3)
        self.thing, self.other, self.third = rng.sample(THINGS, 3)
        self.place, self.there = rng.sample(PLACES, 2)
        self.town, self.far = rng.sample(TOWNS, 2)
        self.past, self.verb = rng.choice(VERBS)
        self.colour, self.shade = rng.sample(COLOURS, 2)
        self.animal, self.beast = rng.sample(ANIMALS, 2)
        self.food = rng.sample(FOODS, 5)
        self.job, self.work = rng.sample(JOBS, 2)
        self.month, self.later = rng.sample(MONTHS, 2)
        self.feeling, self.mood = rng.sample(FEELINGS, 2)
        self.n, self.m = rng.randint(2, 19), rng.randint(20, 400)
        self.year = rng.randint(1790, 1990)
        self.subject = rng.choice(SUBJECTS)

    def fill(self, sentence: str) -> str:
        """A sentence with its slots filled."""
        words = {k: v for k, v in vars(self).items() if isinstance(v, str | int)}
        words |= {f"food{i}": food for i, food in enumerate(self.food)}
        return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", sentence.format(**words))

    def some(self, sentences: tuple[str, ...], low: int, high: int) -> list[str]:
        """A few different sentences, filled, in their order."""
        chosen = sorted(self.rng.sample(range(len(sentences)), self.rng.randint(low, min(high, len(sentences)))))
        return [self.fill(sentences[i]) for i in chosen]


STORY = (
    "{a} came to {town} in {month} with nothing but a {colour} {thing}.",
    "The {job} at {place} gave {a} a bed and asked no questions.",
    "Every morning {a} walked from {place} to {there}, where {b} was already waiting.",
    "{b} had {past} a {other} near {there} and would not say how.",
    '"You could {verb} it again," said {a}, "if you remembered where you were standing."',
    "On the way back they met {c}, who kept a {animal} that was afraid of the {beast} next door.",
    "{c} looked at the {thing} for a long time and then at the {other}.",
    "Nobody in {town} had seen such a {thing} since {year}.",
    "By evening {b} was {feeling}, {c} was {mood}, and {a} had hidden the {thing} under the stairs.",
    "When the {job} asked about the {other}, {b} pointed to {place} and said nothing.",
    "It rained for {n} days, and the road to {far} was closed.",
    "In the end it was the {animal} that found the {third}, behind {there}.",
    "{a} wrote to {b} once, from {far}, and asked about the {animal} and the {other}.",
    "The {thing} still stands in {place}, and the {colour} paint has turned {shade}.",
)
LETTER = (
    "Dear {a},",
    "Thank you for the {thing}; it arrived in {month}, {n} days late and slightly bent.",
    "I have put it next to the {other} that {b} left here, and the two look well together.",
    "You asked whether {c} still works as a {job}. No: since {later} {c} has been a {work} in {far}.",
    "The house near {place} is sold, and {b} has moved closer to {there}.",
    "Please bring the {other} when you come, and do not forget the {third}, which {c} has been asking for.",
    "The {animal} is well, although the {beast} has not been seen since {month}.",
    "If the road from {town} to {far} is open, I shall come in {later}.",
    "Yours, {b}",
)
TALK = (
    "{a}: Where did you leave the {thing}?",
    "{b}: The {thing}? I left it in {place}, next to the {other}.",
    "{a}: I looked in {place} and found only the {other}.",
    "{b}: Then {c} must have taken the {thing}.",
    "{c}: I took the {third}, not the {thing}.",
    "{a}: Who was in {place} before you, {c}?",
    "{c}: Only {b}, and {b} was {feeling}.",
    "{b}: I was not {feeling}, I was {mood}.",
    "{a}: Fine. Let us look in {there} and then in {place} again.",
    "{c}: I will ask the {job}.",
)
REPORT = (
    "Report for {town}, {month} {year}.",
    "The {job} counted {m} visitors at {place}, {n} more than in {later}.",
    "Of these, {n} came from {far} and the rest from {town}.",
    "Repairs at {there} took {n} days and used {m} bricks.",
    "The {thing} in {place} was cleaned; the {other} was not.",
    "Complaints concerned the {animal} at {there}.",
    "{a} and {b} signed for the {third}; {c} did not sign.",
    "The next report will be written by {c} in {later}.",
)
RECIPE = (
    "{a}'s soup for {n} people",
    "You need {food0}, {food1}, {food2}, {food3} and a little {food4}.",
    "Wash the {food0} and cut the {food1} into small pieces.",
    "Warm the {food2} slowly; it must not turn brown.",
    "Add the {food1} first, then the {food0}, and stir until the {food1} is soft.",
    "Keep the {food3} for the end.",
    "Taste before you add the {food4}: the {food2} may be salty enough.",
    "Serve with {food3}. What is left of the {food0} keeps for {n} days.",
)
NOTICE = (
    "Lost near {place}: a {colour} {thing} with a {shade} handle.",
    "Found at {there}: one {other}, slightly wet.",
    "For sale: a {colour} {other}, a {shade} {third}, and {n} jars of {food0}. Ask for {a}.",
    "{b} teaches the violin on Mondays and the {thing} on Thursdays.",
    "Whoever borrowed the {third} from {place} is asked to bring the {third} back to {place}.",
    "The {job} of {town} seeks a {work} from {month} to {later}.",
    "The {animal} of {c} has run away again; the {animal} answers to the name of {b}.",
)


def story(w: Writer) -> str:
    """A short tale whose people and things come back."""
    return " ".join(w.some(STORY, 5, 8))


def letter(w: Writer) -> str:
    """A letter."""
    return "\n".join([w.fill(LETTER[0]), " ".join(w.some(LETTER[1:-1], 4, 7)), w.fill(LETTER[-1])])


def talk(w: Writer) -> str:
    """A dialogue: names stand at the start of lines and inside them."""
    return "\n".join(w.some(TALK, 6, 10))


def report(w: Writer) -> str:
    """A dry report."""
    return " ".join(w.some(REPORT, 5, 8))


def recipe(w: Writer) -> str:
    """A recipe: ingredients are named, then used."""
    return "\n".join(w.some(RECIPE, 6, 8))


def notice(w: Writer) -> str:
    """A board of notices."""
    return "\n".join(w.some(NOTICE, 3, 6))


def essay(w: Writer) -> str:
    """A few facts on one subject, with a person who thinks about it."""
    first = f"{w.a} has written about {w.subject} since {w.year}."
    facts = list(FACTS[w.subject])
    w.rng.shuffle(facts)
    last = w.rng.choice(
        (
            f"That, says {w.a}, is all one needs to know about {w.subject}.",
            f"{w.b} disagrees with {w.a} about {w.subject}, but not about much else.",
            f"In {w.town} people still ask {w.a} about {w.subject}.",
        )
    )
    return " ".join([first, *facts, last])


def shopping(w: Writer) -> str:
    """A list with amounts, and questions about it."""
    rows = [f"- {food}: {w.rng.randint(1, 12)}" for food in w.food]
    asked = w.rng.choice(w.food)
    return "\n".join([f"{w.a} buys at the market in {w.town}:", *rows, f"How much {asked} does {w.a} buy?"])


def table(w: Writer) -> str:
    """Comma-separated rows with a header."""
    people = w.rng.sample(PEOPLE, 5)
    rows = [f"{p},{w.rng.choice(TOWNS)},{w.rng.choice(JOBS)},{w.rng.randint(18, 80)}" for p in people]
    return "\n".join(["name,town,job,age", *rows])


def code(w: Writer) -> str:
    """A small Python function in which names are bound and used."""
    x, y, z, f = w.rng.sample(CODE_NAMES, 4)
    k = w.rng.randint(2, 64)
    return w.rng.choice(
        (
            f"def {f}_of({x}, {y}={k}):\n    {z} = 0\n    for {x}_part in {x}:\n        if {x}_part > {y}:\n"
            f"            {z} += {x}_part\n    return {z}\n\nprint({f}_of([1, {k}, {k + 3}], {y}={k // 2}))",
            f"class {f.capitalize()}:\n    def __init__(self, {x}, {y}):\n"
            f"        self.{x} = {x}\n        self.{y} = {y}\n\n"
            f"    def {z}(self):\n        return self.{x} * {k} + self.{y}\n\n{f} = {f.capitalize()}({k}, {k + 1})\n"
            f"print({f}.{z}())",
            f"{x} = {{}}\nfor {y} in open('{f}.txt'):\n"
            f"    {z} = {y}.strip().split(',')\n    {x}[{z}[0]] = int({z}[1])\n"
            f"{f} = sorted({x}.items(), key=lambda pair: -pair[1])\nfor {y}, {z} in {f}[:{k}]:\n    print({y}, {z})",
            f"SELECT {x}, COUNT(*) AS {y}\nFROM {f}\nWHERE {z} > {k} AND {x} IS NOT NULL\nGROUP BY {x}\n"
            f"ORDER BY {y} DESC\nLIMIT {k + 5};",
            f'{{"{x}": {k}, "{y}": ["{w.a}", "{w.b}"], "{z}": {{"{f}": true, "{x}": {k + 1}}}, "{f}": "{w.town}"}}',
        )
    )


def sums(w: Writer) -> str:
    """Arithmetic and dates, line by line."""
    rows = []
    for _ in range(6):
        a, b = w.rng.randint(2, 99), w.rng.randint(2, 99)
        rows.append(f"{a} + {b} = {a + b}")
    start = w.rng.randint(0, 8)
    return "\n".join([*rows, "Months: " + ", ".join(MONTHS[start : start + 4]), f"{w.a} was born in {w.year}."])


KINDS = (
    story,
    story,
    story,
    letter,
    talk,
    talk,
    report,
    recipe,
    notice,
    essay,
    essay,
    shopping,
    table,
    code,
    code,
    sums,
)


def write(passages: int = 1100, seed: int = 2026) -> str:
    """The corpus: passages of every kind, then prompts of the tasks, shuffled together."""
    rng = random.Random(seed)
    made = [rng.choice(KINDS)(Writer(rng)) for _ in range(passages)]
    for task in (tasks.binding(6, "list"), tasks.binding(5, "sentence"), tasks.filter(3), tasks.induction(6)):
        made += [unit[0].text for unit in task.choose(40)]
    rng.shuffle(made)
    return "\n\n".join(text.replace("\n\n", "\n").strip() for text in dict.fromkeys(made)) + "\n"


if __name__ == "__main__":
    place = Path(__file__).parents[1] / "src" / "qkscope" / "data" / "corpus.txt"
    place.write_text(write(), encoding="utf-8")
    print(f"{place.name}: {place.stat().st_size:,} bytes")
