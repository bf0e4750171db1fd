"""Runs the code blocks of pages in order, each page in its own folder, and compares their output.

tests/README.md explains the words after a block's language.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tests.docs.console import Command, as_check, check_options, commands, is_simple, words
from tests.docs.pages import Block, begins_after, blocks
from tests.docs.shown import difference
from tests.helpers.places import ROOT

FILE = re.compile(r"# (\w[\w.-]*\.\w+)\n")
"""First line of a block that is a file."""

PORT = "8123"
"""Port number in pages; a free port replaces it."""

DEAR = ("slow", "gpu")
PATIENCE = 300
"""Seconds within which a background command must print the output that the page shows."""


class Runner:
    """Runs pages in folders below `base`. As a context manager, it ends its processes at exit.

    `seconds` has the CPU time of every `cgcompile` command. `whole` may hold "slow" and "gpu": blocks with these words run too. A
    build that another page has made is copied.
    """

    def __init__(self, base: Path, whole: Collection[str] = ()) -> None:
        self.base, self.whole = base, frozenset(whole)
        self._ran: dict[Path, Path] = {}
        self._built: dict[tuple[str, ...], tuple[Path, dict[str, Any]]] = {}
        self._commands: Worker | None = None
        self.seconds: list[tuple[float, str]] = []
        bin = base / "bin"
        bin.mkdir(parents=True)
        for name, call in (("cgcompile", [sys.executable, "-m", "cgcompile_cli"]), ("python", [sys.executable])):
            (bin / name).write_text(f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n')
            (bin / name).chmod(0o700)
        paths = [str(ROOT), str(ROOT / "cli"), str(ROOT / "bundles")]
        self.environment = {
            "PATH": os.pathsep.join([str(bin), os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
            "PYTHONPATH": os.pathsep.join(paths), "CGCOMPILE_CACHE": os.environ.get("CGCOMPILE_CACHE", str(base / "cache")),
        }  # fmt: skip

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._commands:
            self._commands.close()

    def page(self, page: Path) -> Path:
        """Runs a page once, after the pages named in its `<!-- after: ... -->` comments, and returns its folder. Raises
        AssertionError with the page's line."""
        page = page.resolve()
        if page not in self._ran:
            text = page.read_text(encoding="utf-8")
            folder = self.base / str(page.relative_to(ROOT)).replace("/", "-").removesuffix(".md")
            folder.mkdir()
            for before in begins_after(text):
                shutil.copytree(self.page(page.parent / before), folder, dirs_exist_ok=True, symlinks=True)
            if not (folder / "examples").exists():
                (folder / "examples").symlink_to(ROOT / "examples")
            with PageRun(self, page, folder) as run:
                run.all(list(blocks(text)))
            self._ran[page] = folder
        return self._ran[page]

    def cgcompile(self, arguments: Sequence[str], folder: Path, variables: dict[str, str]) -> dict[str, Any]:
        """Returns {"status", "output"} of a command. A repeated build of the same file with the same options is copied."""
        key = self._key(arguments, folder)
        if key in self._built and not (folder / self._built[key][0].name).exists():
            bundle, answer = self._built[key]
            shutil.copytree(bundle, folder / bundle.name)
            return answer
        if self._commands is None:
            self._commands = Worker("tests.docs.forked", self.base, self.environment)
        request = {"arguments": list(arguments), "folder": str(folder), "environment": self.environment | variables}
        answer = self._commands.ask(request)
        self.seconds.append((round(answer["seconds"], 1), shlex.join(arguments)))
        if key and answer["status"] == 0:
            last = folder / answer["output"].splitlines()[-1]
            if last.is_dir():
                self._built[key] = (last, answer)
        return answer

    def _key(self, arguments: Sequence[str], folder: Path) -> tuple[str, ...]:
        if arguments[0] != "build" or not (folder / arguments[1]).is_file():
            return ()
        return (*arguments, (folder / arguments[1]).read_text())


class Worker:
    """A process that answers lines of JSON."""

    def __init__(self, module: str, folder: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], cwd=folder, env=os.environ | environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the answer. Raises AssertionError if the process has ended."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended with status {self._process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


