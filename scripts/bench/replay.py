"""Positions a second of a replay: a chain in one pass and in the decoding loop, and a lookup.

    python scripts/bench/replay.py drafter=runs/quickstart/distill.train/drafter

The target answers the prompts greedily, which is not timed, and the answers are the log. All sides
replay the same answers in turn, for one draft length, and the medians count. A position is a token
of an answer; prompts are read too, but do not count.
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.prompt_lookup import PromptLookup
from decoding.engine import stop_tokens
from decoding.interfaces import Drafter
from decoding.loop import decode
from decoding.models.load import load_target
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from eval.logged.replay import Replay, replay
from eval.logged.texts import LoggedText
from jobs.drafter_use import DrafterUse
from jobs.paths import resolve, resolve_model
from scripts.bench import common
from scripts.usage import run_script
from training.data.chat import choose_rendering, render_prompt, render_text
from training.data.readers import read_prompts

GOAL = 20_000  # positions/s of the quickstart's drafter on two cores
ROWS = 16


@dataclass
class Options(common.BenchOptions):
    target: str = "embedded:target"  # model folder
    drafter: str = ""  # model folder of the chain; empty: the target itself
    prompts: str = "embedded:prompts"  # prompts that the target answers
    max_prompts: int = 96  # prompts that are answered
    max_new_tokens: int = 96  # of an answer
    num_draft_tokens: int = 4  # draft length
    dtype: str = "float32"  # of both models
    execution: str = "auto"  # of the drafter
    rounds: int = 5  # rounds of measurement
    name: str = "replay"  # name of the results file


def answer(chosen: Options) -> tuple[list[LoggedText], int, tuple[int, ...]]:
    """Return the target's greedy answers, the size of its vocabulary and its stop tokens."""
    folder = resolve_model(chosen.target)
    tokenizer = load_tokenizer(folder)
    target = load_target(folder, dtype=chosen.dtype, device=chosen.device)
    stops = stop_tokens(folder, tokenizer)
    settings = Settings(max_new_tokens=chosen.max_new_tokens, stop_token_ids=stops)
    as_text = choose_rendering(tokenizer, "auto", "auto", ("render", "template"), False) == "text"
    prompts = [
        render_text(tokenizer, prompt.turns[0])
        if as_text
        else render_prompt(tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        for prompt in read_prompts(resolve(chosen.prompts))
    ]
    room = target.max_length - chosen.max_new_tokens
    prompts = [prompt for prompt in prompts if len(prompt) <= room][: chosen.max_prompts]
    texts: list[LoggedText] = []
    for start in range(0, len(prompts), ROWS):
        part = prompts[start : start + ROWS]
        for prompt, found in zip(part, decode(target, None, part, settings), strict=True):
            name = str(len(texts))
            texts.append(LoggedText(name, "none", 0, prompt, found.tokens, chosen.max_new_tokens))
    return texts, target.vocab_size, stops


def main() -> None:
    """Print and save the positions/s of each side, and whether the goal is met."""
    chosen = common.read_options(Options)
    texts, vocab_size, stops = answer(chosen)
    folder = resolve_model(chosen.drafter or chosen.target)
    chain = ChainDrafter(
        folder, dtype=chosen.dtype, device=chosen.device, execution=chosen.execution
    )
    sides: dict[str, tuple[Drafter, bool]] = {
        "chain, one pass": (chain, True),
        "chain, in the loop": (chain, False),
        "prompt lookup": (PromptLookup(), True),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    found: dict[str, Replay] = {}
    for _ in range(1 + chosen.rounds):  # the first one warms up
        for name, (drafter, one_pass) in sides.items():
            found[name] = replay(
                drafter,
                DrafterUse(),
                texts,
                [chosen.num_draft_tokens],
                stop_token_ids=stops,
                vocab_size=vocab_size,
                one_pass=one_pass,
            )
            speeds[name].append(found[name].positions_per_second)
    figures = {name: round(statistics.median(side[1:])) for name, side in speeds.items()}
    positions = sum(len(text.tokens) for text in texts)
    rows = [(name, f"{speed:,}") for name, speed in figures.items()]
    print(f"{len(texts)} answers, {positions:,} positions, {chosen.threads} threads")
    print(common.table(("replay", "positions/s"), rows))
    speed = figures["chain, one pass"]
    common.save(
        chosen.name,
        chosen,
        {
            "answers": len(texts),
            "positions": positions,
            "positions_per_second": figures,
            "goal": common.goal(speed, speed >= GOAL),
        },
    )


if __name__ == "__main__":
    run_script(main)
