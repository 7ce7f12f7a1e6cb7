"""Where the host runs ahead of the device, fixed beams get the room that the row's last trees needed."""

import pytest

from decoding import cuda
from decoding.drafter import NO_NODE, Proposal
from decoding.loop import Settings, decode
from recurrent_drafting import plans
from recurrent_drafting.drafter import RecurrentDrafter
from tests.decoding.rows import random_head
from tests.decoding.tiny import hf_model, native_of, random_prompts


def test_room_is_what_the_last_trees_needed() -> None:
    room = plans.Room()
    assert room.nodes(40) == 40, "of the first tree nothing is known"
    room.learn(22)
    assert room.nodes(40) == 22
    room.learn(30)  # more than there was room for: the next round has it
    assert room.nodes(40) == 30
    assert room.nodes(24) == 18, "of a shorter draft the same share"
    assert room.nodes(0) == 0
    room.learn(0)  # nothing was drafted
    for _ in range(plans.Room.ROUNDS):
        room.nodes(40)
        room.learn(25)
    assert room.nodes(40) == 25, "old trees are forgotten"


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_tree_without_room_loses_its_last_nodes_and_no_token(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = native_of(hf_model("llama", layers=2)), random_prompts(6)
    sampled = {} if rule == "greedy" else {"temperature": 1.0, "verify": rule}
    settings = Settings(max_new_tokens=24, num_draft_tokens=4, **sampled)  # type: ignore[arg-type]
    expected = [g.tokens for g in decode(target, None, prompts, settings)]
    monkeypatch.setattr(cuda, "runs_ahead", lambda device: True)
    trees: dict[int, list[list[list[int]]]] = {}

    class Watched(RecurrentDrafter):
        def propose(self, *arguments: object) -> Proposal:
            proposal = super().propose(*arguments)  # type: ignore[arg-type]
            assert proposal.parents_BN is not None or not max(proposal.counts_B)
            if proposal.parents_BN is not None:
                rows = zip(proposal.parents_BN.tolist(), proposal.counts_B, strict=True)
                trees[least].append([[parent for parent in row[:count] if parent != NO_NODE] for row, count in rows])
            return proposal

    for least in (32, 5):
        trees[least] = []
        monkeypatch.setattr(plans.Room, "nodes", lambda self, most, least=least: min(most, least))
        drafted = decode(target, Watched(head=random_head(target, 3.0), beam_width=8), prompts, settings)
        assert [g.tokens for g in drafted] == expected
    whole, cut = trees[32][0], trees[5][0]  # the first round's have the same text before them
    assert [row[:5] for row in whole] == cut
    assert any(len(row) > 5 for row in whole)
