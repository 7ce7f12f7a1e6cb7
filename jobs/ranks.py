"""Rank of this process, and the barrier at which the ranks of one job wait for each other.

torchrun, deepspeed, our launcher (jobs/launch.py) and `parallel.launcher=slurm` all set
torchrun's environment variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT. A job that finds them starts no further ranks.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from decoding.errors import UserError
from jobs.config import JobConfig, ParallelConfig

ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}
KINDS = ("single", "ddp", *ZERO, "fsdp")
SHARDED_WEIGHTS = ("zero3", "fsdp")  # kinds that split weights, the frozen target's too
# torchrun's environment variables of a rank
_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
)
_SHARE = "use parallel=ddp, zero1, zero2, zero3 or fsdp"
_LOCAL_RANK = re.compile(r"--local[-_]rank=(\d+)")
_STAGE = "SHALLOW_DRAFT_STAGE"  # set in the stages of an experiment that several ranks run
_LONGEST_STAGE = timedelta(days=30)  # for which the other ranks wait


def rank() -> int:
    """Return the number of this rank among all ranks of the job; 0 outside of a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks of the job; 1 outside of a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the number of this rank on its machine, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_rank() -> bool:
    """Check whether another process started this one as a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_kind(kind: str, size: int) -> None:
    """Raise UserError for a kind of parallelism that is unknown or cannot have `size` processes."""
    if kind not in KINDS:
        raise UserError(f"parallel.kind is '{kind}'; expected one of {', '.join(KINDS)}")
    if kind == "single" and size > 1:
        raise UserError(f"parallel.kind is single in a job of {size} ranks: {_SHARE}")
    if size == 1 and kind not in ("single", "ddp"):
        raise UserError(
            f"parallel.kind is {kind} with one process, but needs several. Use parallel=single, or "
            f"parallel.processes=2 or more"
        )


def take_local_rank(arguments: Sequence[str]) -> list[str]:
    """Return the command line without `--local_rank=N`, which the deepspeed launcher adds.

    That launcher sets torchrun's variables, but LOCAL_SIZE instead of LOCAL_WORLD_SIZE. Raises
    UserError if no launcher set them, and if LOCAL_RANK is not N.
    """
    given = [match[1] for text in arguments if (match := _LOCAL_RANK.fullmatch(text))]
    if not given:
        return list(arguments)
    if not is_rank():
        raise UserError(
            f"--local_rank={given[-1]} was given, but RANK and WORLD_SIZE are not set. Start the "
            f"job with a launcher (deepspeed, torchrun), which sets all of them, or leave "
            f"--local_rank out"
        )
    if "LOCAL_SIZE" in os.environ:
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    if os.environ.setdefault("LOCAL_RANK", given[-1]) != given[-1]:
        raise UserError(
            f"--local_rank is {given[-1]} and LOCAL_RANK is {os.environ['LOCAL_RANK']}: expected "
            f"one number. Leave --local_rank out"
        )
    return [text for text in arguments if not _LOCAL_RANK.fullmatch(text)]


def adopt_slurm_rank(config: JobConfig) -> None:
    """Set torchrun's variables from Slurm's if parallel.launcher is slurm.

    A dry run may be outside of a Slurm step. Raises UserError for an unknown launcher, and for a
    run outside of a step.
    """
    parallel = _parallel_of(config)
    if parallel is None:
        return
    if parallel.launcher not in ("auto", "slurm"):
        raise UserError(f"parallel.launcher is '{parallel.launcher}'; expected auto or slurm")
    in_step = "SLURM_PROCID" in os.environ or not config.dry_run  # a dry run starts no ranks
    if parallel.launcher == "slurm" and in_step and not is_rank():
        os.environ.update(slurm_ranks(os.environ))


def slurm_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Convert the variables of a Slurm step with one task per rank to torchrun's.

    The master is the first node of the step. Its port is computed from the job's number, which
    all ranks share. Raises UserError outside of a step.
    """
    wanted = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
    missing = [name for name in wanted if name not in environment]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if missing or not nodes:
        raise UserError(
            f"parallel.launcher=slurm, but {(missing or ['SLURM_JOB_NODELIST'])[0]} is not set: "
            f"start the job with srun, as scripts/slurm/train.sbatch does, or use "
            f"parallel.launcher=auto"
        )
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"]),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": re.split(r"[(,]", tasks or "1")[0],
        "MASTER_ADDR": first_node(nodes),
        "MASTER_PORT": str(15000 + int(environment["SLURM_JOB_ID"]) % 20000),
    }


