"""Write my_contrast.jsonl: whom does a pronoun look at? `python examples/my_contrast.py > examples/my_contrast.jsonl`.

Three people, one of them of the pronoun's gender. The query is the pronoun, the last token; the keys are the names;
+ is the name that agrees with it, − are the other two. Names for choosing heads, for fitting and for testing differ.
"she" and "he" take turns, so that no name is right more often than another. No name stands first: the first token of a
prompt draws attention whatever it says.
"""

import json
import random
import sys

WOMEN = """Mary Linda Susan Sarah Karen Lisa Emily Anna Julia Emma Alice Laura Nancy Jessica Helen"""
MEN = """John James Robert David Thomas Daniel Mark Paul Kevin Brian George Peter Henry Jack Adam"""
PLACES = ("park", "market", "station", "beach", "library", "museum", "cafe", "harbour")
COUNTS = {"choose": 16, "fit": 32, "test": 16}


def main() -> None:
    """Write the lines to stdout."""
    rng = random.Random(0)
    for number, (use, count) in enumerate(COUNTS.items()):
        women, men = WOMEN.split()[number::3], MEN.split()[number::3]  # five names each, used for nothing else
        for i in range(count):
            pronoun, right, wrong = (("she", women, men), ("he", men, women))[i % 2]
            names = [(rng.choice(right), 1), *((name, -1) for name in rng.sample(wrong, 2))]
            rng.shuffle(names)
            (a, _), (b, _), (c, _) = names
            line = {
                "prompt": f"At the {rng.choice(PLACES)}, {a}, {b} and {c} met. After a while {pronoun}",
                "keys": [{"text": name, "labels": {"gender": label}} for name, label in names],
                "use": use,
            }
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
