"""Results as people see them: one offline page, and figures.

In come results, or run folders read back; out go a page that needs no network, and PNG and PDF files. A page is made of
tables and arrays alone, so that it is the same whenever it is made.

Reading order: `colours` (one for each name), `block` (one thing to look at), `blocks` (what a table is drawn as, and
what is said beside it), `discovered` (the same of heads by name, and the families of names), `traced` (of writers, and
of an answer to why), `places` (what a link can name), `report` (blocks, claims, tables and what made
them as one page), ``static/`` (a script per kind of block, on `base.js` and `colours.js`; `page.css`), ``templates/``,
`figures`, `stored` (a folder's page), `thumbnail` and `gallery` (many runs as one site).
"""
