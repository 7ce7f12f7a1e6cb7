"""Packed beams are the set of the beams' prefixes, each once, parents first."""

import pytest
import torch
from torch import Tensor

from decoding import devices
from decoding.interfaces import NO_NODE
from recurrent_drafting.drafts import count_nodes
from recurrent_drafting.prefix_tree import Tree, edges, mask_survivors, pack


def random_beams(
    rows: int, length: int, width: int, symbols: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return random tokens and back pointers [B, L, W], in which no step repeats a pair."""
    generator = torch.Generator().manual_seed(seed)
    tokens, parents = [], []
    for step in range(length):
        beams = width if step else 1
        pairs = torch.stack(
            [torch.randperm(beams * symbols, generator=generator)[:width] for _ in range(rows)]
        )
        tokens.append(pairs % symbols)
        parents.append(pairs // symbols)
    return torch.stack(tokens, 1), torch.stack(parents, 1)


def prefixes_of(tokens_LW: Tensor, parents_LW: Tensor, depth: int) -> set[tuple[int, ...]]:
    """Return the prefixes of the beams of a row's last step, read beam by beam."""
    found = set()
    for beam in range(tokens_LW.shape[1]):
        path: list[int] = []
        for step in range(depth - 1, -1, -1):
            path.insert(0, int(tokens_LW[step, beam]))
            beam = int(parents_LW[step, beam])
        found |= {tuple(path[:end]) for end in range(1, depth + 1)}
    return found


def paths_of(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """Return the path of every counted node; assert that parents come first."""
    paths: list[tuple[int, ...]] = []
    for node in range(int(tree.counts_B[row])):
        parent = int(tree.parents_BM[row, node])
        assert -1 <= parent < node
        paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.tokens_BM[row, node])))
    return paths


@pytest.mark.parametrize(
    ("length", "width", "symbols"), [(1, 4, 6), (5, 8, 9), (4, 3, 3), (6, 1, 5), (3, 45, 48)]
)
def test_a_tree_is_the_set_of_prefixes(length: int, width: int, symbols: int) -> None:
    for seed in range(20):
        tokens_BLW, parents_BLW = random_beams(4, length, width, symbols, seed)
        depths_B = [length, max(1, length - 1), 1, 0]
        tree = pack(
            tokens_BLW.flatten(1),
            edges(parents_BLW),
            mask_survivors(parents_BLW, torch.tensor(depths_B)),
        )
        for row, depth in enumerate(depths_B):
            paths = paths_of(tree, row)
            expected = prefixes_of(tokens_BLW[row], parents_BLW[row], depth) if depth else set()
            assert len(paths) == len(set(paths)), "a prefix is in the tree twice"
            assert set(paths) == expected
            padding = slice(int(tree.counts_B[row]), None)
            assert not tree.tokens_BM[row, padding].any()
            assert (tree.parents_BM[row, padding] == NO_NODE).all()


def test_beams_share_prefixes() -> None:
    """Check that sharing removes 30 to 60 % of the tokens, as published."""
    tokens_BLW, parents_BLW = random_beams(1, 5, 8, 9, seed=0)
    tree = pack(
        tokens_BLW.flatten(1), edges(parents_BLW), mask_survivors(parents_BLW, torch.tensor([5]))
    )
    assert 0.4 * 40 <= int(tree.counts_B[0]) <= 0.7 * 40


def test_a_pair_chosen_twice_would_break_it() -> None:
    """Control: a pair chosen twice in a step puts a path into the tree twice.

    Packing relies on each step choosing a pair at most once.
    """
    tokens_BLW, parents_BLW = random_beams(1, 3, 4, 6, seed=1)
    tokens_BLW[0, 0, 1], parents_BLW[0, 2] = tokens_BLW[0, 0, 0], torch.arange(4)
    parents_BLW[0, 1] = torch.arange(4)
    paths = paths_of(
        pack(
            tokens_BLW.flatten(1),
            edges(parents_BLW),
            mask_survivors(parents_BLW, torch.tensor([3])),
        ),
        0,
    )
    assert len(paths) > len(set(paths))


def test_places_map_nodes_to_kept_nodes() -> None:
    tokens_BLW, parents_BLW = random_beams(2, 4, 5, 7, seed=2)
    keep_BM = mask_survivors(parents_BLW, torch.tensor([4, 2]))
    tree = pack(tokens_BLW.flatten(1), edges(parents_BLW), keep_BM)
    M = keep_BM.shape[1]
    for row in range(2):
        for node in range(M):
            place = int(tree.places_BM[row, node])
            assert (place < M) == bool(keep_BM[row, node])
            if place < M:
                assert tree.tokens_BM[row, place] == tokens_BLW[row].flatten()[node]


def test_a_gpu_verifies_few_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert count_nodes([9, 4], 40, device) == 9, "a CPU adds no nodes"
    monkeypatch.setattr(devices, "runs_ahead", lambda device: True)
    widths = [count_nodes([count, 1], 40, device) for count in range(1, 41)]
    assert all(width >= count for count, width in enumerate(widths, 1))
    assert sorted(set(widths)) == [7, 15, 23, 31, 39, 40], (
        "with the tip 8, 16, ..., up to all nodes"
    )
