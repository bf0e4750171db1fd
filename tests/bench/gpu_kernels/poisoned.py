"""Replays over poisoned memory: `poisoned.py BUNDLE...` runs the self-test of each bundle many times, with random keys and
sessions.

Before every replay the arena (with the outputs) and host memory are filled with 0xFF, which is NaN as a float.
"""

from __future__ import annotations

import json
import random
import sys

import cgbundle
from cgbundle import self_test

ROUNDS = 40


def main(bundles: list[str]) -> int:
    """Prints a line of JSON for each bundle. Returns 1 if a replay misses the self-test's tolerance."""
    broken = 0
    for path in bundles:
        choice, failed, worst = random.Random(0), 0, 0.0
        with cgbundle.load(path) as program:
            manifest, promised = program.manifest, program.spec.self_test
            sessions = [program, program.session(), program.session()]
            for _ in range(ROUNDS):
                key = choice.choice(program.int_keys)
                (result,) = self_test.replay_self_test(choice.choice(sessions), [key])
                failed += not result.passed(promised.compare)
                worst = max(worst, result.error)
        broken += failed
        row = {"replays": ROUNDS * promised.calls, "failed": failed, "worst": worst, "promise": promised.compare}
        print(json.dumps({"bundle": manifest.name, **row}), flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
