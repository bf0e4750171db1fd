"""Capture sizes for a log of requests are optimal. A log may have any usual format, and other input is refused in one line."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from cgcompile.tools import capture_sizes as proposing
from cgcompile.tools.capture_sizes import MARGIN, Proposal, choose, propose, read_request_log
from cgcompile_cli import main
from tests.helpers.raising import raises

CSV = 'time,user,tokens\n1.5,"a,\n""b""",8\n2.5,c,3\n\n3.5,d, 8\n'


def call(*arguments: object, stdin: str | bytes = "") -> Result:
    """Runs a command as the shell would, with `stdin` on its standard input."""
    return CliRunner().invoke(
        main.app, [str(argument) for argument in arguments], input=stdin, prog_name="cgcompile", env={"COLUMNS": "80"}
    )


def padding(counts: Counter[int], sizes: tuple[int, ...]) -> int:
    """Returns the padded rows when each request takes the smallest of `sizes` that holds it."""
    return sum(often * (min(bucket for bucket in sizes if bucket >= size) - size) for size, often in counts.items())


def fewest(counts: Counter[int], number: int, multiple: int) -> int:
    """Returns the least padding with `number` sizes. Tries every choice of multiples up to the one for the largest request."""
    largest = -(-max(counts) // multiple) * multiple
    others = range(multiple, largest, multiple)
    return min(padding(counts, (*chosen, largest)) for chosen in combinations(others, min(number - 1, len(others))))


# --- choosing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_no_choice_pads_less(seed: int) -> None:
    pick = random.Random(seed)
    top = pick.choice((5, 12, 18))
    counts = Counter([pick.randint(1, top) for _ in range(pick.choice((1, 4, 30, 300)))])
    multiple = pick.choice((1, 1, 2, 4))
    proposals = propose(counts, 5, multiple)
    for number, proposal in enumerate(proposals, 1):
        assert len(proposal.sizes) == number and list(proposal.sizes) == sorted(set(proposal.sizes))
        assert all(size % multiple == 0 for size in proposal.sizes) and proposal.sizes[-1] >= max(counts)
        assert proposal.padded == padding(counts, proposal.sizes) == fewest(counts, number, multiple)
        assert proposal.served == sum(counts.elements())
    more = 5 - len(proposals)
    assert more == 0 or proposals[-1].padded == fewest(counts, len(proposals) + more, multiple), (
        "fewer only where more saves nothing"
    )


@given(st.dictionaries(st.integers(1, 10**15), st.integers(1, 10**6), min_size=1, max_size=60), st.integers(1, 12))
def test_large_numbers_and_many_sizes_agree_with_the_plain_recurrence(counts: dict[int, int], most: int) -> None:
    sizes = sorted(counts)
    reach = [0]
    for size in sizes:
        reach.append(reach[-1] + counts[size])
    rows = [0, *[10**40] * len(sizes)]  # for the first j requested sizes, with no capture size
    expected = []
    for _ in range(min(most, len(sizes))):
        rows = [0, *[min(rows[i] + sizes[j - 1] * (reach[j] - reach[i]) for i in range(j)) for j in range(1, len(rows))]]
        expected.append(rows[-1])
    proposals = propose(counts, most)
    assert [proposal.served + proposal.padded for proposal in proposals] == expected
    for proposal in proposals:
        assert proposal.padded == padding(Counter(counts), proposal.sizes)


def test_a_size_for_every_request_wastes_nothing() -> None:
    assert propose({3: 5, 9: 1}, 8)[-1] == Proposal(sizes=(3, 9), served=24, padded=0)
    assert [proposal.sizes for proposal in propose({3: 5, 9: 1}, 1)] == [(9,)]


def test_the_largest_request_is_covered_however_rare() -> None:
    assert propose({1: 10**6, 1000: 1}, 2)[-1].sizes == (1, 1000)


def test_waste_is_the_share_of_computed_rows() -> None:
    assert propose({1: 1, 3: 1}, 1)[0].wasted == pytest.approx(100 * 2 / 6)


@pytest.mark.parametrize(("padded", "number"), [((50, 20, 10), 3), ((50, 0.5, 0.2), 2), ((0.5, 0.2, 0), 1), ((9, 2, 2), 2)])
def test_the_fewest_sizes_near_the_best_are_chosen(padded: tuple[float, ...], number: int) -> None:
    proposals = [Proposal(sizes=tuple(range(1, n + 2)), served=100_000, padded=int(share * 1000)) for n, share in enumerate(padded)]
    chosen = choose(proposals)
    assert len(chosen.sizes) == number
    assert chosen.wasted <= proposals[-1].wasted + MARGIN


@pytest.mark.parametrize(("most", "multiple"), [(0, 1), (-3, 1), (8, 0)])
def test_limits_below_1(most: int, multiple: int) -> None:
    with raises("limit-invalid", match="expected at least 1"):
        propose({1: 1}, most, multiple)


def test_no_counts() -> None:
    with raises("request-log-invalid", match="no sizes"):
        propose({}, 8)


# --- reading ----------------------------------------------------------------------------------------------------


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize("text", ["8\n3\n8\n", "8\r\n3\r\n8", "\n8\n\n 3 \n8\n\n", "\ufeff8\n3\n8", "08\n3\n8\t\n"])
def test_one_size_per_line(text: str, tmp_path: Path) -> None:
    assert read_request_log(written(tmp_path, text)) == ({8: 2, 3: 1},)


@pytest.mark.parametrize(
    "text",
    [CSV, "\ufeff" + CSV, CSV.replace("\n", "\r\n"), "tokens\n8\n3\n8\n", "a;tokens\n1,5;8\n;3\n;8", "tokens\tb\n8\t\n3\t\n8\t"],
)
def test_a_column(text: str, tmp_path: Path) -> None:
    assert read_request_log(written(tmp_path, text), "tokens") == ({8: 2, 3: 1},)


@given(st.lists(st.integers(1, 10**15 - 1), min_size=1))
def test_what_was_written_is_counted(sizes: list[int]) -> None:
    text = "\n".join(map(str, sizes))
    assert proposing._lines(text, "trace") == Counter(sizes)
    assert proposing._column(f"n,size\n{''.join([f'x,{size}{chr(10)}' for size in sizes])}", "size", "trace") == Counter(sizes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8\n\n3.5\n", "line 3: '3.5' is not a whole number"), ("8\n8 8\n", "line 2: '8 8' is not a whole number"),
        ("8\n0\n", "line 2: '0' is no size: at least 1"), ("8\n-4", "line 2: '-4' is no size: at least 1"),
        ("1_0", "line 1: '1_0' is not a whole number"), ("8\n\u0663", "line 2: '\u0663' is not a whole number"),
        ("+8", "line 1: '[+]8' is not a whole number"), ("-", "line 1: '-' is not a whole number"),
        ("1732190400000000000", "line 1: '1732190400000000000' is too large for a size"),
        (b"8\n\xff\x00\n", "line 2: '\ufffd.x00' is not a whole number"), ("x" * 5000, "line 1: 'x{40}' is not a whole number"),
        ("", "no sizes"), ("\n \n", "no sizes"),
    ],
)  # fmt: skip
def test_lines_that_are_no_sizes(text: str | bytes, message: str, tmp_path: Path) -> None:
    with raises("request-log-invalid", match=message):
        read_request_log(written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('a,tokens\n"x\ny",8\nz,many\n', "line 4: column 'tokens': 'many' is not a whole number"),
        ("a,tokens\n1,8\n2,0\n", "line 3: column 'tokens': '0' is no size"), ("a,tokens\n1,8\n2\n", "line 3: no value in column"),
        ("a,tokens\n1,8\n2,\n", "line 3: column 'tokens': '' is not a whole number"), ("a,tokens\n", "no sizes"),
        ('tokens\n"8', "line 2: unexpected end of data"),
    ],
)  # fmt: skip
def test_columns_that_hold_no_sizes(text: str, message: str, tmp_path: Path) -> None:
    with raises("request-log-invalid", match=message):
        read_request_log(written(tmp_path, text), "tokens")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a, b\n1,2\n", "no column 'tokens' [(]columns: a, b[)]"), ("tokens,tokens\n1,2\n", "more than one column 'tokens'"),
        ("", "columns: none"), ('"a\n', "columns: none"),
    ],
)  # fmt: skip
def test_unknown_columns(text: str, message: str, tmp_path: Path) -> None:
    with raises("request-log-column-unknown", match=message):
        read_request_log(written(tmp_path, text), "tokens")


