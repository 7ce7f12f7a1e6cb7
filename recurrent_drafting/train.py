"""`python -m recurrent_drafting.train`: train a recurrent drafter head into a head folder.

See training/heads/train.py.
"""

from pathlib import Path

from jobs.job import job_main
from recurrent_drafting.config import HeadTrainConfig
from recurrent_drafting.kind import KIND
from training.heads.train import train_head
from training.held_out.answers import check_stages


def run(config: HeadTrainConfig) -> Path:
    """Train a head, write it to output_dir/drafter and return that folder."""
    return train_head(config, KIND)


if __name__ == "__main__":
    job_main("recurrent_drafting.train", HeadTrainConfig, run, check_stages)
