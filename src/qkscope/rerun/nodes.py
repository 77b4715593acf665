"""The (writer, token) nodes of prompts: what each wrote, and the model run with some of them
replaced.

A node is what one writer (the embedding, a head, an MLP) puts into the stream at one token. All are
seen where they are written - what enters the first block, what ``W_O`` is given, what a part of a
block puts out - and replaced there. Nodes that are kept run live, on what they are given then; the
others put out something else. The first token of a prompt is never replaced: attention rests there,
whatever it says.

A score is a gradient of the answer's lead over its rival times what the node loses when it is
replaced. Integrated gradients: the embedding is moved from what replaces it to what it is, ``x(α) =
r + α (x − r)``, everything behind it runs live, and a node's gradient is the mean on the way (Hanna
et al. 2024); at its end alone it is attribution patching; with the nodes that read a node held, a
direct effect.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from qkscope.linear.layer import stream_of
from qkscope.linear.reader import Reader
from qkscope.model.block_tree import Heads, Part, walk
from qkscope.model.capture_types import Places
from qkscope.model.tap import cleared
from qkscope.seeds import derived_seed

# run together
_TOKENS = {"cpu": 2**10}
_ON_A_GPU = 2**15
WAY: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Where on the way from what replaces the embedding to what it is gradients are taken."""

Values = list[Float[Tensor, "b t c e"]]
"""What nodes put out, by site."""


class Site(NamedTuple):
    """Where some writers write: a module, whether they are what it is given or what it gives, and
    their numbers.
    """

    module: nn.Module
    given: bool
    writers: slice


