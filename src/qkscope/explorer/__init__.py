"""The live page, the only room that serves; and the one call that opens any page.

In comes a model, and a fit if there is one; out go answers to what the reader types and clicks: attention, its split
among features, and what a swap does to it and to the answer.

Reading order: `session` (one prompt captured at every head, and what is asked of it), `server` (loopback, a token in
the address, a fixed list of files and questions), ``static/`` (the page), `opening` (`view`: a run's page, or the live
one).
"""
