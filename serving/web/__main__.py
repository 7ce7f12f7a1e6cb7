"""`python -m serving.web target.path=MODEL "drafters=[FOLDER]"`: two panes in a browser."""

from jobs.job import job_main
from serving.web.config import WebConfig
from serving.web.job import check, run

if __name__ == "__main__":
    job_main("serving.web", WebConfig, run, check)
