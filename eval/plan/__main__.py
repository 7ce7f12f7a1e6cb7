"""`python -m eval.plan target=NAME`: which drafter to train, measured before any training."""

from eval.plan.config import PlanConfig
from eval.plan.job import check, run
from jobs.job import job_main

if __name__ == "__main__":
    job_main("eval.plan", PlanConfig, run, check)