def test_no_such_trace(tmp_path: Path) -> None:
    with raises("request-log-missing", match="no such file"):
        read_request_log(str(tmp_path / "missing"))


def test_a_wrong_line_far_down_is_found_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, "100000\n" * 200_000 + "x\n")
    begin = time.process_time()
    with raises("request-log-invalid", match="line 200001: 'x'"):
        read_request_log(path)
    assert time.process_time() - begin < 2


def test_a_million_requests_take_a_second_or_so(tmp_path: Path) -> None:
    pick = random.Random(0)
    path = written(tmp_path, "\n".join([str(pick.randint(1, 4096)) for _ in range(1_000_000)]))
    begin = time.process_time()
    proposals = propose(read_request_log(path)[0], 8)
    assert time.process_time() - begin < 3, "0.4 s on the machine that this was written on: thrice and more for a slow one"
    assert sum(read_request_log(path)[0].values()) == 1_000_000 and len(proposals) == 8


# --- the command ------------------------------------------------------------------------------------------------


def test_the_command_shows_a_table_and_ends_with_the_line_to_use(tmp_path: Path) -> None:
    path = written(tmp_path, "1\n" * 50 + "8\n" * 10 + "7\n" + "32\n")
    result = call("sizes", path)
    assert result.exit_code == 0 and result.stderr == "" and result.stdout.isascii() and "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert lines[0] == "62 requests of 169 rows, 4 distinct sizes from 1 to 32"
    assert lines[-2:] == [
        "3 sizes: the fewest within 1 percentage point of the best (0.6% wasted, 0.0% with 4)",
        "cgcompile build MODEL --sizes 1,8,32",
    ]
    assert lines[3].split() == ["1", "1815", "91.5%", "#" * 20, "32"]
    assert lines[5].split() == ["3", "1", "0.6%", "1,", "8,", "32"]


