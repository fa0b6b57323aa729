"""Interpreters killed, stopped and trapped under load: each request gets exactly one answer."""
import random

import interpreters


def test_each_id_gets_one_answer(binary, tmp_path):
    seed = random.randrange(1 << 32)
    counts, faults, ledger = interpreters.run(binary, 12, seed, tmp_path)
    assert not faults, f"seed {seed}: {faults[:10]}"
    assert sum(ledger.events.values()) > 0 and counts["http: right"] > 0 and counts["stream: right"] > 0
    assert ledger.longest < interpreters.BOUND_S
