"""`python -m eval.doctor drafter=FOLDER`: why a drafter's acceptance is what it is."""

from eval.doctor.config import DoctorConfig
from eval.doctor.job import run
from jobs.job import job_main

if __name__ == "__main__":
    job_main("eval.doctor", DoctorConfig, run)