def test_the_command_reads_standard_input() -> None:
    assert call("sizes", "-", stdin="4\n").stdout.endswith("1 size: no request is padded\ncgcompile build MODEL --sizes 4\n")
    result = call("sizes", "-", "--column", "n", stdin="n\nx\n")
    assert result.exit_code == 2 and "error: standard input: line 2: column 'n': 'x' is not" in result.stderr


def test_the_command_as_json(tmp_path: Path) -> None:
    report = json.loads(call("sizes", written(tmp_path, CSV), "--column", "tokens", "--multiple", "4", "--json").stdout)
    assert (report["requests"], report["distinct"], report["rows"], report["smallest"], report["largest"]) == (3, 2, 19, 3, 8)
    assert report["proposals"][1] == {"sizes": [4, 8], "padded": 1, "wasted_percent": 5.0}
    assert report["proposed"] == 2 and report["command"] == "cgcompile build MODEL --sizes tokens=4,8"
    assert report["reason"] == "2 sizes: more would save nothing"


SEVERAL = "batch,seq\n1,12\n1,30\n8,30\n"


def test_several_columns_are_several_dimensions() -> None:
    lines = call("sizes", "-", "--column", "seq", "--column", "batch", stdin=SEVERAL).stdout.splitlines()
    assert lines[-1] == "cgcompile build MODEL --sizes seq=12,30 --sizes batch=1,8"
    assert [line for line in lines if "column" in line] == [
        "3 requests, column 'seq' adds up to 72, 2 distinct sizes from 12 to 30",
        "3 requests, column 'batch' adds up to 10, 2 distinct sizes from 1 to 8",
    ]
    report = json.loads(call("sizes", "-", "--column", "seq", "--column", "batch", "--json", stdin=SEVERAL).stdout)
    assert [(name, column["rows"], column["proposals"][-1]["sizes"]) for name, column in report["columns"].items()] == [
        ("seq", 72, [12, 30]),
        ("batch", 10, [1, 8]),
    ]
    assert report["command"] == lines[-1] and report["multiple"] == 1


def test_a_column_named_twice_is_one() -> None:
    once, twice = [call("sizes", "-", *["--column", "seq"] * times, stdin=SEVERAL).stdout for times in (1, 2)]
    assert once == twice and once.endswith("--sizes seq=12,30\n")


def test_one_of_several_columns_is_none() -> None:
    result = call("sizes", "-", "--column", "seq", "--column", "rows", stdin=SEVERAL)
    assert result.exit_code == 2 and "no column 'rows' (columns: batch, seq)" in result.stderr


@pytest.mark.parametrize(
    ("most", "text", "reason"),
    [
        (1, "1\n9\n", "1 size: all that --max allows"),
        (
            2,
            "1\n5\n9\n",
            "2 sizes: all that --max allows; the last one saves 23.4 percentage points, so a larger --max may be worth it",
        ),
    ],
)
def test_the_reason_says_when_more_may_help(most: int, text: str, reason: str) -> None:
    assert call("sizes", "-", "--max", most, stdin=text).stdout.splitlines()[-2] == reason


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (("missing",), "", "missing: no such file"), (("-",), "", "standard input: no sizes"),
        (("-", "--max", "0"), "4", "the number of sizes is 0"), (("-", "--multiple", "0"), "4", "the multiple is 0"),
        (("-", "--column", "x"), "a,b\n", "no column 'x' (columns: a, b)"),
        (("-",), "\x1b]0;owned\x07", r"'\x1b]0;owned\x07' is not"),
    ],
)  # fmt: skip
def test_errors_are_one_line(arguments: tuple[str, ...], stdin: str, expected: str) -> None:
    result = call("sizes", *arguments, stdin=stdin)
    assert result.exit_code == 2 and result.stdout == ""
    first, *rest = result.stderr.splitlines()
    assert first.startswith("error: ") and expected.replace("\\", "") in first.replace("\\", "")
    assert len(rest) <= 1 and first.isprintable()


def test_a_header_without_column_names_the_option() -> None:
    assert "--column tokens" in call("sizes", "-", stdin="time,tokens\n1,2\n").stderr


def test_help_fits_80_columns() -> None:
    shown = call("sizes", "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80 and shown.isascii()
