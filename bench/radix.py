"""What the prefix cache's operations cost, microseconds a call: match, lock, insert, evict, and freeing pages.

The tree holds 10,000 sequences of the length given: 100 beginnings, each with 10 continuations, each with 10 ends (3/4,
3/16 and 1/16 of the tokens). Further lines: a path of 32,768 tokens in 512 nodes, evicting one page of 100,000 leaves,
and freeing 256 tokens; pages are freed, from scattered places, into a pool of 1,000,000.

    match_hit    all of a cached sequence, and its pages read
    match_miss   a sequence of which nothing is cached
    lock         lock and unlock of a whole cached sequence
    insert       a sequence of which 7/8 is cached; the rest branches off within a node
    evict        so many tokens as are given, in one call
    free         the pages of so many tokens
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from itertools import count
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gapless.bench.report import add_report_options, envelope, write_json
from gapless.radix_cache.allocator import PageAllocator
from gapless.radix_cache.tree import RadixTree

Ids = NDArray[np.int32]
Result = dict[str, Any]
TOKENS = (1024, 8192, 32_768)
PAGE_SIZES = (1, 16)
FAN_OUT = (100, 10, 10)
DEEP_TOKENS, DEEP_NODES = 32_768, 512
LEAVES = 100_000
POOL_PAGES = 1_000_000
FREED_TOKENS = 256
VOCABULARY = 128_000
SPACE = "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_report_options(
        parser, seed_of="tokens and choices", repeat=200, repeat_help="calls measured for each line"
    )


def run(parsed: argparse.Namespace) -> int:
    report = {**envelope("radix", {"repeat": parsed.repeat}, parsed.seed), "results": []}
    print(f"{'op':10} {'tokens':>6} {'page size':>9} {'nodes':>7} | {'median us':>9} {'p99 us':>8}")
    for result in results(parsed.repeat, parsed.seed):
        report["results"].append(result)
        print(
            f"{result['op']:10} {result['tokens']:6} {result['page_size']:9} {result['nodes']:7} | "
            f"{result['median_us']:9.2f} {result['p99_us']:8.2f}",
            flush=True,
        )
    if parsed.json:
        write_json(parsed.json, report)
    return 0


def results(repeat: int, seed: int) -> Iterator[Result]:
    rng = np.random.default_rng(seed)
    for tokens in TOKENS:
        sequences = Sequences(tokens, rng)
        for page_size in PAGE_SIZES:
            yield from Bench(sequences.tree(page_size), tokens, repeat).sequences(sequences)
        del sequences
    for page_size in PAGE_SIZES:
        yield from deep_path(page_size, repeat, rng)
    yield many_leaves(repeat)
    for page_size in PAGE_SIZES:
        for tokens in (FREED_TOKENS, *TOKENS):
            yield free(tokens, page_size, repeat, rng)


class Sequences:
    """The tokens of the sequences, by level: beginnings, continuations, ends."""

    def __init__(self, tokens: int, rng: np.random.Generator) -> None:
        self.tokens, self.rng = tokens, rng
        parts = tokens * 3 // 4, tokens * 3 // 16, tokens // 16
        counts = np.cumprod(FAN_OUT).tolist()
        self._parts = [self.fresh(*shape) for shape in zip(counts, parts, strict=True)]

    def __len__(self) -> int:
        return len(self._parts[2])

    def fresh(self, *shape: int) -> Ids:
        return self.rng.integers(0, VOCABULARY, shape, np.int32)

    def sequence(self, number: int) -> Ids:
        first, second, third = self._parts
        middle = number // FAN_OUT[2]
        return np.concatenate([first[middle // FAN_OUT[1]], second[middle], third[number]])

    def any(self) -> Ids:
        return self.sequence(int(self.rng.integers(len(self))))

    def branch(self, share: float) -> Ids:
        """One of them with so much of its end replaced."""
        ids = self.any()
        new = int(len(ids) * share)
        ids[-new:] = self.fresh(new)
        return ids

    def tree(self, page_size: int) -> RadixTree:
        tree = RadixTree(page_size)
        for number in range(len(self)):
            insert(tree, self.sequence(number))
        return tree


def insert(tree: RadixTree, ids: Ids) -> None:
    tree.insert(ids, np.arange(len(ids) // tree.page_size, dtype=np.int32), SPACE)


class Bench:
    """Measures calls on one tree."""

    def __init__(self, tree: RadixTree, tokens: int, repeat: int) -> None:
        self.tree, self.tokens, self.repeat = tree, tokens, repeat
        self.nodes = sum(1 for _ in tree.nodes())

    def sequences(self, sequences: Sequences) -> Iterator[Result]:
        yield self.match(sequences.any)
        yield self.match(lambda: sequences.fresh(self.tokens) + VOCABULARY, hit=False)
        yield self.lock(sequences.any)
        yield self.insert(lambda: sequences.branch(1 / 8))
        yield self.evict(lambda: insert(self.tree, sequences.branch(1 / 16)))

    def match(self, make: Callable[[], Ids], hit: bool = True) -> Result:
        found = self.tokens // self.tree.page_size if hit else 0

        def check(pages: Ids) -> None:
            assert len(pages) == found, "not what the line says"

        op = "match_hit" if hit else "match_miss"
        return self._line(op, make, lambda ids: self.tree.match(ids, SPACE).pages, check)

    def lock(self, make: Callable[[], Ids]) -> Result:
        return self._line(
            "lock",
            lambda: self.tree.match(make(), SPACE),
            lambda match: self.tree.unlock(self.tree.lock(match)),
        )

    def insert(self, make: Callable[[], Ids]) -> Result:
        pages = np.arange(self.tokens // self.tree.page_size, dtype=np.int32)
        return self._line("insert", make, lambda ids: self.tree.insert(ids, pages, SPACE))

    def evict(self, refill: Callable[[], None]) -> Result:
        """Before each call `refill` inserts until the tree has its size again."""
        full = self.tree.evictable

        def fill() -> int:
            while self.tree.evictable < full:
                refill()
            return max(self.tokens // self.tree.page_size, 1)

        return self._line("evict", fill, self.tree.evict)

    def _line(
        self,
        op: str,
        make: Callable[[], Any],
        call: Callable[[Any], Any],
        check: Callable[[Any], None] = lambda _: None,
    ) -> Result:
        samples = measure(self.repeat, make, call, check)
        return line(op, self.tokens, self.tree.page_size, self.nodes, samples)


def deep_path(page_size: int, repeat: int, rng: np.random.Generator) -> Iterator[Result]:
    tree = RadixTree(page_size)
    ids = rng.integers(0, VOCABULARY, DEEP_TOKENS, np.int32)
    part = DEEP_TOKENS // DEEP_NODES
    for end in range(part, DEEP_TOKENS + 1, part):
        insert(tree, ids[:end])
    bench = Bench(tree, DEEP_TOKENS, repeat)
    yield bench.match(lambda: ids)
    yield bench.lock(lambda: ids)


def many_leaves(repeat: int) -> Result:
    tree, new = RadixTree(1), count()

    def add() -> None:
        insert(tree, np.array([next(new)], np.int32))

    for _ in range(LEAVES):
        add()
    return Bench(tree, 1, repeat).evict(add)


def free(tokens: int, page_size: int, repeat: int, rng: np.random.Generator) -> Result:
    allocator = PageAllocator(POOL_PAGES)
    pages = rng.permutation(allocator.take(POOL_PAGES))
    size = max(tokens // page_size, 1)
    begins = (number * size % (POOL_PAGES - size) for number in count())

    def held() -> Ids:
        begin = next(begins)
        return pages[begin : begin + size]

    def take_again(_: None) -> None:
        allocator.take(size)  # the newest freed pages: the same ones

    samples = measure(repeat, held, allocator.give_back, take_again)
    return line("free", tokens, page_size, 0, samples)


def measure(
    repeat: int, make: Callable[[], Any], call: Callable[[Any], Any], check: Callable[[Any], None]
) -> NDArray[np.float64]:
    """Microseconds of each `call`, whose argument `make` makes and whose result `check` gets, outside of the time."""
    samples = np.empty(repeat)
    gc.collect()
    for number in range(repeat):
        argument = make()
        start = perf_counter_ns()
        result = call(argument)
        samples[number] = (perf_counter_ns() - start) / 1e3
        check(result)
    return samples


def line(op: str, tokens: int, page_size: int, nodes: int, samples: NDArray[np.float64]) -> Result:
    """One entry of the report's `results`."""
    return {
        "op": op,
        "tokens": tokens,
        "page_size": page_size,
        "nodes": nodes,
        "median_us": float(np.median(samples)),
        "p99_us": float(np.percentile(samples, 99)),
    }
