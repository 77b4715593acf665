"""What several verbs share: a question put to a prompt or a task, and what was found.

In come a `Scope` and prompts; out go rows of tables. A verb imports no other verb: what two of them
need stands here. Files in reading order:

- ``task_batches``: a task through a model, in batches; a prompt that several contrasts label runs
  once; what a result was made from
- ``fit``: what `decompose` gives: sums, subspaces, and the folder they are kept in and read from
- ``fitted_features``: which features of a fit a verb takes, and those of one head
- ``singular_rows``: relative attention of captured rows over the singular basis of the weights
- ``swap_rows``: which keys change places in a swap, and the attention rows that are edited
- ``published``: which heads look from where to where: published circuits (``published.toml``)
- ``head_rows``: one head on a batch of prompts, split among writers; a pass over all batches
- ``prompt_trace``: one head on one prompt, any query and any key, split and cut
- ``graph``: a logit followed down to the words
- ``rivals``: which token an answer is compared with, where nobody names one
  (``function_words.toml``)
- ``next_token``: the next token, its rival, and every head tried
- ``question``: what is asked: a prompt or a pair, head, query, key, answer and rival; parsed once
- ``pair``: what differs between a clean and a corrupted prompt, a span at a time
- ``finding``: a statement about a look, with the changes that test it; what decides a look
- ``registry``: the rule of each kind of finding, its threshold and its precedence
- ``because``: the words that decide a look, found by putting others in their place
- ``levels``: whether any word does in a word's place, a word of its kind, or this word alone
- ``relations``: what relates these words: proposed, tested, judged
- ``joint``: words that decide a look together: either is enough, or both are needed
- ``distances``: a head's mean row by distance, as a table
- ``rules``: what a head does, as a program: weighted parts that give its attention from text alone
- ``shipped_atlas``: the rules of a model's heads, and those that ship; a look beside its rule
- ``carriers``: a word changed, and what few writers wrote put back
- ``messages``: findings in words
- ``verdicts``: what an answer may say of parts, cuts and their controls: the one rule
"""
