"""The reproduction: every figure of the papers, each beside its controls; nothing of the instrument imports it.

In: a paper, figures, a preset. Out: one run folder per figure. In reading order: `registry` (how a figure is
registered, found and run), `tables` (what runs and drawings share), `trainer` and `fleet` (small models, many at once),
then a folder per paper, `lee2026` and `franco2026`: its toy in ``toy/``, its trained toys in ``cells``, and one file
per figure or family of figures with its run and its drawing.
"""
