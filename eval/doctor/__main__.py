"""`python -m eval.doctor drafter=FOLDER`: why a drafter's acceptance is what it is."""

import sys

from eval.doctor.config import DoctorConfig
from eval.doctor.job import run
from jobs.job import job_main
from jobs.syntax import expand_drafter

if __name__ == "__main__":
    sys.argv[1:] = [expand_drafter(word) for word in sys.argv[1:]]
    job_main("eval.doctor", DoctorConfig, run)
