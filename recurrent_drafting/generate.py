"""`python -m recurrent_drafting.generate target.path=MODEL drafter=HEAD`: chat or answer prompts.

`python -m recurrent_drafting.cmd.generate` is the same under the published name. Both take Hydra
overrides and the published flags.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from decoding.errors import UserError
from decoding.sampling.rule_names import is_lossy
from jobs.interrupts import Interrupted
from jobs.job import job_main
from jobs.paths import resolve_model
from recurrent_drafting.cmd.flags import print_flags, to_overrides
from serving.config import GenerateConfig
from serving.prompt_report import print_report
from serving.prompts import answer_prompts, load_prompts
from serving.setup import DEFAULT_DRAFTER, NONE, check, check_drafter, load
from serving.terminal import chat
from training.data.readers import Prompt

JOB = "recurrent_drafting.generate"


def run(cfg: GenerateConfig) -> None:
    """Chat, or answer the prompts; with dry_run only print what would be done.

    Raises UserError for inconsistent options, and for an output that differs from the target's.
    Raises Interrupted, naming the file of the answers so far, on Ctrl-C during prompts.
    """
    check(cfg)
    prompts = load_prompts(cfg) if cfg.prompts else []
    if cfg.dry_run:
        print(plan(cfg, prompts))
        return
    loaded = load(cfg)
    console = Console(highlight=False, markup=False)
    if not cfg.prompts:
        chat(loaded, cfg, console)
        return
    try:
        done = answer_prompts(loaded, cfg, prompts, console)
    except KeyboardInterrupt as stop:
        kept = (
            f"the answers so far are in {cfg.output}"
            if cfg.output
            else "nothing is kept without output=FILE"
        )
        raise Interrupted(kept) from stop
    print_report(cfg, loaded, done, console)


def plan(cfg: GenerateConfig, prompts: Sequence[Prompt]) -> str:
    """Return a description of what a run would do.

    Raises UserError for a missing target or an unusable drafter.
    """
    folder, drafter = resolve_model(cfg.target.path), cfg.drafter.get("use", DEFAULT_DRAFTER)
    check_drafter(cfg, folder)
    doing = "chat"
    if cfg.prompts:
        turns, longest = sum(len(prompt.turns) for prompt in prompts), cfg.max_new_tokens
        again = ", each again without the drafter" if cfg.baseline and drafter != NONE else ""
        doing = (
            f"answer {format_count(len(prompts), 'prompt')} from {cfg.prompts}, {cfg.batch_size} "
            f"at a time: {format_count(turns, 'turn')}, each with up to {longest} tokens "
            f"({turns * longest:,} in all{again})"
        )
    beams = (
        f"up to {cfg.beam_length - 1} drafted tokens a round, "
        f"{'at most ' if cfg.by_cost else ''}{cfg.beam_width} beams of a recurrent head"
    )
    lossy = " (lossy)" if is_lossy(cfg.verify) else ""
    sampling = (
        f"temperature {cfg.temperature:g}, verified by {cfg.verify}{lossy}"
        if cfg.temperature
        else "greedy"
    )
    return f"would {doing}\ntarget {folder}, drafter {drafter}; {beams}; {sampling}"


def format_count(number: int, thing: str) -> str:
    """Return a count with its noun, such as `1 prompt` or `2 prompts`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def main() -> None:
    """Convert flags to overrides and run the job."""
    try:
        overrides = to_overrides(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if {"-h", "--help"} & {*overrides}:
        print_flags(Console(highlight=False, markup=False))
        print()
    sys.argv[1:] = overrides
    job_main(JOB, GenerateConfig, run)


if __name__ == "__main__":
    main()
