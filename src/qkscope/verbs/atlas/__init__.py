"""Every head by what decides where it looks.

- ``atlas``: the verb: looks on plain text, their reasons counted as jobs
- ``head_names``: names as predictions, scored on unseen text
"""
