"""Console command: `shallow-draft` lists the jobs, `shallow-draft JOB ...` runs one.

The list prints at once, as this module imports nothing else of the project.
"""

import difflib
import os
import sys

JOBS = {
    "distill.prune": "Cut a target down to a student of any smaller LLaMA shape",
    "distill.regenerate": "Answer chats with the target, as training data of a drafter",
    "distill.train": "Distil the frozen target into a student of any LLaMA shape",
    "distill.pretrain": "Train a LLaMA from scratch, also as the control of a pruning experiment",
    "distill.compact": "Remove a checkpoint's zero padding and check that its logits stay equal",
    "distill.skip_search": "Find the layers that a target can skip when it drafts for itself",
    "distill.quality": "Measure bits per byte and the share of sampled functions that parse",
    "heads.train": "Train a drafter head on the frozen target's hidden states",
    "recurrent_drafting.train": "Train a recurrent drafter head (ReDrafter)",
    "recurrent_drafting.generate": "Chat with a target and its drafter, or answer prompts",
    "recurrent_drafting.cmd.generate": "The same, with the flags of the published tool",
    "serving.api": "Serve a target with a drafter to OpenAI clients, on one machine",
    "serving.web": "Show decoding with and without a drafter side by side in a browser",
    "eval.run": "Measure drafters against autoregressive decoding and write a report",
    "eval.compare": "Compare measured drafters in one report",
    "eval.plan": "Plan which drafter to train, before any training",
    "eval.doctor": "Find out why a drafter's acceptance is what it is",
    "eval.replay": "Measure the acceptance of drafters on logged outputs, without the target",
    "eval.analyze": "Print the published averages of tokens a round, and what they hide",
}
USAGE = """Drafters that make large language models decode faster, without changing a word of their output.

Usage: shallow-draft JOB [KEY=VALUE ...]   run a job; the same as python -m JOB
       shallow-draft JOB --help            list the settings of a job
       shallow-draft --version

Jobs:"""  # noqa: E501


def main() -> None:
    """Run the job that the command line names, or list all jobs."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        width = max(map(len, JOBS))
        print("\n".join(f"  {job:<{width}}  {about}" for job, about in JOBS.items()))
        return
    job = arguments[0]
    if job == "--version":
        from decoding import __version__

        print(f"shallow-draft {__version__}")
        return
    if job not in JOBS:
        nearest = difflib.get_close_matches(job, JOBS, n=1, cutoff=0.0)[0]
        print(
            f"error: '{job}' is not a job; the nearest is '{nearest}' (shallow-draft lists all)",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", job, *arguments[1:]])
