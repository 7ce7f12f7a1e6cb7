"""`python -m serving.api target.path=MODEL drafter=FOLDER`: an OpenAI-compatible server."""

import sys

from jobs.job import job_main
from jobs.syntax import expand_drafter
from serving.api.config import ApiConfig
from serving.api.job import check, run

if __name__ == "__main__":
    sys.argv[1:] = [expand_drafter(word) for word in sys.argv[1:]]
    job_main("serving.api", ApiConfig, run, check)
