"""Features in superposition and a head that looks for pairs of them, all in plain sight.

In reading order: `superposition` (the task and a toy), `stack` (many toys at once), `trained` (toys
on disk with every checkpoint), `alignment` (cosines, chance, whitening, isotropy), `measure` (a toy
in numbers), `train` (the verb).
"""
