"""Reads the Dockerfile of the serving page as a container engine would. Needs no engine, and runs none."""

from __future__ import annotations

import ast
import json
import re
import tomllib

from tests.docs.pages import USERS, blocks
from tests.helpers.places import ROOT

PAGE, TUTORIAL = (USERS / name for name in ("serving.md", "tutorial.md"))
PROJECT = tomllib.loads((ROOT / "bundles/pyproject.toml").read_text(encoding="utf-8"))["project"]
WHEEL = f"cgbundle-{PROJECT['version']}-py3-none-any.whl"


def steps() -> list[tuple[str, str]]:
    """Returns (instruction, arguments) for every line of the Dockerfile."""
    (dockerfile,) = [block.text for block in blocks(PAGE.read_text(encoding="utf-8")) if block.language == "dockerfile"]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in dockerfile.splitlines()]


def behind(name: str) -> list[str]:
    return [rest for instruction, rest in steps() if instruction == name]


def test_the_instructions_are_in_an_order_that_works() -> None:
    names = [name for name, _ in steps()]
    assert set(names) == {"FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "CMD"}
    assert names[:2] == ["FROM", "WORKDIR"] and names[-1] == "CMD" and names.index("USER") > names.index("RUN", names.index("COPY"))
    assert f"useradd --system {behind('USER')[0]}" in behind("RUN")
    (image,) = re.findall(r"^python:3\.(\d+)-slim$", behind("FROM")[0])
    assert int(image) >= int(PROJECT["requires-python"].removeprefix(">=3."))


def test_a_folder_keeps_its_name() -> None:
    """COPY with several sources, or into an existing folder, would mix the files of bundles."""
    copies = [rest.split() for rest in behind("COPY")]
    assert ["classifier.cgb", "classifier.cgb"] in copies and all(len(words) == 2 for words in copies)
    assert [f"dist/{WHEEL}", "/tmp/"] in copies and ["server.py", "."] in copies


def test_what_is_installed_is_there() -> None:
    wheel, packages = re.findall(r"pip install --no-cache-dir /tmp/(\S+) (.+)", "\n".join(behind("RUN")))[0]
    assert (wheel, packages.split()) == (WHEEL, ["fastapi", "uvicorn", "numpy"])
    assert WHEEL in PAGE.read_text(encoding="utf-8").partition("## On another machine")[2].partition("\n## ")[0]


def test_the_command_serves_the_tutorials_server_where_its_health_is_asked() -> None:
    command, check = json.loads(behind("CMD")[0]), json.loads(behind("HEALTHCHECK")[0].removeprefix("CMD "))
    server = next(block.text for block in blocks(TUTORIAL.read_text(encoding="utf-8")) if block.text.startswith("# server.py"))
    assert command[:2] == ["uvicorn", "server:app"] and command[command.index("--port") + 1] == behind("EXPOSE")[0]
    assert command[command.index("--host") + 1] == "0.0.0.0", "localhost is the container's own"
    ast.parse(check[2])
    (port, path) = re.findall(r"localhost:(\d+)(/\w+)", check[2])[0]
    assert (check[:2], port) == (["python", "-c"], behind("EXPOSE")[0]) and f'@app.get("{path}")' in server
    assert {alias.name for node in ast.walk(ast.parse(server)) if isinstance(node, ast.Import) for alias in node.names} == {
        "cgbundle", "numpy",
    }  # fmt: skip
