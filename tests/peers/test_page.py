"""The page about other tools does what it says: its blocks run in their order, and print what stands below them."""

import re
import runpy
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "connect.md"
BLOCK = r"```python\n(.*?)```\n```text\n(.*?)```"


def test_the_blocks_of_the_page_print_what_it_shows(tmp_path, capsys):
    found = re.findall(BLOCK, PAGE.read_text(), flags=re.DOTALL)
    assert len(found) == len(re.findall("```python", PAGE.read_text())) == 5
    script = tmp_path / "connect.py"  # a file: nnsight reads the source of a trace
    script.write_text("".join(code for code, _ in found))
    runpy.run_path(str(script))
    printed, shown = capsys.readouterr().out, "".join(text for _, text in found)
    number = r"\d\.\d+"
    assert re.sub(number, "#", printed) == re.sub(number, "#", shown)
    ours, pages = ([float(x) for x in re.findall(number, text)] for text in (printed, shown))
    assert max(abs(x - y) for x, y in zip(ours, pages, strict=True)) < 1e-4
