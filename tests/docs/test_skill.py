"""An agent that has the skill file alone: its commands run as written, and what it says of the JSON
is there.
"""

import json
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKILL = (ROOT / "skills" / "qkscope" / "SKILL.md").read_text()
PROMPTS = [
    f"After {a} and {b} went to the park, {b} gave a bell to"
    for a, b in (("Mary", "John"), ("Laura", "Paul"))
]


def test_the_skill_file_alone_drives_the_tool(qkscope, tmp_path):
    """Every command with its words in capitals filled in, the head from the first answer, as the
    file says.
    """
    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    )
    words = {"PROMPT": PROMPTS[0], "FILE": str(tmp_path / "mine.jsonl"), "MODEL": "nano:mixed"}
    commands = re.findall(r"```bash\n\s*qkscope (.+)\n", SKILL)
    assert len(commands) == 4
    _, printed, _ = qkscope(*re.search(r"`qkscope (schema why)`", SKILL)[1].split())
    tables = json.loads(printed)["properties"]["tables"]["properties"]
    columns, filled = (
        {name: set(table["items"]["properties"]) for name, table in tables.items()},
        set(),
    )
    for command in commands:
        code, printed, said = qkscope(*(words.get(word, word) for word in shlex.split(command)))
        assert code == 0, said
        found = {name: rows for name, rows in json.loads(printed)["tables"].items() if rows}
        words.setdefault("HEAD", found["heads"][0]["head"] if "heads" in found else None)
        assert all(set(rows[0]) <= columns[name] for name, rows in found.items())
        filled |= set(found)
    assert {"heads", "because", "relation", "output", "reasons", "kept"} <= filled
    for line in [line for line in SKILL.splitlines() if "`tables." in line]:
        paths = re.findall(r"`tables\.(\w+)\[\]\.(\w+)`", line)
        beside = set(re.findall(r"`(\w+)`", line)) - {"yes", "open"}
        assert all(column in columns[table] for table, column in paths), line
        assert beside <= columns[paths[0][0]], line


def test_links_of_the_readme_and_of_what_agents_read_lead_somewhere():
    for page in ("README.md", "llms.txt", "CONTRIBUTING.md", "papers/README.md"):
        links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", (ROOT / page).read_text())
        assert links or page == "CONTRIBUTING.md"
        assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == [], (
            page
        )
