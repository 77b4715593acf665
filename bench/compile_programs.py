"""Compile Tracr's library programs and keep their weights with the truth about every head.

Needs `tracr-pypi` and jax.

    python bench/compile_programs.py bench/qkscope_bench/known      # tracr-pypi 1.0.0, jax,
    dm-haiku, chex

Who writes what a head reads is read off the compiled weights: a dimension of the residual stream is
read by a head's query (key) where it meets any dimension of a key (query) in ``W_Q W_Kᵀ``, and
written by what puts anything into it. The token that the compiler sets first is no reason among the
other keys, so its own dimension does not count.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tracr.compiler import compiling, lib
from tracr.rasp import rasp

LETTERS = ["a", "b", "c", "d"]
NUMBERS = [1, 2, 3, 4]
BRACKETS = ["(", ")", "{", "}"]
BOS = "BOS"
LONGEST = 5
PROGRAMS = {
    "length": (lib.make_length(), LETTERS),
    "reverse": (lib.make_reverse(rasp.tokens), LETTERS),
    "pair_balance": (lib.make_pair_balance(rasp.tokens, "(", ")"), BRACKETS),
    "shuffle_dyck": (lib.make_shuffle_dyck(["()"]), BRACKETS[:2]),
    "shuffle_dyck2": (lib.make_shuffle_dyck2(), BRACKETS),
    "hist": (lib.make_hist(), LETTERS),
    "sort_unique": (lib.make_sort_unique(rasp.tokens, rasp.tokens), NUMBERS),
    "sort": (lib.make_sort(rasp.tokens, rasp.tokens, max_seq_len=LONGEST, min_key=1), NUMBERS),
    "sort_freq": (lib.make_sort_freq(LONGEST), LETTERS),
    "frac_prevs": (lib.make_frac_prevs(rasp.tokens == "a"), LETTERS),
    "shift_by": (lib.shift_by(1, rasp.tokens), LETTERS),
    "detect_pattern": (lib.detect_pattern(rasp.tokens, "ab"), LETTERS),
    "count_less_freq": (lib.make_count_less_freq(2), LETTERS),
    "count": (lib.make_count(rasp.tokens, "a"), LETTERS),
}
MATRICES = ("attn/query", "attn/key", "attn/value", "attn/linear", "mlp/linear_1", "mlp/linear_2")


def truth(embedded, layers, heads, labels):
    """By head that reads anything, the writers of its query and of its key."""
    writes = {"embedding": embedded.any(0)}
    found = {}
    for layer, (q, k, v, o, _, down) in enumerate(layers):
        own = [
            [part.reshape(len(labels), heads, -1)[:, i] for part in (q, k, v, o.T)]
            for i in range(heads)
        ]
        for i, (query, key, _, _) in enumerate(own):
            met = query @ key.T != 0
            if met.any():
                met[:, [label == f"tokens:{BOS}" for label in labels]] = False
                read = {"query": met.any(1), "key": met.any(0)}
                found[f"L{layer}H{i}"] = {
                    side: [name for name, dims in writes.items() if (dims & some).any()]
                    for side, some in read.items()
                }
        writes |= {
            f"L{layer}H{i}": (value @ out.T).any(0) for i, (_, _, value, out) in enumerate(own)
        }
        writes[f"M{layer}"] = down.any(0)
    return found


def main(folder):
    """Write ``programs.json``, and every program's weights in a row, zeros left out, in
    ``programs.safetensors``.
    """
    kept = {}
    tensors = {}
    for name, (program, vocabulary) in PROGRAMS.items():
        model = compiling.compile_rasp_to_model(program, set(vocabulary), LONGEST, compiler_bos=BOS)
        config = model.model_config
        params = model.params
        ids = model.input_encoder.encoding_map
        assert not any(np.array(own["b"]).any() for own in params.values() if "b" in own)
        every = [np.array(params[module]["embeddings"]) for module in ("token_embed", "pos_embed")]
        layers = [
            [np.array(params[f"transformer/layer_{layer}/{at}"]["w"]) for at in MATRICES]
            for layer in range(config.num_layers)
        ]
        row = np.concatenate(
            [part.ravel() for part in (*every, *(part.T for own in layers for part in own))]
        )
        tensors |= {
            f"{name}.at": row.nonzero()[0].astype(np.int32),
            f"{name}.is": row[row != 0].astype(np.float32),
        }
        test = [vocabulary[i % len(vocabulary)] for i in (0, 1, 0, 3, 2)]
        kept[name] = {
            "vocabulary": [str(token) for token in sorted(ids, key=ids.get)],
            "hidden_size": len(model.residual_labels),
            "num_attention_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "head_dim": config.key_size,
            "intermediate_size": config.mlp_hidden_size,
            "labels": model.residual_labels,
            "truth": truth(np.concatenate(every), layers, config.num_heads, model.residual_labels),
            "test": list(map(str, test)),
            "logits": [
                np.array(own)[0].round(4).tolist() for own in model.apply([BOS, *test]).attn_logits
            ],
        }
    Path(folder, "programs.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    save_file(tensors, Path(folder, "programs.safetensors"))


if __name__ == "__main__":
    main(sys.argv[1])
