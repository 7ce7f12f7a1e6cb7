"""`python -m distill.prune`: prune a target to a smaller LLaMA."""

from distill.config import PruneConfig
from distill.prune.job import run
from jobs.job import job_main

if __name__ == "__main__":
    job_main("distill.prune", PruneConfig, run)
