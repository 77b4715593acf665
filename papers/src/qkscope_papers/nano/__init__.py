"""The small models we ship: Llamas trained on the tasks' own texts, with every checkpoint kept.

In: a preset and a seed. Out: a folder of checkpoints that `Scope.load` reads, and a `Result` that
says how well each answers. In reading order: `text` (the vocabulary, and rows of training text),
`score` (the exam), `train` (one model, resumable, and the verb `train_nano`), `drawing` (its
picture). Where the shipped ones lie is `model/load.py`.
"""
