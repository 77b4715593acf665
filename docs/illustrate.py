"""Run what a page says, and put what came of it into the page: ``python docs/illustrate.py start.md
because.md``.

Python blocks run one after the other in one namespace, as ``tests/docs/test_docs.py`` runs them. What
stands between ``<!-- printed -->`` and ``<!-- /printed -->`` becomes what the block before printed;
a text block that begins with ``$ qkscope`` becomes what the command prints; ``<!-- picture FILE of
NAME at SELECTOR -->`` draws a part of the page of a result (or of a run folder) into docs/figures
with Chromium (``top``: down to the first chart's end); ``<!-- made -->`` says when and where.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
WIDEST = 84  # characters of a line that the theme shows without scrolling
TALLEST = 1040  # pixels of a picture: an atlas goes on for pages
PART = re.compile(
    r"```python\n(?P<code>.*?)```"
    r"|<!-- printed -->\n.*?<!-- /printed -->"
    r"|```text\n\$ (?P<command>qkscope [^\n]*)\n.*?```"
    r"|<!-- picture (?P<file>\S+) of (?P<name>\S+) at (?P<at>[^>]+) -->"
    r"|<!-- made -->\n.*?<!-- /made -->",
    flags=re.DOTALL,
)


class Page:
    """One page while it runs: the names its Python has made, and what it printed last."""

    def __init__(self, path: Path, hardware: str) -> None:
        self.path, self.hardware = path, hardware
        self.names: dict[str, Any] = {}
        self.printed = ""

    def run(self) -> None:
        """Run every part in order, in a folder of its own, and write the page anew."""
        text = self.path.read_text()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path("examples").symlink_to(DOCS.parent / "examples")
            text = PART.sub(self._part, text)
        self.path.write_text(text)

    def _part(self, part: re.Match[str]) -> str:
        whole = part[0]
        if part["code"] is not None:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(part["code"], self.path.name, "exec"), self.names)  # our own page
            self.printed = out.getvalue().rstrip()
        elif part["command"] is not None:
            return f"```text\n$ {part['command']}\n{_folded(_said(part['command']))}\n```"
        elif part["file"] is not None:
            self._draw(DOCS / "figures" / part["file"], part["name"], part["at"])
        elif whole.startswith("<!-- printed"):
            return f"<!-- printed -->\n```text\n{_folded(self.printed)}\n```\n<!-- /printed -->"
        else:
            command = f"python docs/illustrate.py {self.path.name}"
            made = f"*Made by `{command}` on {self.hardware}, {datetime.date.today()}.*"
            return f"<!-- made -->\n{made}\n<!-- /made -->"
        return whole

    def _draw(self, picture: Path, name: str, selector: str) -> None:
        from qkscope import write_report

        result = self.names.get(name)
        page = Path(name) / "report.html" if result is None else write_report("page.html", result)
        picture.parent.mkdir(parents=True, exist_ok=True)
        _shoot(page.absolute().as_uri(), selector, picture)


def _said(command: str) -> str:
    """What a command prints; of one that was refused, its sentence."""
    ran = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    if ran.returncode not in (0, 2):
        raise SystemExit(f"{command} failed:\n{ran.stderr}")
    return (ran.stdout if ran.returncode == 0 else ran.stderr).strip()


def _folded(text: str) -> str:
    """Long sentences as a terminal folds them, but at words; rows of a table stay as they are."""
    return "\n".join(
        textwrap.fill(line, WIDEST, subsequent_indent="    ", break_on_hyphens=False)
        if len(line) > WIDEST and "   " not in line.strip()
        else line
        for line in text.splitlines()
    )


def _shoot(url: str, selector: str, picture: Path) -> None:
    """Keep an element of a page as a small PNG."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1000, "height": 760})
        page.goto(url)
        page.wait_for_timeout(500)
        box = page.locator("section" if selector == "top" else selector).first.bounding_box(
            timeout=5000
        )
        top, bottom = 0 if selector == "top" else box["y"] - 8, box["y"] + box["height"] + 8
        clip: Any = {"x": 16, "y": top, "width": 968, "height": min(bottom - top, TALLEST)}
        page.screenshot(path=picture, full_page=True, clip=clip)
        browser.close()
    Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)


def main() -> None:
    """Run the pages that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", help="Like start.md.")
    parser.add_argument("--hardware", default="two CPU cores")
    given = parser.parse_args()
    for name in given.pages:
        Page(DOCS / name, given.hardware).run()


if __name__ == "__main__":
    main()
