"""`gapless bench radix`: every promised line, in small. No timing."""

import json

import numpy as np
import pytest

from gapless.bench import radix
from gapless.runtime.cli import main


@pytest.fixture
def small(monkeypatch):
    sizes = {
        "TOKENS": (256, 512),
        "FAN_OUT": (3, 2, 4),
        "DEEP_TOKENS": 512,
        "DEEP_NODES": 8,
        "LEAVES": 50,
        "POOL_PAGES": 2000,
        "FREED_TOKENS": 32,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(radix, name, value)


def test_the_report_has_a_line_for_each_operation_length_and_page_size(small, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main(["bench", "radix", "--repeat=20", "--seed=3", f"--json={path}"]) == 0
    report = json.loads(path.read_text())
    assert (report["benchmark"], report["seed"], report["options"]) == ("radix", 3, {"repeat": 20})
    results = report["results"]
    for result in results:
        assert list(result) == ["op", "tokens", "page_size", "nodes", "median_us", "p99_us"]
        assert 0 < result["median_us"] <= result["p99_us"]
    lines = {(r["op"], r["tokens"], r["page_size"]) for r in results if r["nodes"] not in (8, 50)}
    ops = ("match_hit", "match_miss", "lock", "insert", "evict")
    trees = {(op, tokens, size) for op in ops for tokens in (256, 512) for size in (1, 16)}
    frees = {("free", tokens, size) for tokens in (32, 256, 512) for size in (1, 16)}
    assert lines == trees | frees
    assert {r["nodes"] for r in results if r["op"] == "insert"} == {3 + 6 + 24}
    deep = [(r["op"], r["tokens"], r["page_size"]) for r in results if r["nodes"] == 8]
    assert deep == [(op, 512, size) for size in (1, 16) for op in ("match_hit", "lock")]
    assert [(r["op"], r["tokens"], r["page_size"]) for r in results if r["nodes"] == 50] == [("evict", 1, 1)]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(results)


def test_a_branch_shares_all_but_its_share(small):
    sequences = radix.Sequences(64, np.random.default_rng(1))
    tree = sequences.tree(1)
    for _ in range(20):
        assert tree.match(sequences.branch(1 / 8), radix.SPACE).length == 56


def test_a_wrong_option_is_named(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "radix", "--repeat=0"])
    assert exit.value.code == 2 and "--repeat: 0: must be at least 1" in capsys.readouterr().err
