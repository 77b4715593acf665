"""The live page, the only room that serves; and the one call that opens any page.

In comes a model, and a folder that knows heads if there is one; out go answers to what the reader types and clicks:
where every head looks from any token, why one looks there, and what changes when it cannot.

Reading order: `looked` (one prompt, run once; any token run alone again), `what_if` (a row of attention, changed,
beside random changes), `features` (what folders know of heads), `answers` (one answer: numbers, sentences, a result),
`session` (the questions), `server` (loopback, a token in the address, a fixed list of files and questions), ``static/``
(the page), `opening` (`view`: a run's page, or the live one).
"""
