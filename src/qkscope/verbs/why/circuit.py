"""A circuit from the answer back, and whether the running model agrees with it.

The answer's lead over its rival is followed down to the words (`Walk`): drawn, with norms frozen
and attention held. Checked is another question: nodes are ranked by what they give to the lead
(integrated gradients, `Nodes.scores`), the first k are kept and all others replaced - by their mean
over other prompts, or by one other prompt's values - and the model runs: which share of the lead is
left? Beside it: as many nodes by attribution patching, by direct effect, and at random; and the
model without the k nodes.

Other prompts are those of a list, where tokens line up by their roles (or by their distance from
the end), or, of one prompt, the same prompt with other words for its answer and the rival (for all
words where neither stands in it), each the same one wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import BadInput, Result
from qkscope.findings.because import Because
from qkscope.findings.carriers import Carriers
from qkscope.findings.finding import Look
from qkscope.findings.graph import Graph, Walk
from qkscope.findings.messages import carried_clause, reason_clause
from qkscope.findings.next_token import Output, quoted, whole
from qkscope.findings.prompt_trace import PromptRun, PromptTrace
from qkscope.heads import EMBEDDING, Head, Writer
from qkscope.linear.attribution import direct_effects
from qkscope.rerun.alternatives import Alternatives, Word
from qkscope.rerun.nodes import WAY, Nodes, Values
from qkscope.rerun.rerun_tokens import prompt_of
from qkscope.seeds import derived_seed
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.text import grouped

Row = dict[str, Any]
Rows = list[Row]


class Node(NamedTuple):
    """A writer, and the label of a token."""

    writer: str
    label: str


class Scoring(NamedTuple):
    """A way to rank nodes: where gradients are taken, and whether other nodes are held."""

    way: Sequence[float]
    direct: bool


class Kept(NamedTuple):
    """Nodes that are kept or removed: by which order, which of the two, and how many."""

    by: str
    done: str
    k: int


#: How many nodes are kept or removed, and the number that an answer names.
KEPT = (1, 2, 5, 10, 20, 50, 100, 500, 2000)
CIRCUIT = 20
ORDERS: dict[str, Scoring] = {
    "circuit": Scoring(WAY, False),
    "attribution patching": Scoring((1.0,), False),
    "direct effect": Scoring((1.0,), True),
}
LOGIT = "answer"  # what the root of a graph is called
_DRAWS = 10  # of random nodes
_OTHERS = 8  # prompts with other words
# levels of the graph, writers shown of each token, and the smallest share of the lead shown
_DEPTH = 8
_WIDTH = 4
_SMALLEST = 0.02
# attention of a look whose reason is told, and how many are
_LOOKS = 0.1
_REASONS = 3
# strongest nodes, and words of a sentence
_PATHS = 3
_NAMED = 3
_MLP = 1000  # the number of an MLP in an exported graph, behind all heads of its layer


# ---------------------------------------------------------------------- nodes, ranked and kept


class NodeOrder:
    """Nodes of some prompts in the order of what they give to the answer's lead, by several rules.

    Parameters
    ----------
    nodes : of the prompts that they are chosen on.
    instead : by name, what replaces them: scores are the mean over all.
    seed : of random orders.
    """

    def __init__(self, nodes: Nodes, instead: Mapping[str, Values], seed: int = 0) -> None:
        self.seed = seed
        self.writers = nodes.names
        self.labels = nodes.free_labels
        place = nodes.places(self.labels)
        self.scores = dict[str, Float[Tensor, "w l"]]()
        at_label = torch.nn.functional.one_hot(place, len(self.labels) + 1)[..., :-1].float()
        for by, scoring in ORDERS.items():
            scores = [
                nodes.scores(values, scoring.way, scoring.direct) for values in instead.values()
            ]
            mean = torch.stack(scores).mean(0)
            self.scores[by] = torch.einsum("bwt,btl->wl", mean, at_label).cpu() / len(place)
        self.count = len(self.writers) * len(self.labels)

    def order(self, by: str, draw: int = 0) -> Int[Tensor, " n"]:
        """Nodes in order: those that give most to the lead first, those against it last."""
        if by in self.scores:
            return self.scores[by].flatten().argsort(descending=True)
        draws = torch.Generator().manual_seed(derived_seed(self.seed, "nodes", draw))
        return torch.randperm(self.count, generator=draws)

    def first(self, by: str, k: int) -> dict[Node, float]:
        """The first k nodes and their scores."""
        scores = self.scores[by].flatten().tolist()
        nodes = dict[Node, float]()
        for i in self.order(by)[:k].tolist():
            writer, label = divmod(i, len(self.labels))
            nodes[Node(self.writers[writer], self.labels[label])] = scores[i]
        return nodes

    def _mask(self, tested: Nodes, chosen: Int[Tensor, " n"]) -> Bool[Tensor, "b w t"]:
        """Mask of some nodes' places in every prompt."""
        size = len(self.labels)
        kept = torch.zeros(len(self.writers), size + 1, dtype=torch.bool)
        kept[chosen // size, chosen % size] = True
        return kept[:, tested.places(self.labels).cpu()].transpose(0, 1)

    def shares(
        self, tested: Nodes, instead: Values, sizes: Sequence[int] = KEPT
    ) -> dict[Kept, Tensor]:
        """Each prompt's lead over the mean lead, with nodes kept or removed (d b).

        Parameters
        ----------
        tested, instead : nodes of prompts, and what replaces them.
        sizes : numbers of nodes; `CIRCUIT` random ones are run too, each draw a row.
        """
        masks = self._masks(tested, [k for k in sizes if k < self.count])
        runs = [mask for draws in masks.values() for mask in draws]
        leads = iter(tested.kept(runs, instead).cpu().double())
        whole_lead = tested.lead.double().mean().cpu()
        shares = dict[Kept, Tensor]()
        for kept, draws in masks.items():
            shares[kept] = torch.stack([next(leads) for _ in draws]) / whole_lead
        return shares

    def _masks(
        self, tested: Nodes, sizes: Sequence[int]
    ) -> dict[Kept, list[Bool[Tensor, "b w t"]]]:
        """Masks of the nodes that stay: the first of each order, all, none, all but the first."""
        circuit = self.order("circuit")
        masks = dict[Kept, list[Bool[Tensor, "b w t"]]]()
        for by in ORDERS:
            for k in sizes:
                masks[Kept(by, "kept", k)] = [self._mask(tested, self.order(by)[:k])]
        for k in (0, self.count):
            masks[Kept("circuit", "kept", k)] = [self._mask(tested, circuit[:k])]
        for k in sizes:
            masks[Kept("circuit", "removed", k)] = [~self._mask(tested, circuit[:k])]
        if self.count > CIRCUIT:
            random = [self.order("random", draw)[:CIRCUIT] for draw in range(_DRAWS)]
            masks[Kept("random", "kept", CIRCUIT)] = [self._mask(tested, nodes) for nodes in random]
        return masks

    def rows(self, tested: Nodes, instead: Mapping[str, Values]) -> Rows:
        """The table ``kept``: ``by, replaced, done, k, share, low, high``.

        Intervals are over prompts; of one prompt there are none.
        """
        rows = []
        for replaced, values in instead.items():
            for kept, shares in self.shares(tested, values).items():
                prompts = shares.shape[1]
                low = high = None
                if prompts > 1:
                    ends = clustered_bootstrap(shares.mean(0)[:, None], torch.arange(prompts))
                    low, high = map(float, ends)
                rows.append({
                    "by": kept.by, "replaced": replaced, "done": kept.done, "k": kept.k, "share": float(shares.mean()),
                    "low": low, "high": high, "nodes": self.count, "prompts": prompts,
                })  # fmt: skip
        return rows


def kept_words(rows: Rows) -> str:
    """What the circuit's nodes keep of the lead, beside controls."""
    count = rows[0]["nodes"]
    size = CIRCUIT if count > CIRCUIT else max(row["k"] for row in rows if row["k"] < count)
    told = dict[tuple[str, str, str], str]()
    for row in rows:
        if row["k"] == size:
            told[row["by"], row["done"], row["replaced"]] = _share_words(row)
    random = told.get(("random", "kept", "mean"))
    beside = f", {size} random {random}" if random else ""
    return (
        f"{size} of {count:,} nodes keep {told['circuit', 'kept', 'mean']} of it (control: {size} by attribution"
        f" patching {told['attribution patching', 'kept', 'mean']}{beside});"
        f" without them {told['circuit', 'removed', 'mean']} is left. With others at another prompt's values instead"
        f" of their mean, these {size} keep {told['circuit', 'kept', 'other']}"
    )


def _share_words(row: Row) -> str:
    """A share, with its interval where there are several prompts."""
    share = f"{row['share']:.0%}"
    return f"{share} [{row['low']:.0%}, {row['high']:.0%}]" if row["prompts"] > 1 else share


# ---------------------------------------------------------------------- one prompt


class Circuit:
    """One prompt's circuit: the graph from its answer down, and nodes kept in the running model.

    Parameters
    ----------
    probe : the prompt, in a run with its logits.
    output : its answer and the rival.
    depth : levels of the graph.
    seed : of other words and of random nodes.
    """

    def __init__(
        self, probe: PromptRun, output: Output, depth: int | None = None, seed: int = 0
    ) -> None:
        self.probe = probe
        self.output = output
        self.seed = seed
        self.tokens = output.asked.tokens
        self.depth = _DEPTH if depth is None else depth
        self.query = output.asked.query
        if self.query < 2:
            raise BadInput(
                "besides the first token there is one word, and a circuit leads to several: give a longer prompt."
            )
        self._others = Alternatives(output.again, seed)

    @cached_property
    def graph(self) -> Graph:
        """The answer's lead, followed down."""
        run = self.probe.run
        scope = self.probe.scope
        assert run.logits is not None
        along = torch.zeros_like(run.logits).detach()
        along[:, self.output.best] = 1
        along[:, self.output.rival] = -1
        answer = direct_effects(run, along)
        if answer is None:
            bent = "its logits are no linear function of what leaves the last block"
            raise BadInput(f"{scope.name} cannot be followed from its answer: {bent}.")
        cap = getattr(scope.model.config.get_text_config(), "final_logit_softcapping", None)
        logits = run.logits.detach() if cap is None else (run.logits.detach() / cap).atanh() * cap
        walk = Walk(run, self.probe.asked, LOGIT, _WIDTH, _SMALLEST, deeper=1)
        root = walk.node(None, LOGIT, self.query, float((logits * along).double().sum()))
        walk.check(root["value"], torch.stack([*answer.values.values()]))
        walk.follow(
            root, "value", answer, torch.tensor([1 + self.query], device=run.row.device), self.depth
        )
        return walk.graph(dict.fromkeys(range(self.query + 1)))

    def tables(self) -> dict[str, Rows]:
        """Nodes with their ranks and reasons, edges, paths to the words, and what the first nodes
        keep.
        """
        ids = self.probe.asked.inputs["input_ids"][:, : self.query + 1]
        nodes = self._nodes(ids)
        others = self._nodes(self._other_prompts(ids[0]).to(ids))
        instead = {
            "mean": [outputs.mean(0, keepdim=True) for outputs in others.values],
            "other": [outputs[:1] for outputs in others.values],
        }
        ranking = NodeOrder(nodes, instead, self.seed)
        reasons = self._reasons()
        scores = ranking.first("circuit", ranking.count)
        ranks = {node: rank for rank, node in enumerate(scores, 1)}
        for row in self.graph.nodes:
            node = Node(row["writer"], str(row["position"]))
            row["rank"] = ranks.get(node)
            row["score"] = scores.get(node)
            row["reason"] = reasons.get(row["id"], "")
        return {"paths": self._paths(), **self.graph.tables, "kept": ranking.rows(nodes, instead)}

    def _nodes(self, ids: Int[Tensor, "b t"]) -> Nodes:
        """Nodes of prompts of this length, every token called after its place."""
        count = len(ids)
        queries = torch.full((count,), self.query)
        pairs = torch.tensor([[self.output.best, self.output.rival]]).expand(count, -1)
        labels = [str(i) for i in range(self.query + 1)]
        prompts = prompt_of(self.probe.scope, ids)
        return Nodes(self.probe.reader, prompts, queries, pairs, [labels] * count)

    @cached_property
    def _words(self) -> list[list[Word]]:
        """Words to replace for the other prompts, equal words as one group."""
        self._others.prepare(self._others.words)
        replaceable = [word for word in self._others.words if self._is_replaceable(word)]
        groups = list(grouped(replaceable, lambda word: word.core).values())
        if not groups:
            raise BadInput(
                "the prompt has no word that another could take the place of: give a longer one."
            )
        ids = self._others.ids
        pair = {self.output.best, self.output.rival}
        of_pair = [words for words in groups if pair & {*ids[words[0].start : words[0].stop]}]
        return of_pair or groups

    def _is_replaceable(self, word: Word) -> bool:
        """Whether a word stands between the first token and the query, and others fit there."""
        inside = word.start > 0 and word.stop <= self.query + 1
        return inside and word.core.isalnum() and bool(self._others.of(word, _OTHERS))

    def _other_prompts(self, ids: Int[Tensor, " t"]) -> Int[Tensor, "n t"]:
        """Make prompts with other words: equal words get the same replacement."""
        prompts = ids.cpu().repeat(_OTHERS, 1)
        for i, words in enumerate(self._words):
            alternatives = self._others.of(words[0], _OTHERS)
            for n, prompt in enumerate(prompts):
                chosen = alternatives[(n + i) % len(alternatives)]
                for word in words:
                    new = self._others.lexicon.variant(chosen, word.text) or chosen
                    if len(new) == len(word):
                        prompt[word.start : word.stop] = torch.tensor(new)
        return prompts

    # ------------------------------------------------------------------ in words

    def _reasons(self) -> dict[int, str]:
        """By node, why the first heads looked where they did, in words.

        Of the first head also who carried the words there.
        """
        rows = [row for row in self.graph.nodes[1:] if _looks(row)]
        rows = sorted(rows, key=lambda row: -abs(row["value"]))[:_REASONS]
        if not rows:
            return {}
        looks = [Look(Head.parse(row["writer"]), row["position"], row["towards"]) for row in rows]
        because = Because(self.output.again, looks, self.seed)
        told = dict[int, str]()
        for row, reason in zip(rows, because.reasons(), strict=True):
            one = PromptTrace(self.probe.run, self.probe.asked, reason.look.head, reason.look.key)
            carriers = Rows()
            if not told:
                carriers = Carriers(self.probe.run, because, reason, self.seed).rows()
            clause = reason_clause(one.asked, reason, carriers) + carried_clause(carriers)
            told[row["id"]] = clause.lstrip(",: ")
        return told

    def _paths(self) -> Rows:
        """The strongest nodes that write the answer, each followed along its strongest edges."""
        nodes = self.graph.nodes
        values = [
            edge
            for edge in sorted(self.graph.edges, key=lambda edge: -abs(edge["value"]))
            if edge["kind"] == "value" and edge["of"] is None and edge["source"] is not None
        ]
        into = grouped(values, lambda edge: edge["target"])
        paths = []
        for edge in into.get(0, [])[:_PATHS]:
            first = nodes[edge["source"]]
            paths.append({
                "node": first["writer"], "position": first["position"], "value": edge["value"], "share": edge["share"],
                "way": " ← ".join(self._way(first, into)), "reason": first["reason"],
            })  # fmt: skip
        lead = nodes[0]["value"]
        left = lead - sum(row["value"] for row in paths)
        rest = {"node": "rest", "position": None, "value": left, "share": left / lead}
        return [*paths, {**rest, "way": "all other nodes, for and against", "reason": ""}]

    def _way(self, node: Row, into: Mapping[int, Rows]) -> list[str]:
        """A node, the strongest node that it read, and so on down to a word."""
        way = list[str]()
        while True:
            word = quoted(whole(self.tokens, node["position"]))
            way.append(word if node["writer"] == EMBEDDING else f"{node['writer']} {word}")
            strongest = into.get(node["id"])
            if not strongest:
                return way
            node = self.graph.nodes[strongest[0]["source"]]

    def answer(self, tables: Mapping[str, Rows]) -> str:
        """The lead, and what the first nodes keep of it."""
        best = self.output.told(self.output.best)
        rival = self.output.told(self.output.rival)
        replaced = [quoted(group[0].text) for group in self._words]
        words = ", ".join(replaced[:_NAMED])
        if len(replaced) > _NAMED:
            words += f" and {len(replaced) - _NAMED} more"
        return (
            f"{best} over {rival} ({self.output.difference:.1f} logits): {kept_words(tables['kept'])}. Means are"
            f" over {_OTHERS} prompts with other words for {words}."
        )


def _looks(row: Row) -> bool:
    """Whether a node is a head with a value of its own and attention whose reason is told."""
    return row["value"] is not None and (row["attention"] or 0) >= _LOOKS


# ---------------------------------------------------------------------- for other tools


def write_graph(path: Path, result: Result) -> None:
    """Write a circuit as circuit-tracer 0.5 and Neuronpedia read it.

    Heads and MLPs are features, named by labels. A link's weight is in logits of the lead; of a
    query or key edge it is its share of the attention logit times what the head gives. No influence
    is given: their page hides nodes by it, and ours are pruned already.

    Parameters
    ----------
    path : of the file.
    result : of `why` with a circuit.
    """
    rows = result.tables["nodes"]
    tokens = [row["token"] for row in result.tables["prompt"]]
    answer = result.answer.partition(":")[0]
    top = 1 + max((row["layer"] or 0 for row in rows), default=0)
    nodes = [_exported_node(row, tokens, answer, top) for row in rows]
    links = list[Row]()
    for edge in result.tables["graph"]:
        link = _exported_link(edge, rows, nodes)
        if link is not None:
            links.append(link)
    metadata = {
        "slug": path.stem,
        "scan": result.model,
        "transcoder_list": [],
        "prompt_tokens": tokens,
        "prompt": "".join(tokens),
        "node_threshold": None,
        "schema_version": 1,
    }
    clicked = {
        "pinnedIds": [],
        "supernodes": [],
        "linkType": "both",
        "clickedId": nodes[0]["node_id"],
        "sg_pos": "",
    }
    graph = {"metadata": metadata, "qParams": clicked, "nodes": nodes, "links": links}
    path.write_text(json.dumps(graph, indent=1, ensure_ascii=False), encoding="utf-8")


def _exported_node(row: Mapping[str, Any], tokens: Sequence[str], answer: str, top: int) -> Row:
    """A node in circuit-tracer's words; the answer stands in a layer above all others."""
    kind = "cross layer transcoder"
    layer = str(row["layer"])
    number = row["id"]
    label = f"{row['writer']} at {quoted(row['token'])}"
    if row["writer"] == LOGIT:
        kind = "logit"
        layer = str(top)
        label = f"{answer} (p=1)"
    elif row["writer"] == EMBEDDING:
        kind = "embedding"
        layer = "E"
    else:
        writer = Writer.parse(row["writer"])
        number = writer.index[0] if writer.head else _MLP + sum(writer.index)
    if row["towards"] is not None:
        label += f" looks at {quoted(tokens[row['towards']])}"
    if row["reason"]:
        label += f", {row['reason']}"
    name = f"{layer}_{number}_{row['position']}"
    return {
        "node_id": name, "feature": row["id"], "layer": layer, "ctx_idx": row["position"], "feature_type": kind,
        "token_prob": 0.0, "is_target_logit": kind == "logit", "run_idx": 0, "reverse_ctx_idx": 0,
        "jsNodeId": f"{name}-0", "clerp": label, "influence": None, "activation": row["value"],
    }  # fmt: skip


def _exported_link(
    edge: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], nodes: Rows
) -> Row | None:
    """An edge in circuit-tracer's words; none for the rest, and for what is below another's look."""
    head = rows[edge["target"]]
    if edge["source"] is None or edge["of"] not in (None, head["id"]):
        return None
    weight = edge["value"]
    if edge["of"] is not None:
        weight = (edge["share"] or 0.0) * (head["value"] or 0.0)
    return {
        "source": nodes[edge["source"]]["node_id"],
        "target": nodes[edge["target"]]["node_id"],
        "weight": weight,
        "kind": edge["kind"],
    }
