"""Every head by a rule that can take its place.

- ``atlas``: the verb: rules fitted on some documents, tested on others beside baselines
- ``head_patterns``: how heads attend in passages; how alike two rows are
- ``word_classes``: classes of words from the input embedding, which kinds are made of
- ``rule_fit``: which few parts, with which weights
- ``costs``: what a rule in a head's place does to the next token
"""
