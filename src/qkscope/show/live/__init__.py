"""The live page: the same results and blocks as a saved one, of a prompt that somebody types.

In comes a model, and a folder that knows heads if there is one; out go answers to what the reader types and clicks:
where every head looks from any token, why one looks there (`qkscope.why`), and what changes when it cannot.

Reading order: `features` (what folders know of heads), `what_if` (a row of attention, changed, beside random changes),
`session` (the questions), `server` (loopback, a token in the address, a fixed list of files and questions; `view` opens
any page). The page itself is ``show/static/live.html`` and ``live.js``.
"""
