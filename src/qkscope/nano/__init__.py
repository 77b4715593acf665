"""The small models we ship: Llamas trained on the tasks' own texts, with every checkpoint kept.

In: a recipe and a seed. Out: a folder of checkpoints that `Scope.load` reads, and a Result that says how well each
answers. In reading order: `words` (the vocabulary), `text` (rows of training text), `score` (the exam), `trainer` (one
model, resumable), `train` (the verb). Where the shipped ones lie is `capture/names.py`.
"""
