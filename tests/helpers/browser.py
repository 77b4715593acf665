"""A real Chromium for tests: the system's own, driven by playwright; without one, tests skip with
the reason.

As a script (``make browser``) it installs one on Debian as root, or says in a line which tests are
left out without one.
"""

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
PACKAGES = ("--no-install-recommends", "chromium", "fonts-dejavu-core")
QUIETLY = {"DEBIAN_FRONTEND": "noninteractive"}
LEFT_OUT = (
    "No Chrome or Chromium is here, so the tests that open pages in one (in tests/show) are left out: "
    "to have them, install Chrome, or run "
    "'sudo apt-get install chromium', or name one in QKSCOPE_CHROMIUM.\n"
)
SCREENSHOTS = Path(__file__).parents[2] / "runs" / "screenshots"
ARGUMENTS = ["--no-sandbox"]  # containers run as root
SCREENS = [("light", 1280, False), ("dark", 1280, True), ("phone", 390, False)]


def find_browser() -> str | None:
    """Path of a Chromium or Chrome on this machine: QKSCOPE_CHROMIUM, one on the path, a Mac's."""
    named = os.environ.get("QKSCOPE_CHROMIUM")
    places = [named] if named else [*map(shutil.which, NAMES), MAC]
    return next((place for place in places if place and Path(place).is_file()), None)


def chromium_path() -> str:
    """The browser, or a skip that says what to do."""
    pytest.importorskip("playwright", reason="playwright is not installed: pip install -e '.[dev]'")
    path = find_browser()
    if path is None:
        pytest.skip("there is no Chrome or Chromium here: `make browser` says how to have one")
    return path


@contextmanager
def chromium():
    """The browser, open."""
    path = chromium_path()
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # milliseconds: a busy machine is no fault
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


def expect(part):
    """Playwright's assertions of a part of a page, which wait until they hold."""
    from playwright import sync_api

    return sync_api.expect(part)


class Watched:
    """A page, and all it said and asked for: errors, and requests beyond where it came from."""

    def __init__(self, browser, url: str, *, width: int = 1100, height: int = 900) -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme="light"
        )
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda said: self.errors.append(said.text) if said.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def shoot(self, name: str, full: bool = True) -> None:
        """Keep a screenshot for people."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=full)

    def until(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression is true (playwright's own way evaluates in the page, which its
        policy forbids).
        """
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"not within {seconds} s: {expression}"
            self.page.wait_for_timeout(50)

    def press(self, *keys: str) -> None:
        """Press some keys, one after the other."""
        for key in keys:
            self.page.keyboard.press(key)

    def check_screens(self, name: str) -> None:
        """In light, in dark and on a phone nothing but what scrolls by itself is wider than the
        window; keep shots.
        """
        before = self.page.viewport_size
        for screen, width, dark in SCREENS:
            self.page.set_viewport_size({"width": width, "height": 844})
            self.page.emulate_media(color_scheme="dark" if dark else "light")
            self.page.wait_for_timeout(400)
            self.shoot(f"{name}-{screen}")
            assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                name,
                screen,
            )
            ink, paper = self.page.evaluate(
                "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
                ".map((text) => text.match(/\\d+/g).map(Number).reduce((a, b) => a + b))"
            )
            assert (ink > paper) is dark
        assert self.errors == []
        self.page.set_viewport_size(before)
        self.page.emulate_media(color_scheme="light")


def bring_browser() -> str:
    """Install Chromium where that can be done; returns a sentence, or nothing where there is one."""
    if find_browser() is None and shutil.which("apt-get") and os.geteuid() == 0:
        print("Installing Chromium for the tests of the pages ...", flush=True)
        quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, **QUIETLY}, "check": False}
        subprocess.run(["apt-get", "update", "-qq"], **quiet)
        subprocess.run(["apt-get", "install", "-qq", "--yes", *PACKAGES], **quiet)
    return "" if find_browser() else LEFT_OUT


if __name__ == "__main__":
    print(bring_browser(), end="")
