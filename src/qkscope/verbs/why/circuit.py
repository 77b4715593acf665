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
from typing import Any

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
from qkscope.rerun.alternatives import Alternatives
from qkscope.rerun.nodes import WAY, Nodes, Values
from qkscope.rerun.rerun_tokens import prompt_of
from qkscope.seeds import derived_seed
from qkscope.sums.intervals import clustered_bootstrap
from qkscope.text import grouped

Row = dict[str, Any]
Rows = list[Row]
Node = tuple[str, str]
"""A writer, and the label of a token."""
KEPT = (1, 2, 5, 10, 20, 50, 100, 500, 2000)
CIRCUIT = 20
"""How many nodes are kept, and the number that an answer names."""
ORDERS: dict[str, tuple[Sequence[float], bool]] = {
    "circuit": (WAY, False), "attribution patching": ((1.0,), False), "direct effect": ((1.0,), True),
}  # fmt: skip
"""Ways to rank nodes: where gradients are taken, and whether other nodes are held."""
LOGIT = "answer"  # what the root of a graph is called
_DRAWS = 10  # of random nodes
_OTHERS = 8  # prompts with other words
# of the graph
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
        here = torch.nn.functional.one_hot(place, len(self.labels) + 1)[..., :-1].float()
        for by, (way, direct) in ORDERS.items():
            scores = torch.stack(
                [nodes.scores(values, way, direct) for values in instead.values()]
            ).mean(0)
            self.scores[by] = torch.einsum("bwt,btl->wl", scores, here).cpu() / len(place)
        self.count = len(self.writers) * len(self.labels)

    def order(self, by: str, draw: int = 0) -> Int[Tensor, " n"]:
        """Nodes from the first to the last: those that give most to the lead first, those against
        it last.
        """
        if by in self.scores:
            return self.scores[by].flatten().argsort(descending=True)
        draws = torch.Generator().manual_seed(derived_seed(self.seed, "nodes", draw))
        return torch.randperm(self.count, generator=draws)

    def first(self, by: str, k: int) -> dict[Node, float]:
        """The first k nodes and their scores."""
        size = len(self.labels)
        scores = self.scores[by].flatten().tolist()
        return {
            (self.writers[i // size], self.labels[i % size]): scores[i]
            for i in self.order(by)[:k].tolist()
        }

    def _mask(self, tested: Nodes, chosen: Int[Tensor, " n"]) -> Bool[Tensor, "b w t"]:
        """Mask of some nodes' places in every prompt."""
        size = len(self.labels)
        kept = torch.zeros(len(self.writers), size + 1, dtype=torch.bool)
        kept[chosen // size, chosen % size] = True
        return kept[:, tested.places(self.labels).cpu()].transpose(0, 1)

    def shares(
        self, tested: Nodes, instead: Values, sizes: Sequence[int] = KEPT
    ) -> dict[tuple[str, str, int], Tensor]:
        """By rule, whether nodes are kept or removed, and their number: each prompt's lead over the
        mean lead (d b).

        Parameters
        ----------
        tested, instead : nodes of prompts, and what replaces them.
        sizes : numbers of nodes; `CIRCUIT` random ones are run too, each draw a row.
        """
        sizes = [k for k in sizes if k < self.count]
        own = self.order("circuit")
        asked = {
            (by, "kept", k): [self._mask(tested, self.order(by)[:k])]
            for by in ORDERS
            for k in sizes
        }
        asked |= {("circuit", "kept", k): [self._mask(tested, own[:k])] for k in (0, self.count)}
        asked |= {("circuit", "removed", k): [~self._mask(tested, own[:k])] for k in sizes}
        if (k := CIRCUIT) < self.count:
            asked["random", "kept", k] = [
                self._mask(tested, self.order("random", i)[:k]) for i in range(_DRAWS)
            ]
        leads = iter(
            tested.kept([mask for masks in asked.values() for mask in masks], instead)
            .cpu()
            .double()
        )
        whole_lead = tested.lead.double().mean().cpu()
        return {
            key: torch.stack([next(leads) for _ in masks]) / whole_lead
            for key, masks in asked.items()
        }

    def rows(self, tested: Nodes, instead: Mapping[str, Values]) -> Rows:
        """The table ``kept``: ``by, replaced, done, k, share, low, high``; intervals are over
        prompts.
        """
        rows = []
        for replaced, values in instead.items():
            for (by, done, k), shares in self.shares(tested, values).items():
                prompts = shares.shape[1]
                ends = clustered_bootstrap(shares.mean(0)[:, None], torch.arange(prompts))
                low, high = (float(end) if prompts > 1 else None for end in ends)
                rows.append({
                    "by": by, "replaced": replaced, "done": done, "k": k, "share": float(shares.mean()), "low": low,
                    "high": high, "nodes": self.count, "prompts": prompts,
                })  # fmt: skip
        return rows


def kept_words(rows: Rows) -> str:
    """What the circuit's nodes keep of the lead, beside controls."""
    count = rows[0]["nodes"]
    size = CIRCUIT if count > CIRCUIT else max(row["k"] for row in rows if row["k"] < count)
    told = dict[tuple[str, str, str], str]()
    for row in (row for row in rows if row["k"] == size):
        ends = f" [{row['low']:.0%}, {row['high']:.0%}]" if row["prompts"] > 1 else ""
        told[row["by"], row["done"], row["replaced"]] = f"{row['share']:.0%}{ends}"
    random = told.get(("random", "kept", "mean"))
    return (
        f"{size} of {count:,} nodes keep {told['circuit', 'kept', 'mean']} of it (control: {size} by attribution"
        f" patching {told['attribution patching', 'kept', 'mean']}{f', {size} random {random}' if random else ''});"
        f" without them {told['circuit', 'removed', 'mean']} is left. With others at another prompt's values instead"
        f" of their mean, these {size} keep {told['circuit', 'kept', 'other']}"
    )


# ---------------------------------------------------------------------- one prompt


class Circuit:
    """One prompt's circuit: its graph from the answer down, and its nodes kept in the running
    model.

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
        along[:, self.output.best], along[:, self.output.rival] = 1, -1
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
        pair = torch.tensor([[self.output.best, self.output.rival]])
        nodes, others = (
            Nodes(self.probe.reader, prompt_of(self.probe.scope, some), torch.full((len(some),), self.query),
                  pair.expand(len(some), -1), [[str(i) for i in range(self.query + 1)]] * len(some))
            for some in (ids, self._other_prompts(ids[0]).to(ids))
        )  # fmt: skip
        instead = {
            "mean": [z.mean(0, keepdim=True) for z in others.values], "other": [z[:1] for z in others.values],
        }  # fmt: skip
        ranking = NodeOrder(nodes, instead, self.seed)
        reasons = self._reasons()
        scores = ranking.first("circuit", ranking.count)
        ranks = {node: i for i, node in enumerate(scores, 1)}
        for row in self.graph.nodes:
            at = row["writer"], str(row["position"])
            row |= {
                "rank": ranks.get(at),
                "score": scores.get(at),
                "reason": reasons.get(row["id"], ""),
            }
        return {"paths": self._paths(), **self.graph.tables, "kept": ranking.rows(nodes, instead)}

    @cached_property
    def _words(self) -> list[list[Any]]:
        """Words to replace for the other prompts, equal words as one group."""
        self._others.prepare(self._others.words)
        inside = [
            w
            for w in self._others.words
            if w.start > 0 and w.stop <= self.query + 1 and w.core.isalnum()
        ]
        groups = grouped(
            (word for word in inside if self._others.of(word, _OTHERS)), lambda word: word.core
        )
        ids = self._others.ids
        named = {self.output.best, self.output.rival}
        own = [words for words in groups.values() if named & {*ids[words[0].start : words[0].stop]}]
        if not groups:
            raise BadInput(
                "the prompt has no word that another could take the place of: give a longer one."
            )
        return own or [*groups.values()]

    def _other_prompts(self, ids: Int[Tensor, " t"]) -> Int[Tensor, "n t"]:
        """Make prompts with other words: equal words get the same replacement."""
        prompts = ids.cpu().repeat(_OTHERS, 1)
        for i, words in enumerate(self._words):
            every = self._others.of(words[0], _OTHERS)
            for n, prompt in enumerate(prompts):
                chosen = every[(n + i) % len(every)]
                for word in words:
                    new = self._others.lexicon.variant(chosen, word.text) or chosen
                    if len(new) == len(word):
                        prompt[word.start : word.stop] = torch.tensor(new)
        return prompts

    # ------------------------------------------------------------------ in words

    def _reasons(self) -> dict[int, str]:
        """By node, why the first heads looked where they did, in words; of the first, who carried
        them too.
        """
        rows = [
            row
            for row in self.graph.nodes[1:]
            if row["value"] is not None and (row["attention"] or 0) >= _LOOKS
        ]
        rows = sorted(rows, key=lambda row: -abs(row["value"]))[:_REASONS]
        if not rows:
            return {}
        looks = [Look(Head.parse(row["writer"]), row["position"], row["towards"]) for row in rows]
        because = Because(self.output.again, looks, self.seed)
        told = dict[int, str]()
        for row, reason in zip(rows, because.reasons(), strict=True):
            one = PromptTrace(self.probe.run, self.probe.asked, reason.look.head, reason.look.key)
            carriers = (
                Carriers(self.probe.run, because, reason, self.seed).rows() if not told else []
            )
            clause = reason_clause(one.asked, reason, carriers) + carried_clause(carriers)
            told[row["id"]] = clause.lstrip(",: ")
        return told

    def _paths(self) -> Rows:
        """The strongest nodes that write the answer, each followed along its strongest edges to a
        word.
        """
        nodes = self.graph.nodes
        paths = []
        ranked = sorted(self.graph.edges, key=lambda edge: -abs(edge["value"]))
        values = [edge for edge in ranked if edge["kind"] == "value" and edge["of"] is None]
        into = grouped(
            (edge for edge in values if edge["source"] is not None), lambda edge: edge["target"]
        )
        for edge in into.get(0, [])[:_PATHS]:
            way = list[str]()
            at = [edge]
            while at:
                node = nodes[at[0]["source"]]
                word = quoted(whole(self.tokens, node["position"]))
                way.append(word if node["writer"] == EMBEDDING else f"{node['writer']} {word}")
                at = into.get(node["id"], [])
            first = nodes[edge["source"]]
            paths.append({
                "node": first["writer"], "position": first["position"], "value": edge["value"], "share": edge["share"],
                "way": " ← ".join(way), "reason": first["reason"],
            })  # fmt: skip
        lead = nodes[0]["value"]
        left = lead - sum(row["value"] for row in paths)
        rest = {"node": "rest", "position": None, "value": left, "share": left / lead}
        return [*paths, {**rest, "way": "all other nodes, for and against", "reason": ""}]

    def answer(self, tables: Mapping[str, Rows]) -> str:
        """The lead, and what the first nodes keep of it."""
        best = self.output.told(self.output.best)
        rival = self.output.told(self.output.rival)
        named = [quoted(words[0].text) for words in self._words]
        words = ", ".join(named[:_NAMED]) + f" and {len(named) - _NAMED} more" * (
            len(named) > _NAMED
        )
        return (
            f"{best} over {rival} ({self.output.difference:.1f} logits): {kept_words(tables['kept'])}. Means are"
            f" over {_OTHERS} prompts with other words for {words}."
        )


# ---------------------------------------------------------------------- for other tools


def write_graph(path: Path, result: Result) -> None:
    """Write a circuit as circuit-tracer 0.5 and Neuronpedia read it: heads and MLPs as features,
    named by labels.

    A link's weight is in logits of the lead; of a query or key edge it is its share of the
    attention logit times what the head gives. No influence is given: their page hides nodes by it,
    and ours are pruned already.

    Parameters
    ----------
    path : of the file.
    result : of `why` with a circuit.
    """
    nodes = result.tables["nodes"]
    tokens = [row["token"] for row in result.tables["prompt"]]
    top = 1 + max((row["layer"] or 0 for row in nodes), default=0)
    made = list[Row]()
    links = list[Row]()
    for row in nodes:
        kind = "cross layer transcoder"
        layer = str(row["layer"])
        number = row["id"]
        label = f"{row['writer']} at {quoted(row['token'])}"
        if row["writer"] == LOGIT:
            kind = "logit"
            layer = str(top)
            label = f"{result.answer.partition(':')[0]} (p=1)"
        elif row["writer"] == EMBEDDING:
            kind = "embedding"
            layer = "E"
        else:
            writer = Writer.parse(row["writer"])
            number = writer.index[0] if writer.head else _MLP + sum(writer.index)
        label += "" if row["towards"] is None else f" looks at {quoted(tokens[row['towards']])}"
        name = f"{layer}_{number}_{row['position']}"
        made.append({
            "node_id": name, "feature": row["id"], "layer": layer, "ctx_idx": row["position"], "feature_type": kind,
            "token_prob": 0.0, "is_target_logit": kind == "logit", "run_idx": 0, "reverse_ctx_idx": 0,
            "jsNodeId": f"{name}-0", "clerp": f"{label}, {row['reason']}" if row["reason"] else label,
            "influence": None, "activation": row["value"],
        })  # fmt: skip
    for edge in result.tables["graph"]:
        head = nodes[edge["target"]]
        if edge["source"] is not None and edge["of"] in (None, head["id"]):
            weight = (
                edge["value"]
                if edge["of"] is None
                else (edge["share"] or 0.0) * (head["value"] or 0.0)
            )
            ends = {
                "source": made[edge["source"]]["node_id"],
                "target": made[edge["target"]]["node_id"],
            }
            links.append({**ends, "weight": weight, "kind": edge["kind"]})
    metadata = {
        "slug": path.stem, "scan": result.model, "transcoder_list": [], "prompt_tokens": tokens,
        "prompt": "".join(tokens), "node_threshold": None, "schema_version": 1,
    }  # fmt: skip
    clicked = {
        "pinnedIds": [],
        "supernodes": [],
        "linkType": "both",
        "clickedId": made[0]["node_id"],
        "sg_pos": "",
    }
    graph = {"metadata": metadata, "qParams": clicked, "nodes": made, "links": links}
    path.write_text(json.dumps(graph, indent=1, ensure_ascii=False), encoding="utf-8")
