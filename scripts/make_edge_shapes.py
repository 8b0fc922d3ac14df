#!/usr/bin/env python3
"""Writes shapes/edge.txt: every pair of edge sizes that fits the limits, in few and cheap rows.

usage: scripts/make_edge_shapes.py > shapes/edge.txt      (deterministic)
"""
import itertools

VALUES = {
    "M": [0, 1, 2, 33, 1000],
    "E": [1, 2, 8, 128, 512],
    "k": ["1", "2", "E/2", "E"],
    "K": [1, 17, 64, 2880],
    "I": [1, 17, 64, 2880],
}
NAMES = list(VALUES)
MAX_BYTES = 64 << 20  # three bf16 matrices for each expert
MAX_FLOP = 2_000_000_000

HEAD = """\
# Edge sizes: every pair of values of M {0, 1, 2, 33, 1000}, E {1, 2, 8, 128, 512}, k {1, 2, E/2, E}, hidden K and
# intermediate I {1, 17, 64, 2880} occurs in some row, but for those that no row within the limits can hold:
# 64 MiB of bf16 weights and 2 GFLOP, 1 <= k <= E. Rows of no tokens count for their pairs with M only. Made by
# scripts/make_edge_shapes.py; tests/test_shapes.cpp checks it.
#
# One shape a line: e<E>k<k>h<K>i<I>[:scheme], then M=<tokens>, then routing=<rule> where the row is about one.
# Rows with k > 64 are routed from outside. Readers add what no size can say: all tokens to one expert, empty
# experts, -1, repeated ids, strided rows.
"""


def top_k(row):
    experts = row["E"]
    return {"1": 1, "2": 2, "E/2": experts // 2, "E": experts}[row["k"]]


def cost(row):
    """(bytes of weights, operations)"""
    matrices = 3 * row["K"] * row["I"]
    return 2 * row["E"] * matrices, 2 * row["M"] * top_k(row) * matrices


def fits(row):
    num_bytes, flop = cost(row)
    return 1 <= top_k(row) <= row["E"] and num_bytes <= MAX_BYTES and flop <= MAX_FLOP


def pairs(row):
    """A row of no tokens computes nothing: it stands for its own pairs with M only."""
    return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(NAMES, 2) if a == "M" or row["M"] > 0}


def main():
    rows = [dict(zip(NAMES, choice)) for choice in itertools.product(*VALUES.values())]
    every_pair = set().union(*map(pairs, rows))
    rows = [row for row in rows if fits(row)]
    possible = set().union(*map(pairs, rows))

    def price(row):  # cheap rows, but matrices of one row or column hide mistakes
        num_bytes, flop = cost(row)
        return 1 + num_bytes / 20e6 + flop / 300e6 + 0.3 * (row["K"] == 1) + 0.3 * (row["I"] == 1)

    chosen, open_pairs = [], set(possible)
    while open_pairs:
        best = max(rows, key=lambda row: len(pairs(row) & open_pairs) / price(row))
        chosen.append(best)
        open_pairs -= pairs(best)
    for row in sorted(chosen, key=lambda row: -price(row)):  # what later rows made superfluous goes, dearest first
        others = [pairs(r) for r in chosen if r is not row]
        if possible <= set().union(*others):
            chosen.remove(row)
    chosen.sort(key=lambda r: (r["E"], top_k(r), r["K"], r["I"], r["M"]))

    print(HEAD, end="")
    print("#\n# Pairs that no row can hold:")
    for (a, x), (b, y) in sorted(every_pair - possible, key=str):
        print(f"#   {a} = {x}, {b} = {y}")
    print()
    for row in chosen:
        print(f"e{row['E']}k{top_k(row)}h{row['K']}i{row['I']} M={row['M']}")


if __name__ == "__main__":
    main()