class PageRun:
    """One page while it runs."""

    def __init__(self, runner: Runner, page: Path, folder: Path) -> None:
        self.runner, self.page, self.folder = runner, page, folder
        self._python: Worker | None = None
        self._background: list[subprocess.Popen[str]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = str(free.getsockname()[1])

    def __enter__(self) -> PageRun:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._background:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate()
        if self._python:
            self._python.close()

    def all(self, page_blocks: Sequence[Block]) -> None:
        """Runs the blocks. Raises AssertionError."""
        for block, after in zip(page_blocks, [*page_blocks, None][1:], strict=True):
            shown = after.text if after is not None and after.language == "text" and not FILE.match(after.text) else ""
            try:
                self._block(block, shown)
            except AssertionError as error:
                raise AssertionError(f"{self.page.relative_to(ROOT)}:{block.line}: {error}") from None

    def _block(self, block: Block, shown: str) -> None:
        file = FILE.match(block.text)
        dear = next((word for word in DEAR if word in block.words and word not in self.runner.whole), "")
        text = block.text.replace(PORT, self.port)
        if {"skip", "signature"} & set(block.words):
            return
        if block.language in ("python", "text") and file:
            (self.folder / file[1]).write_text(text.partition("\n")[2] if block.language == "text" else text)
            if block.language == "python":
                compile(text, file[1], "exec")
        elif block.language == "python":
            if "static" in block.words or dear:
                _parses(text)
            else:
                self._run_python(text, shown, block.line)
        elif block.language == "console":
            status = next((int(word.partition("=")[2]) for word in block.words if word.startswith("status=")), 0)
            ones = commands(text)
            for place, one in enumerate(ones):
                if "static" in block.words or dear:
                    self._look(one, dear == "slow")
                elif "background" in block.words:
                    self._start(one)
                else:
                    self._run(one, status if place == len(ones) - 1 else 0)

    def _run_python(self, text: str, shown: str, line: int) -> None:
        if self._python is None:
            self._python = Worker("tests.docs.session", self.folder, self.runner.environment)
        answer = self._python.ask({"code": text, "name": f"{self.page.name}:{line}"})
        got = answer["output"] + answer["failed"]
        assert shown or not answer["failed"], answer["failed"]
        assert not shown or not (missing := difference(shown, got)), f"expected: {missing}\ngot:\n{got}"

    def _look(self, one: Command, run_as_check: bool) -> None:
        """Checks a command without running it: its options and its files, and for a build the check of its model."""
        if not is_simple(one.line):
            assert subprocess.run(["bash", "-n", "-c", one.line], check=False).returncode == 0, one.line
            return
        _, (_, *arguments) = words(one.line)
        check_options(arguments)
        for word in arguments:
            assert not word.endswith(".py") or self._exists(word), f"{word}: no block of the page has written it"
        if run_as_check and arguments[0] == "build":
            checked = as_check(arguments)
            answer = self.runner.cgcompile(checked, self.folder, {})
            assert answer["status"] == 0, f"cgcompile {shlex.join(checked)}:\n{answer['output']}"

    def _exists(self, name: str) -> bool:
        return (self.folder / name).exists() or (ROOT / "examples" / name).exists()

    def _run(self, one: Command, status: int) -> None:
        if is_simple(one.line):
            variables, (_, *arguments) = words(one.line)
            answer = self.runner.cgcompile(arguments, self.folder, variables)
        else:
            done = subprocess.run(
                ["bash", "-c", one.line], cwd=self.folder, env=os.environ | self.runner.environment, text=True, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            answer = {"status": done.returncode, "output": done.stdout}
        got = answer["output"].replace(", from the cache", "")  # printed if another page has built the same model
        assert answer["status"] == status, f"$ {one.line}\nexit status {answer['status']}, expected {status}:\n{got}"
        assert not one.shown or not (missing := difference(one.shown, got)), f"$ {one.line}\nexpected: {missing}\ngot:\n{got}"

    def _start(self, one: Command) -> None:
        log = self.folder / f"background-{len(self._background)}.log"
        with open(log, "w") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {one.line}"], cwd=self.folder, env=os.environ | self.runner.environment, text=True,
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._background.append(process)
        until = time.monotonic() + PATIENCE
        while difference(f"...\n{one.shown.strip()}\n...", log.read_text()):
            assert process.poll() is None and time.monotonic() < until, f"$ {one.line}\n{log.read_text()}"
            time.sleep(0.05)


def _parses(text: str) -> None:
    try:
        compile(text, "block", "exec")
    except SyntaxError as error:
        raise AssertionError(f"no Python: {error}") from None


def run_pages(pages: Sequence[Path], whole: Collection[str] = ()) -> None:
    """Runs pages in a temporary folder."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="cgcompile-docs-") as base, Runner(Path(base) / "pages", whole) as runner:
        for page in pages:
            begin = time.perf_counter()
            runner.page(page)
            print(f"{page.relative_to(ROOT)}: {time.perf_counter() - begin:.1f} s")
        for seconds, command in sorted(runner.seconds, reverse=True)[:10]:
            print(f"{seconds:8.1f} s of a processor  cgcompile {command}")
