"""Kinds of words written by people who see no head: classes and hypernyms of WordNet 3.0.

Debian's package ``wordnet-base`` puts the files into /usr/share/wordnet; nothing of them is copied.
A word counts by the most frequent of its first senses. *Class*: the lexicographer's file, as
noun.animal. *Kind*: the nearest hypernym that has enough of the words that are asked about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/usr/share/wordnet")
PARTS = {"noun": "n", "verb": "v", "adj": "a"}
FEWEST = 8  # words of a kind
_HIGHEST = 5  # hypernyms above a word that are tried
_SEEN = 2  # times that a sense was seen in tagged text, at least


@dataclass(frozen=True)
class Sense:
    """The first sense of a word: how often it was seen, its class and its synset."""

    seen: int
    part: str
    name: str
    synset: str


class WordNet:
    """Senses of words, and the hypernyms of synsets."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.classes = dict[tuple[str, str], str]()
        self.above = dict[tuple[str, str], str]()
        self.senses = dict[str, Sense]()
        for name, part in PARTS.items():
            self._read_synsets(folder / f"data.{name}", part)
            self._read_words(folder / f"index.{name}", part)

    def _read_synsets(self, file: Path, part: str) -> None:
        for fields in _rows(file):
            offset = fields[0]
            self.classes[part, offset] = f"{part}:{int(fields[1])}"
            first_pointer = 5 + 2 * int(fields[3], 16)
            pointers = fields[first_pointer:]
            is_hypernym = [symbol in ("@", "@i") for symbol in pointers]
            if True in is_hypernym:
                self.above[part, offset] = pointers[is_hypernym.index(True) + 1]

    def _read_words(self, file: Path, part: str) -> None:
        for fields in _rows(file):
            word = fields[0]
            if not word.isalpha():
                continue
            after_pointers = 4 + int(fields[3])
            seen = int(fields[after_pointers + 1])
            synset = fields[after_pointers + 2]
            sense = Sense(seen, part, self.classes[part, synset], synset)
            old = self.senses.get(word)
            if old is None or (seen, part) > (old.seen, old.part):
                self.senses[word] = sense

    def class_of(self, word: str) -> str | None:
        """The lexicographer's class of a word that is common enough."""
        sense = self.senses.get(word.strip().lower())
        return None if sense is None or sense.seen < _SEEN else sense.name

    def kinds(self, words: Iterable[str]) -> dict[str, list[str]]:
        """By word, the other words under the nearest hypernym that has enough of them."""
        under = defaultdict[tuple[str, str], list[str]](list)
        chains = dict[str, list[tuple[str, str]]]()
        for word in words:
            sense = self.senses.get(word.strip().lower())
            if sense is None:
                continue
            chains[word] = list(self._chain(sense))
            for synset in chains[word]:
                under[synset].append(word)
        found = dict[str, list[str]]()
        for word, chain in chains.items():
            synset = next((one for one in chain if len(under[one]) > FEWEST), None)
            if synset is not None:
                found[word] = [other for other in under[synset] if other != word]
        return found

    def _chain(self, sense: Sense) -> Iterator[tuple[str, str]]:
        """The hypernyms of a sense, the nearest first."""
        synset = sense.synset
        for _ in range(_HIGHEST):
            above = self.above.get((sense.part, synset))
            if above is None:
                return
            synset = above
            yield sense.part, synset


def _rows(file: Path) -> Iterator[list[str]]:
    with file.open(encoding="latin1") as lines:
        for line in lines:
            if not line.startswith(" "):
                yield line.split()
