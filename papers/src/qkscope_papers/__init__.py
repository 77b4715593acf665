"""The second distribution, `qkscope-papers`: what is built on the instrument; nothing of the
instrument imports it.

In: a paper, figures, a preset; or the name of a toy, a nano, a family, a bench row. Out: run
folders, and rows. In reading order: `cli` (the verbs), `registry` (how a figure is registered,
found and run), `tables` and `figures` (what runs and drawings share), `trainer` and `fleet` (small
models, many at once), then a folder per paper, `lee2026` and `franco2026`: its toy in ``toy/``, its
trained toys in ``cells``, and one file per figure or family of figures with its run and its
drawing; `known` has compiled programs, whose answers are known. Beside them `nano` (training the
small models that the instrument ships), `families` (a tiny model of every family), `models` (which
families are right), and `bench` (every speed that is claimed).
"""
