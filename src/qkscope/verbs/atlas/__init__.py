"""Every head by what decides where it looks.

- ``atlas``: the verb, and the atlases that ship beside it
- ``head_names``: names as predictions, scored on unseen text
"""
