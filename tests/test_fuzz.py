"""Readers meet anything: bytes, half files, JSON of the wrong shape. They answer, or refuse in a sentence.

Heads are fuzzed in test_result.py, files of your own in test_jsonl.py.
"""

import json
from html.parser import HTMLParser

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qkscope.runs.result import Result, plain_value
from qkscope.show.page import report_html, script_json, write_report

many = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(many, max_examples=40)
@given(st.text(max_size=5, alphabet=st.sampled_from("a\ud800\u2028👩é\x00<")))
def test_a_run_folder_of_any_text_reads_back(tmp_path, text):
    """Half a surrogate too, which UTF-8 cannot hold and JSON can."""
    result = Result("fuzz", {"table": [{"token": text}]}, answer=text, provenance={"asked": {"prompt": text}})
    found = Result.read(result.write(tmp_path / "run"))
    assert found.tables == result.tables
    assert (found.answer, found.provenance["asked"]["prompt"]) == (text, text)


# ---------------------------------------------------------------- the page's data

_odd = st.sampled_from(
    ["</script>", "</SCRIPT >", "<!--", "-->", "<script", "]]>", "\u2028", "\x00", "\ud800", "👩‍🔬", "&lt;", "{{ 7 }}"]
)
_tokens = st.lists(_odd | st.text(max_size=4), max_size=4).map("".join)
_numbers = st.floats() | st.integers(-(10**40), 10**40) | st.booleans() | st.none()


@many
@given(st.recursive(_tokens | _numbers, lambda inner: st.lists(inner) | st.dictionaries(_tokens, inner), max_leaves=9))
def test_data_in_a_script_element_reads_back_and_cannot_end_it(value):
    text = str(script_json(value))
    assert json.loads(text) == plain_value(value)
    assert not set("<>&\u2028\u2029") & set(text)
    assert text.isascii()


_rows = st.lists(
    st.fixed_dictionaries({
        "position": st.integers(0, 9), "token": _tokens, "attention": st.floats(0, 1) | st.just(float("nan")),
        "logit": st.floats(), "part": st.floats(),
    }),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(many, max_examples=60)
@given(_rows, _tokens, st.dictionaries(_tokens, _tokens | _numbers, max_size=3))
def test_a_page_of_any_tokens_holds_its_data_and_no_script_of_theirs(tmp_path, rows, name, odd):
    """Parsed as a browser would: the scripts are ours, and what stands in the data elements is what was given."""
    result = Result(
        name or "odd", {"tokens": rows, name: [odd]}, answer=name, provenance={"asked": odd, "command": name}
    )
    page = _Page(report_html([result]))
    plain = [{"position": 0, "token": "a", "attention": 1.0, "logit": 1.0}]
    assert page.scripts == _Page(report_html([Result("plain", {"tokens": plain})])).scripts
    assert plain_value(rows) in [json.loads(text)["rows"] for text in page.data]
    assert write_report(tmp_path / "page.html", result).read_text(encoding="utf-8").rstrip().endswith("</html>")


class _Page(HTMLParser):
    """The texts of a page's data elements and of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.data: list[str] = []
        self.scripts: list[str] = []
        self.into: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "script":
            self.into = self.data if dict(attrs).get("type") == "application/json" else self.scripts
            self.into.append("")

    def handle_endtag(self, tag):
        if tag == "script":
            self.into = None

    def handle_data(self, data):
        if self.into is not None:
            self.into[-1] += data
