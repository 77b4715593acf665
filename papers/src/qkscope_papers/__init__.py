"""The second distribution, `qkscope-papers`: what is built on the instrument.

Nothing of the instrument imports it. In: a paper, figures, a preset; or the name of a toy, a nano,
a family. Out: run folders, and rows. In reading order: `cli` (the verbs), `registry` (how a figure
is registered, found and run), `tables` and `figures` (what runs and drawings share), `trainer` and
`fleet` (small models, many at once), then a folder per paper, `lee2026` and `franco2026`: its toy
in ``toy/``, its trained toys in ``cells``, and one file per figure or family of figures with its
run and its drawing. Beside them `nano` (training the small models that the instrument ships),
`families` (a tiny model of every family), `models` (which families are right), and `reports` (where
the reports of a clone lie). What measures the instrument itself stands in ``bench/`` at the root of
the repository.
"""
