"""Word classes that a model itself gives: clusters of its input embedding, common tokens apart.

Rules speak of kinds of words, and a kind is a union of classes. Which tokens stand together is not
chosen by hand: rows of the input embedding, centred and normed, are clustered by their cosine
(spherical k-means on the tokens that the tokenizer learnt first), and the tokens that the documents
use most are classes of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkscope import Scope
from qkscope.findings.rules import Kind
from qkscope.model.encode import token_texts

#: Clusters of the embedding, and as many common tokens that are classes of their own.
CLUSTERS = 64
_LEARNT_FIRST = 16_000  # tokens that clusters are made of: later ones are rare
_LEAST = 4  # tokens of a cluster, on average
_STEPS = 25  # of k-means
_BLOCK = 32_768  # tokens that are assigned together
_EXAMPLES = 4


@dataclass(frozen=True)
class WordClasses:
    """A class for every token of the vocabulary.

    Parameters
    ----------
    of_token : its number.
    common : how often the documents have each token.
    """

    of_token: Int[Tensor, " v"]
    common: Int[Tensor, " v"]
    scope: Scope

    @classmethod
    def of(cls, scope: Scope, ids: Int[Tensor, " n"]) -> WordClasses:
        """Cluster a model's embedding; ``ids`` are all tokens of the documents."""
        weight = scope.model.get_input_embeddings().weight.detach()
        common = torch.bincount(ids, minlength=len(weight))
        of_token = clusters(weight)
        number = int(of_token.max()) + 1
        used = int((common > 0).sum())
        apart = common.topk(min(number, used)).indices
        of_token[apart] = number + torch.arange(len(apart))
        return cls(of_token, common, scope)

    @property
    def count(self) -> int:
        """How many classes there are."""
        return int(self.of_token.max()) + 1

    def kind(self, members: Bool[Tensor, " c"]) -> Kind:
        """The kind made of some classes, its commonest tokens as examples."""
        tokens = members[self.of_token].nonzero()[:, 0]
        best = self.common[tokens].topk(min(_EXAMPLES, len(tokens))).indices
        examples = token_texts(self.scope, tokens[best].tolist())
        numbers = members.nonzero()[:, 0].tolist()
        return Kind(frozenset(tokens.tolist()), tuple(examples), tuple(numbers))


def clusters(weight: Float[Tensor, "v d"]) -> Int[Tensor, " v"]:
    """The cluster of each row of an embedding, by cosine after centring.

    The first centres are rows drawn by a fixed seed.
    """
    mean = weight.float().mean(0)

    def directions(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        return torch.nn.functional.normalize(rows.float() - mean, dim=1)

    first = directions(weight[:_LEARNT_FIRST]).cpu()
    number = min(CLUSTERS, max(len(first) // _LEAST, 1))
    drawn = torch.randperm(len(first), generator=torch.Generator().manual_seed(0))
    centres = first[drawn[:number]]
    for _ in range(_STEPS):
        nearest = (first @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add(0, nearest, first)
        centres = torch.nn.functional.normalize(sums, dim=1)
    blocks = [(directions(rows).cpu() @ centres.T).argmax(1) for rows in weight.split(_BLOCK)]
    return torch.cat(blocks)