def first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list: `node003` of `node[003-006,010],other1`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise UserError(f"'{nodes}' is not a Slurm node list, expected one such as node[003-006]")
    return match.group(1) + (match.group(2) or "")


def refuse_idle(config: JobConfig) -> None:
    """Raise UserError if several ranks were started for a job that runs in one process.

    All ranks but one would be idle. In an experiment or a sweep only the called job is checked, as
    its stages and members may run in one process, on rank 0.
    """
    if world_size() == 1 or config.dry_run or _STAGE in os.environ or _shares_work(config):
        return
    hint = f"{_SHARE}, or start it" if _parallel_of(config) else "start it"
    raise UserError(
        f"{config.job} runs in one process, but was started in {world_size()} ranks: {hint} "
        f"without torchrun, deepspeed or srun"
    )


def _parallel_of(config: JobConfig) -> ParallelConfig | None:
    found = vars(config).get("parallel")
    return found if isinstance(found, ParallelConfig) else None


def _shares_work(config: JobConfig) -> bool:
    parallel = _parallel_of(config)
    return parallel is not None and parallel.kind != "single"


def is_idle_rank(config: JobConfig) -> bool:
    """Return whether this rank has nothing to do, because rank 0 alone runs the job.

    On rank 0 of such a job, torchrun's variables are removed. Raises UserError if the ranks were
    started by mistake (`refuse_idle`).
    """
    if world_size() == 1 or (_shares_work(config) and not config.dry_run):
        return False
    refuse_idle(config)
    if rank() > 0:
        return True
    for name in _VARIABLES:  # child processes of this one are not ranks
        os.environ.pop(name, None)
    return False


class RankBarrier:
    """Barrier for the ranks that run an experiment's stages or a sweep's members.

    It is a key-value store at rank 0, on the port after the master's. Each stage gets another port,
    as a process group leaves its keys behind. A single rank never waits.
    """

    def __init__(self) -> None:
        self.size, self.rank = world_size(), rank()
        self.store: Any = None
        if self.size > 1:
            from torch.distributed import TCPStore

            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
            # The other ranks may connect minutes later, and leave before rank 0.
            self.store = TCPStore(
                host, port, is_master=self.rank == 0, timeout=_LONGEST_STAGE, wait_for_workers=False
            )

    def environment(self, number: int) -> dict[str, str] | None:
        """Return the environment of this rank's process for stage `number`; None: unchanged."""
        if self.size == 1:
            return None
        return {
            **os.environ,
            "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1 + number),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            _STAGE: str(number),
        }

    def wait(self, name: str) -> None:
        """Wait until every rank has called this with `name`.

        Rank 0, which keeps the store, returns last. Raises UserError if rank 0 has ended.
        """
        if self.size == 1:
            return
        from torch.distributed import DistNetworkError

        try:
            self._until_all(f"{name} reached")
            self.store.add(f"{name} left", 1)
            if self.rank == 0:
                self._until_all(f"{name} left", mine=0)
        except DistNetworkError as error:
            raise UserError(
                f"rank 0 ended while rank {self.rank} waited for it at {name}. Its last output "
                f"gives the reason"
            ) from error

    def _until_all(self, key: str, mine: int = 1) -> None:
        self.store.add(key, mine)
        while self.store.add(key, 0) < self.size:
            time.sleep(0.1)
