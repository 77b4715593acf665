"""A GGUF file read once, for all who ask for it.

transformers opens a file for its config, for its weights and for its tokenizer, and the package `gguf` reads each time
number by number, every one an array on its own: of the 65 s that Gemma with its 262,144 tokens took, 45 went there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from qkscope.runs.progress import counting


class QuickReader(gguf.GGUFReader):
    """The package's reader, for which a list is one piece of the file instead of many."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, total, start = gguf.GGUFValueType(kind[0]), int(count[0]), orig_offs + 12
        if item is gguf.GGUFValueType.STRING:
            listed, stop = self._strings(start, total)
        elif item in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[item], total)
            listed, stop = list(np.asarray(values).reshape(-1, 1)), start + values.nbytes
        else:  # lists of lists are short
            return super()._get_field_parts(orig_offs, raw_type)
        if len(listed) != total:
            raise ValueError("the file ends within a list")
        return stop - orig_offs, [kind, count, *listed], list(range(2, 2 + total)), [gguf.GGUFValueType.ARRAY, item]

    def _strings(self, start: int, total: int) -> tuple[list[memoryview], int]:
        """Some strings, each behind its length, as far as the file goes; and where they end."""
        order = "little" if self.endianess == gguf.GGUFEndian.LITTLE else "big"
        content, at = memoryview(self.data), start
        found: list[memoryview] = []
        while len(found) < total and at + 8 <= len(content):
            stop = at + 8 + int.from_bytes(content[at : at + 8], order)  # type: ignore[arg-type]
            found.append(content[at + 8 : stop])
            at = stop
        return found, at


@contextmanager
def opened_once(file: Path) -> Iterator[QuickReader]:
    """Within it whoever opens a GGUF file is given this one, read already, and counts its tensors on our line."""
    from transformers import modeling_gguf_pytorch_utils as theirs

    reader = QuickReader(file)
    doors: list[tuple[Any, str, Callable[..., Any]]] = [
        (gguf, "GGUFReader", lambda *_: reader),
        (theirs, "tqdm", _told),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in doors]
    for module, name, ours in doors:
        setattr(module, name, ours)
    try:
        yield reader
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _told(tensors: list[Any], **_: Any) -> Iterator[Any]:
    """Every tensor, and how many are done: larger ones count for more."""
    with counting(sum(int(tensor.n_elements) for tensor in tensors) // 10**6, "million weights") as advance:
        done = 0
        for tensor in tensors:
            yield tensor
            before, done = done, done + int(tensor.n_elements)
            advance(done // 10**6 - before // 10**6)
