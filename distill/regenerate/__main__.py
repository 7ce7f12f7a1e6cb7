"""`python -m distill.regenerate`: answer the requests of chats with the target itself."""

from distill.config import RegenerateConfig
from distill.regenerate.job import run
from jobs.job import job_main

if __name__ == "__main__":
    job_main("distill.regenerate", RegenerateConfig, run)
