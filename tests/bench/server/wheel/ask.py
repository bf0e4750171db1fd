"""`python tests/bench/server/wheel/ask.py FOLDER --serve VENV/bin/cgcompile`: runs clients against each model of `build.py`.

Runs in any Python that has some of `openai`, `tritonclient[http,grpc]` and `langchain-openai`; prints which are missing. VENV is
another environment, with the wheel and its extras serve, grammar and grpc. One command serves each model. Exit status 1 if a number
differs from PyTorch's, or if VENV has torch.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

TOLERANCE = 1e-4
"""Tolerance of a number: that of a build for float32."""


class Server(NamedTuple):
    """Addresses of the server; `seconds` is the time from its process's start until it serves."""

    http: str
    grpc: str
    seconds: float

    @property
    def address(self) -> str:
        return self.http.removeprefix("http://")


@contextmanager
def serving(command: list[str]) -> Iterator[Server]:
    """Runs `cgcompile serve` until the end of the block."""
    began = time.monotonic()
    process = subprocess.Popen([*command, "--port", "0", "--grpc-port", "0"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    addresses, lines = dict[str, str](), list[str]()
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("listening "):
                url = line.split()[-1]
                addresses[url.partition(":")[0]] = url.removeprefix("grpc://")
            if len(addresses) == 2 and any(text.startswith("serving ") for text in lines):
                break
        else:
            raise SystemExit("".join(lines))
        yield Server(addresses["http"], addresses["grpc"], time.monotonic() - began)
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()


def difference(got: Any, wanted: Any) -> float:
    """Returns the largest difference of two nested lists of equal shape."""
    if not isinstance(wanted, list):
        return abs(float(got) - wanted)
    if len(got) != len(wanted):
        return math.inf
    return max(difference(a, b) for a, b in zip(got, wanted, strict=True))


class Asked(NamedTuple):
    """A line of the output: the client, the model, the result, and whether it is right."""

    client: str
    model: str
    said: str
    right: bool


def numbers(client: str, model: str, error: float, count: int) -> Asked:
    return Asked(client, model, f"{count} rows, largest difference from PyTorch {error:.1e}", error < TOLERANCE)


def answers(client: str, model: str, got: list[str], expected: Any) -> Asked:
    same = sum(text == answer["answer"] for text, answer in zip(got, expected["answers"], strict=True))
    said = f"{same} of {len(got)} answers of {expected['tokens']} tokens equal those of transformers"
    return Asked(client, model, said, same == len(got))


# --- the clients ------------------------------------------------------------------------------------------------------------------


def openai_embeddings(server: Server, expected: Any) -> Iterator[Asked]:
    import openai

    client = openai.OpenAI(base_url=f"{server.http}/v1", api_key="none")
    reply = client.embeddings.create(model="minilm", input=expected["texts"])
    yield numbers("openai", "minilm", difference([row.embedding for row in reply.data], expected["embeddings"]), len(reply.data))


def openai_chat(server: Server, expected: Any) -> Iterator[Asked]:
    import openai

    client = openai.OpenAI(base_url=f"{server.http}/v1", api_key="none")
    language = expected["language"]
    got, streamed = [], []
    for answer in language["answers"]:
        asked: Any = {
            "model": "smol", "max_tokens": language["tokens"], "temperature": 0,
            "messages": [{"role": "user", "content": answer["question"]}],
        }  # fmt: skip
        got.append(client.chat.completions.create(**asked).choices[0].message.content)
        pieces = client.chat.completions.create(**asked, stream=True)
        streamed.append("".join(piece.choices[0].delta.content or "" for piece in pieces))
    yield answers("openai", "smol", got, language)
    yield answers("openai, streamed", "smol", streamed, language)


def langchain_embeddings(server: Server, expected: Any) -> Iterator[Asked]:
    from langchain_openai import OpenAIEmbeddings

    # tiktoken would download its table of tokens; the server has the model's own
    client = OpenAIEmbeddings(model="minilm", base_url=f"{server.http}/v1", api_key="none", check_embedding_ctx_length=False)
    got = client.embed_documents(expected["texts"])
    yield numbers("langchain-openai", "minilm", difference(got, expected["embeddings"]), len(got))


def langchain_chat(server: Server, expected: Any) -> Iterator[Asked]:
    from langchain_openai import ChatOpenAI

    language = expected["language"]
    client = ChatOpenAI(model="smol", base_url=f"{server.http}/v1", api_key="none", temperature=0, max_tokens=language["tokens"])
    questions = [answer["question"] for answer in language["answers"]]
    yield answers("langchain-openai, batch", "smol", [message.content for message in client.batch(questions)], language)
    streamed = ["".join(piece.content for piece in client.stream(question)) for question in questions]
    yield answers("langchain-openai, stream", "smol", streamed, language)

    schema = {
        "title": "City", "description": "A city.", "type": "object", "additionalProperties": False, "required": ["name", "people"],
        "properties": {"name": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 0, "maximum": 99}},
    }  # fmt: skip
    for method in ("json_schema", "function_calling"):
        city: Any = client.with_structured_output(schema, method=method).invoke("Name a city.")
        right = isinstance(city, dict) and set(city) == {"name", "people"} and 0 <= city["people"] <= 99
        yield Asked("langchain-openai", "smol", f"with_structured_output, {method}: {city}", right)


def rerank(server: Server, expected: Any) -> Iterator[Asked]:
    """Sends a request as Cohere's and Jina's clients do; no package is needed."""
    body = {"model": "reranker", "query": expected["query"], "documents": expected["texts"], "raw_scores": True}
    request = urllib.request.Request(f"{server.http}/v1/rerank", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        results = json.loads(answer.read())["results"]
    got = [result["relevance_score"] for result in sorted(results, key=lambda result: result["index"])]
    yield numbers("HTTP", "reranker", difference(got, expected["scores"]), len(got))


def triton_rows(kind: str) -> Callable[[Server, Any], Iterator[Asked]]:
    """Returns a function that calls both entries with tritonclient over `kind`, http or grpc."""

    def ask(server: Server, expected: Any) -> Iterator[Asked]:
        import numpy

        triton = importlib.import_module(f"tritonclient.{kind}")
        client = triton.InferenceServerClient(server.address if kind == "http" else server.grpc)
        for name, tower in expected["towers"].items():
            rows = numpy.asarray(tower["rows"], numpy.int64 if name == "item" else numpy.float32)
            metadata = client.get_model_metadata(f"towers.{name}")
            output = metadata["outputs"][0]["name"] if kind == "http" else metadata.outputs[0].name
            tensor = triton.InferInput(tower["input"], rows.shape, "INT64" if name == "item" else "FP32")
            tensor.set_data_from_numpy(rows)
            got = client.infer(f"towers.{name}", [tensor]).as_numpy(output).tolist()
            yield numbers(f"tritonclient, {kind}", f"towers.{name}", difference(got, tower["output"]), len(rows))
        client.close()

    return ask


ASKS: dict[str, tuple[tuple[str, Callable[[Server, Any], Iterator[Asked]]], ...]] = {
    "minilm": (("openai", openai_embeddings), ("langchain_openai", langchain_embeddings)),
    "reranker": (("json", rerank),),
    "towers": (("tritonclient", triton_rows("http")), ("tritonclient", triton_rows("grpc"))),
    "smol": (("openai", openai_chat), ("langchain_openai", langchain_chat)),
}
"""For each model: the package that a client needs, and the function that sends its requests."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--serve", required=True, metavar="CGCOMPILE", help="the command of the environment that serves")
    options = parser.parse_args()
    expected = json.loads((options.folder / "expected.json").read_text())
    torch = subprocess.run([Path(options.serve).with_name("python"), "-c", "import torch"], capture_output=True, check=False)
    print(f"torch in the server's environment: {'no' if torch.returncode else 'yes'}")
    packages = {package for asks in ASKS.values() for package, _ in asks} - {"json"}
    for package in sorted(packages):
        name = package.replace("_", "-")
        print(f"{name}: {version(name) if find_spec(package) else 'not installed'}")
    wrong = not torch.returncode
    for model, asks in ASKS.items():
        runnable = [ask for package, ask in asks if find_spec(package)]
        if not runnable or (model == "smol" and "language" not in expected):
            continue
        command = [options.serve, "serve", str(options.folder / f"{model}.cgb")]
        if model == "smol":
            language = expected["language"]
            command = [options.serve, "serve", language["bundle"], "--tokenizer", language["tokenizer"], "--name", "smol"]
        with serving(command) as server:
            print(f"{model}: serves after {server.seconds:.2f} s", flush=True)
            for ask in runnable:
                for line in ask(server, expected):
                    print(f"  {line.client}: {line.model}: {line.said}{'' if line.right else '  WRONG'}", flush=True)
                    wrong = wrong or not line.right
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
