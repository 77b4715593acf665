"""Natural text: documents, and sides that share no eight tokens in a row."""

import logging
import random

import pytest

from qkscope.errors import BadInput
from qkscope.texts.documents import FEW_FILES, Document, read_documents
from qkscope.texts.holdout import PASSAGE_LENGTH, RUN, SHARES, split


def encode(text: str) -> list[int]:
    """One token a word: w17 is 17."""
    return [int(word[1:]) for word in text.split()]


def words(ids) -> str:
    return " ".join(f"w{i}" for i in ids)


def drawn(count: int, length: int = 600, seed: int = 0) -> list[list[int]]:
    """Documents of random words: of 5,000 words no eight come twice."""
    lot = random.Random(seed)
    return [[lot.randrange(5000) for _ in range(length)] for _ in range(count)]


def documents(ids) -> list[Document]:
    return [Document(f"d{i}", words(own)) for i, own in enumerate(ids)]


def sides_of(found) -> dict[str, set[str]]:
    """The sides on which each document stands."""
    where: dict[str, set[str]] = {}
    for side, passages in found.items():
        for passage in passages:
            where.setdefault(passage.document, set()).add(side)
    return where


def runs(passages) -> set[tuple[int, ...]]:
    return {
        passage.ids[i : i + RUN] for passage in passages for i in range(len(passage.ids) - RUN + 1)
    }


def test_each_file_of_a_folder_is_a_document_and_what_cannot_be_read_is_one_sentence(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02d}.txt").write_text(f"Text {i}\n\nand more.\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "note.md").write_text("A note.")
    (tmp_path / "table.csv").write_text("1,2")
    (tmp_path / ".hidden.txt").write_text("not this")
    found = read_documents([tmp_path])
    assert [document.text for document in found] == [
        f"Text {i}\n\nand more." for i in range(20)
    ] + ["A note."]
    assert read_documents([tmp_path / "03.txt", tmp_path])[0].text == "Text 3\n\nand more."
    (tmp_path / "raw.txt").write_bytes(b"\xff\xfe\x00x")
    for path, says in [
        ("nothing.txt", "cannot be read"),
        ("raw.txt", "not text in UTF-8"),
        ("/dev/zero", "no plain file"),  # it never ends
    ]:
        with pytest.raises(BadInput, match=says):
            read_documents([tmp_path / path])
    (tmp_path / "ends.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_documents([tmp_path / "ends.txt"])[0].text == "one\ntwo\nthree"


@pytest.mark.parametrize("mark", ["\n\n", "\n", " "])
def test_one_long_file_is_cut_into_sections_and_says_so(tmp_path, caplog, mark):
    paragraph = "It was a day like any other in the town and nobody took note of it."
    (tmp_path / "book.txt").write_text(mark.join(f"{i}. {paragraph}" for i in range(1000)))
    with caplog.at_level(logging.WARNING):
        found = read_documents([tmp_path / "book.txt"])
    assert f"cut into {len(found)} sections" in caplog.text
    assert 16 <= len(found) <= 32
    joined = (
        mark.join(document.text for document in found)
        if mark != " "
        else "".join(d.text for d in found)
    )
    assert joined == (tmp_path / "book.txt").read_text()
    assert all(document.text.lstrip()[0].isdigit() for document in found) or mark == " "


@pytest.mark.parametrize("seed", [0, 1])
def test_sides_hold_their_shares_whole_documents_and_no_run_twice(seed):
    ids = drawn(60, seed=seed)
    found = split(documents(ids), encode, length=100, seed=seed)
    assert all(len(sides) == 1 for sides in sides_of(found).values())
    total = sum(map(len, ids))
    for side, share in SHARES.items():
        assert sum(len(p.ids) for p in found[side]) == pytest.approx(share * total, rel=0.1)
    by_side = [runs(passages) for passages in found.values()]
    assert len(set.union(*by_side)) == sum(map(len, by_side))


def test_documents_that_share_much_stay_together_and_a_single_shared_run_ties_nothing(caplog):
    ids = drawn(24)
    ids[20][:100] = ids[3][200:300]  # a sixth of one in another
    ids[11][300:500] = ids[20][300:500]  # and a third in that one
    for seed in range(4):
        found = split(documents(ids), encode, length=50, seed=seed)
        where, groups = sides_of(found), {p.document: p.group for ps in found.values() for p in ps}
        assert where["d3"] == where["d20"] == where["d11"]
        assert len(where["d3"]) == 1
        assert groups["d3"] == groups["d20"] == groups["d11"] != groups["d4"]
    for own in ids:
        own[210:218] = range(8)  # a greeting in all of them
    with caplog.at_level(logging.INFO):
        found = split(documents(ids), encode, length=100)
    holders = {side for side, passages in found.items() if tuple(range(8)) in runs(passages)}
    assert holders == {"test"}  # the larger sides give way
    dropped = 24 - len({p.document for p in found["test"]})
    assert f"{dropped} of 144 passages share 8 tokens in a row" in caplog.text
    assert sum(map(len, found.values())) == 144 - dropped


def test_passages_are_the_documents_ids_in_order_and_too_few_documents_say_how_many_are_needed():
    ids = drawn(24, length=PASSAGE_LENGTH)
    found = split(documents(ids), lambda text: [7, *encode(text), 8])
    for i, own in enumerate(ids):
        pieces = [p.ids for passages in found.values() for p in passages if p.document == f"d{i}"]
        assert [token for piece in pieces for token in piece[1:]] == own
        assert {piece[0] for piece in pieces} == {7}
        assert sorted(map(len, pieces)) == [
            PASSAGE_LENGTH // 2 + 1,
            PASSAGE_LENGTH // 2 + 1,
        ]  # as few as can be, about as long
    assert set(split(documents(drawn(6)), encode, sides={"fit": 1, "test": 1})) == {"fit", "test"}
    for ids, options, says in (
        (drawn(FEW_FILES - 1), {}, "a split needs 12 documents or more, but got 11: give more"),
        (drawn(1) * 30, {}, "and these 30 repeat each other so much that they count as 1: give"),
    ):
        with pytest.raises(BadInput, match=says):
            split(documents(ids), encode, **options)
