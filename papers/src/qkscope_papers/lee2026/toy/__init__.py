"""Payload retrieval: a head that must find the key whose latents a query names.

Everything about it is known. In reading order: `retrieval` (the task and a head), `stack` (many
heads at once), `trained` (heads on disk), `ceilings` (the best any head can do), `train` (the
verb), `retrieval_plots` (what it draws).
"""
