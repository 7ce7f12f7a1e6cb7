"""Decode with and without a drafter: the same text in fewer forward passes of the target.

python examples/decode_with_a_drafter.py                              # prompt lookup
python examples/decode_with_a_drafter.py runs/examples/distil/drafter # a distilled drafter
"""

import sys
from pathlib import Path

from decoding import Engine, Reply, generate, load

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "assets" / "target"
REQUEST = 'def __eq__(self, other):\n    """Compare two intervals by start, end and name."""'


def decode(engine: Engine, **settings: object) -> Reply:
    """Answer the request and print the speed and the forward passes of the target."""
    chat = [{"role": "user", "content": REQUEST}]
    # The first call also measures the costs that choose the draft length.
    generate(engine, chat, max_new_tokens=8, **settings)
    reply = generate(engine, chat, max_new_tokens=96, **settings)
    stats, tokens = reply.stats, len(reply.tokens)
    print(
        f"{tokens} tokens in {stats.rounds} forward passes "
        f"({tokens / stats.rounds:.2f} each), {tokens / stats.decode_seconds:.0f} tokens/s, "
        f"{stats.trace.count('1')} tokens drafted and accepted"
    )
    return reply


def main(drafter: str) -> None:
    """Decode greedily and by sampling, and compare with the target alone."""
    alone, drafting = load(TARGET), load(TARGET, drafter)
    print("the target alone, greedy:")
    expected = decode(alone)
    print(f"with {drafter}, greedy:")
    found = decode(drafting)
    assert found.tokens == expected.tokens, "greedy output equals the target's"
    print(f"\n{REQUEST}\n{found.text}\n")

    # When sampling, verify="coupled" makes every token depend on the seed and not on the drafter.
    sampling = {"temperature": 0.8, "seed": 1, "verify": "coupled"}
    print("the target alone, sampled:")
    expected = decode(alone, **sampling)
    print(f"with {drafter}, sampled with the same seed:")
    assert decode(drafting, **sampling).tokens == expected.tokens, "the seed decides the text"


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "prompt_lookup")