class Nodes:
    """The nodes of a batch of prompts, and the lead of each prompt's answer over its rival.

    Parameters
    ----------
    reader : of the model.
    inputs : the prompts.
    query : by prompt, the token whose next one is read.
    pair : by prompt, the answer and its rival.
    labels : by prompt, names of its tokens, each once: tokens of one name in several prompts are
        compared.

    Attributes
    ----------
    names : of writers.
    free : tokens whose nodes may be replaced.
    values : what each node put out.
    lead : the answer's logit less its rival's, in the unchanged run.
    """

    def __init__(
        self,
        reader: Reader,
        inputs: dict[str, Tensor],
        query: Int[Tensor, " b"],
        pair: Int[Tensor, "b 2"],
        labels: Sequence[Sequence[str]],
    ) -> None:
        device = inputs["input_ids"].device
        self.labels = labels
        self.reader = reader
        self.inputs = inputs
        self.query = query.to(device)
        self.pair = pair.to(device)
        self.names = reader.writers(len(reader.blocks))[:-1]
        mask = inputs["attention_mask"].bool()
        places = torch.arange(mask.shape[1], device=device)
        until = places <= self.query[:, None]
        is_first = mask.cumsum(1) <= 1
        self.free: Bool[Tensor, "b t"] = mask & ~is_first & until
        seen = [list[Tensor]() for _ in self.sites]

        def note(site: int, z: Tensor) -> Tensor:
            seen[site].append(z.clone())
            return z

        every = torch.arange(len(query), device=device)
        leads = [self._run(rows, note) for rows in every.split(self._at_once)]
        self.values: Values = [torch.cat(parts) for parts in seen]
        self.lead: Float[Tensor, " b"] = torch.cat(leads)

    @cached_property
    def sites(self) -> list[Site]:
        """Where all writers write, in their order."""
        first_block = self.reader.blocks[0].module
        sites = [Site(first_block, True, slice(0, 1))]
        first = 1
        for layer, block in enumerate(self.reader.blocks):
            for node in walk(block.tree):
                module: Any
                if isinstance(node, Heads):
                    module = block.output
                    count = len(self.reader.head_names(layer))
                elif isinstance(node, Part):
                    module = node.module
                    count = 1
                else:
                    continue
                writers = slice(first, first + count)
                sites.append(Site(module, isinstance(node, Heads), writers))
                first += count
        return sites

    @property
    def _at_once(self) -> int:
        tokens = _TOKENS.get(self.reader.device.type, _ON_A_GPU)
        length = self.inputs["input_ids"].shape[1]
        return max(tokens // length, 1)

    def _run(
        self, rows: Int[Tensor, " m"], visit: Callable[[int, Tensor], Tensor], grad: bool = False
    ) -> Tensor:
        """The lead of some prompts, each site handing on what ``visit`` makes of what it has."""
        inputs = {name: value[rows] for name, value in self.inputs.items()}
        shape = inputs["input_ids"].shape

        def changed(site: int, value: Tensor) -> Tensor:
            writers = self.sites[site].writers
            by_writer = value.reshape(*shape, writers.stop - writers.start, -1)
            return visit(site, by_writer).reshape(value.shape).to(value)

        def given(
            site: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            torch.set_grad_enabled(grad)
            x = stream_of(args, kwargs)
            new = changed(site, x)
            return tree_map_only(Tensor, lambda value: new if value is x else value, (args, kwargs))

        def gave(site: int, _module: nn.Module, _args: Any, out: Any) -> Any:
            if isinstance(out, tuple):
                return changed(site, out[0]), *out[1:]
            return changed(site, out)

        hooks = list[Any]()
        for i, site in enumerate(self.sites):
            if site.given:
                hook = site.module.register_forward_pre_hook(partial(given, i), with_kwargs=True)
            else:
                hook = site.module.register_forward_hook(partial(gave, i))
            hooks.append(hook)
        row = torch.arange(len(rows), device=rows.device)
        nothing = torch.zeros(len(rows), 0, dtype=torch.long, device=rows.device)
        read = Places(row, self.query[rows], nothing, nothing.bool())
        with cleared(hooks):
            logits = self.reader.scope.watch(inputs, logits_at=read)
            assert logits is not None
            own = self.pair[rows].to(logits.device)
            with torch.set_grad_enabled(grad):
                answer = logits[row, own[:, 0]]
                rival = logits[row, own[:, 1]]
                return answer - rival

    # ------------------------------------------------------------------ what replaces them

    @property
    def free_labels(self) -> list[str]:
        """The labels of all tokens whose nodes may be replaced."""
        free = self.free.nonzero().tolist()
        return sorted({self.labels[row][i] for row, i in free})

    def places(self, labels: Sequence[str]) -> Int[Tensor, "b t"]:
        """The number of each token's label among some; their count where it is none of these, or is
        not free.
        """
        numbers = {label: i for i, label in enumerate(labels)}
        none = len(labels)
        by_prompt = [[numbers.get(label, none) for label in row] for row in self.labels]
        found = torch.tensor(by_prompt).to(self.free.device)
        return found.masked_fill(~self.free, none)

    def other_prompts(self, seed: int = 0) -> dict[str, Values]:
        """What each writer put out at tokens of the same label: on average in other prompts, and in
        one, drawn.

        Prompts of one shape (the same labels in the same order: a template with other words) are
        compared with each other; one that is alone with all. Where none has a label, the mean over
        all tokens is taken.
        """
        labels = self.free_labels
        numbers = self.places(labels)
        with_none = torch.nn.functional.one_hot(numbers, len(labels) + 1)
        here = with_none[..., :-1].float()
        same = torch.einsum("btl,cul->btcu", here, here)
        size = len(self.labels)
        apart = torch.zeros(size, size, device=here.device)
        drawn = torch.zeros(size, size, device=here.device)
        for i in range(size):
            others = self._compared(i)
            one = random.Random(derived_seed(seed, "other prompt", i)).choice(others)
            apart[i, others] = 1
            drawn[i, one] = 1
        everywhere = apart[:, None, :, None] * self.free
        found = dict[str, Values]()
        for name, which in (("mean", apart), ("other", drawn)):
            weights = same * which[:, None, :, None]
            is_alone = weights.sum((2, 3)) == 0
            is_alone = is_alone[..., None, None]
            weights = torch.where(is_alone, everywhere.expand_as(weights), weights)
            weights = weights / weights.sum((2, 3), keepdim=True).clamp_min(1)
            found[name] = [torch.einsum("btcu,cuwe->btwe", weights.to(z), z) for z in self.values]
        return found

    def _compared(self, prompt: int) -> list[int]:
        """The other prompts of one prompt's shape; where it is alone, all others."""
        shape = tuple(self.labels[prompt])
        others = [other for other in range(len(self.labels)) if other != prompt]
        alike = [other for other in others if tuple(self.labels[other]) == shape]
        return alike or others

    # ------------------------------------------------------------------ runs

    def _rows(
        self, count: int, room: int = 1
    ) -> Iterator[tuple[Int[Tensor, " m"], Int[Tensor, " m"]]]:
        """Batches of ``count`` variants of every prompt, as numbers of variant and prompt."""
        size = len(self.query)
        variants = torch.arange(count * size, device=self.query.device)
        at_once = max(self._at_once // room, 1)
        for some in variants.split(at_once):
            yield some // size, some % size

    @torch.no_grad()
    def kept(self, sets: Sequence[Bool[Tensor, "b w t"]], instead: Values) -> Float[Tensor, "x b"]:
        """The lead of every prompt where the nodes of a set are kept and all others replaced, for
        each set.
        """
        found = []
        for which, rows in self._rows(len(sets)):
            own = zip(which.tolist(), rows.tolist(), strict=True)
            kept = [sets[i][row] for i, row in own]
            is_held = ~self.free[rows][:, None]
            keep = torch.stack(kept).to(rows.device) | is_held

            def visit(site: int, z: Tensor, keep: Tensor = keep, rows: Tensor = rows) -> Tensor:
                of_site = keep[:, self.sites[site].writers].transpose(1, 2)
                here = of_site[..., None].to(z.device)
                return torch.where(here, z, instead[site][rows].to(z))

            found.append(self._run(rows, visit))
        return torch.cat(found).view(len(sets), -1)

    def scores(
        self, instead: Values, way: Sequence[float] = WAY, direct: bool = False
    ) -> Float[Tensor, "b w t"]:
        """What each node gives to the lead, by the mean gradient on the way to it.

        Parameters
        ----------
        instead : where the way begins.
        way : points on it; ``(1.0,)`` is attribution patching.
        direct : whether the nodes that read a node are held.
        """
        size = len(self.query), len(self.names), self.free.shape[1]
        scores = torch.zeros(size, device=self.query.device)
        for which, rows in self._rows(len(way), room=2):
            points = torch.tensor(way, device=rows.device)
            alpha = points[which][:, None, None, None]
            leaves = list[Tensor]()

            def visit(
                site: int,
                z: Tensor,
                rows: Tensor = rows,
                alpha: Tensor = alpha,
                leaves: Any = leaves,
            ) -> Tensor:
                z = z.detach() if direct else z
                if site == 0:
                    start = instead[site][rows].to(z)
                    free = self.free[rows].to(z.device)
                    on_the_way = start + alpha.to(z) * (z - start)
                    z = torch.where(free[..., None, None], on_the_way, z)
                if not z.requires_grad:
                    z.requires_grad_()
                leaves.append(z)
                return z

            lead = self._run(rows, visit, grad=True).sum()
            for site, gradient in enumerate(torch.autograd.grad(lead, leaves)):
                away = self.values[site] - instead[site]
                moved = away[rows].to(gradient)
                lost = (gradient * moved).sum(-1)
                found = lost.transpose(1, 2).to(scores) / len(way)
                writers = self.sites[site].writers
                so_far = scores[:, writers]
                scores[:, writers] = so_far.index_add(0, rows, found)
        return scores * self.free[:, None]
