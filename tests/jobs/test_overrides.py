"""Overrides that a job's configuration is written as give the same configuration."""

import pytest

from jobs.config import plain
from jobs.overrides import overrides_of
from tests.support.configurations import configuration

TEXTS = (
    "drafters=[{use: ranked_tree,folder: 'it\\'s, \\\\ here',max_nodes: 24},a b,'1','null','',x/y]"
)


@pytest.mark.parametrize(
    ("job", "given"),
    [
        ("eval.run", []),
        ("eval.run", [TEXTS, "temperatures=[0.5]", "engine=[ours,vllm]", "max_seconds=1e-3"]),
        ("eval.run", ["benchmark=mt_bench", "benchmark.path='/a b.jsonl'", "target=smollm2_135m"]),
        ("distill.train", ["target.path=T", "++data.domains={a: {chats: [c]}}", "loss=lk"]),
    ],
    ids=["defaults", "texts", "files of groups", "another job"],
)
def test_overrides_give_the_configuration_again(job: str, given: list[str]) -> None:
    config = configuration(job, *given)
    written = overrides_of(job, plain(config))
    assert configuration(job, *written) == config
    assert bool(written) == bool(given)
