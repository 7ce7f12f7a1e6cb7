"""`python -m recurrent_drafting.generate target.path=MODEL drafter=HEAD`: a chat with the target, or a file of prompts, drafted and plain.

`python -m recurrent_drafting.cmd.generate` is the same by the published name. Both take Hydra overrides and the published flags.
"""

import sys

from rich.console import Console

from decoding.errors import UserError
from recurrent_drafting.chat import chat
from recurrent_drafting.flags import print_flags, to_overrides
from recurrent_drafting.generate_config import GenerateConfig
from recurrent_drafting.generate_setup import USUAL, check, load
from recurrent_drafting.prompt_report import print_report, write_answers
from recurrent_drafting.prompt_run import answer_prompts, prompts_of
from training.job import job_main

JOB = "recurrent_drafting.generate"


def run(cfg: GenerateConfig) -> None:
    """Chat, or answer the prompts. Raises UserError for what does not fit, and for an output that is not the target's own."""
    check(cfg)
    prompts = prompts_of(cfg) if cfg.prompts else []
    if cfg.dry_run:
        doing = f"answer {len(prompts)} prompts of {cfg.prompts}" if cfg.prompts else "chat"
        print(f"would {doing} with target.path={cfg.target.path} and drafter={cfg.drafter.get('use', USUAL)}")
        return
    loaded = load(cfg)
    console = Console(highlight=False, markup=False)
    if not cfg.prompts:
        chat(loaded, cfg, console)
        return
    done = answer_prompts(loaded, cfg, prompts, console)
    write_answers(cfg, done)
    print_report(cfg, loaded, done, console)


def main() -> None:
    """The command: flags become overrides, and the job does the rest."""
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
