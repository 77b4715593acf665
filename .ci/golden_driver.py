"""What the golden net asks inside one Python process; prints JSON.

python golden_driver.py commands    run commands (JSON on stdin: lists of words), one by one
python golden_driver.py inside      ask `why` inside the blocks that change a model
"""

import io
import json
import sys
from contextlib import AbstractContextManager, ExitStack, redirect_stderr, redirect_stdout
from typing import Any

PROMPT = "hat : O jam : Z cat : B jam :"


def main() -> None:
    """Print the answers to what is asked."""
    answers = commands(json.load(sys.stdin)) if sys.argv[1] == "commands" else inside()
    json.dump(answers, sys.stdout)


def commands(words: list[list[str]]) -> list[dict[str, Any]]:
    """Run commands: exit codes, and what they wrote."""
    from qkscope.cli import main as qkscope

    answers = []
    for command in words:
        sys.argv = ["qkscope", *command]
        out = io.StringIO()
        err = io.StringIO()
        code: Any = 0
        try:
            with redirect_stdout(out), redirect_stderr(err):
                qkscope()
        except SystemExit as ended:
            code = ended.code or 0
        answers.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
    return answers


def inside() -> dict[str, Any]:
    """Results by what was changed."""
    import qkscope as qk

    scope = qk.Scope.load("nano:mixed")
    changes = {
        "ablate a head": [scope.ablate("L0H1")],
        "ablate an MLP": [scope.ablate("M0")],
        "hide": [scope.hide("L1H0", key=5)],
        "replace": [scope.replace(4, "pen")],
        "ablate and hide": [scope.ablate("L0H0"), scope.hide("L1H1", 1)],
    }
    return {name: ask(scope, blocks) for name, blocks in changes.items()}


def ask(scope: Any, blocks: list[AbstractContextManager[None]]) -> dict[str, Any]:
    """Why of one head, of all heads, and what the changed model says, inside the blocks."""
    import qkscope as qk

    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        head = qk.why(scope, PROMPT, head="L1H0").to_json()
        heads = qk.why(scope, PROMPT).to_json()
        text = scope.generate(PROMPT, 3)
    head["tables"] |= {f"all {name}": rows for name, rows in heads["tables"].items()}
    head["tables"]["model"] = [{"text": text, "answer": heads["answer"]}]
    return head


if __name__ == "__main__":
    main()
