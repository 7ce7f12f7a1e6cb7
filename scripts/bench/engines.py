"""Our decode loop beside other engines: autoregressive, with a drafter and with n-gram lookup.

    python scripts/bench/engines.py targets=[models/smollm2_135m] drafter=FOLDER \\
      prompts=$SHALLOW_DRAFT_DATA/data/eval/mt_bench.jsonl

For each target and dtype one `eval.run` decodes the prompts in every engine in turn, each in
`rounds` rounds, of which the median counts. Engines run in their fastest setting: vLLM compiled,
ours fused. The tables are those of eval.run and eval.compare, below runs/bench/engines. The machine
must be idle, which is checked first. Engines are installed by scripts/engines/*.sh;
engines=[ours,hf] needs none.
"""

import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from decoding.costs.contention import machine_seconds
from decoding.errors import UserError
from decoding.models.folder import read_config
from eval.measure.records import AUTOREGRESSIVE
from eval.report.text import count_label, with_interval
from eval.statistics.engine_row import EngineRow
from eval.statistics.schema import read_all_rows
from jobs.paths import resolve, resolve_model
from scripts.bench import common
from scripts.bench.common import BenchOptions
from scripts.usage import run_script
from serving.engines.registry import OURS

ENGINES = ("ours", "hf", "vllm", "llama_cpp", "openvino")
IDLE_SECONDS = 5.0  # for which the machine is watched
IDLE_SHARE = 0.1  # of one core, which other processes may use
LEAST_ROUNDS = 3  # minimum at which the median ignores one outlier


@dataclass
class Options(BenchOptions):
    targets: list[str] = field(default_factory=lambda: ["embedded:target"])  # model folders
    drafter: str = ""  # drafter folder of every target; empty: n-gram lookup alone
    prompts: str = "embedded:prompts"  # evaluation JSONL
    engines: list[str] = field(default_factory=lambda: list(ENGINES))  # ours beside others
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16", "float32"])  # of all engines
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8])  # prompts decoded at a time
    temperatures: list[float] = field(default_factory=lambda: [0.0])  # 0: greedy
    max_prompts: int = 24  # prompts, spread over the file's categories
    max_new_tokens: int = 96  # tokens of every answer
    lookup: bool = True  # n-gram lookup as well
    num_draft_tokens: int = 2  # draft length in every engine
    max_length: int = 2048  # the most tokens of a row, if the target's context has as many
    rounds: int = 3  # runs of each generation, at least 3
    busy: bool = False  # measure on a machine that is not idle too
    # engine -> its own file of the target, such as llama_cpp: SmolLM2.Q4_1.gguf
    engine_target: dict[str, str] = field(default_factory=dict)
    output_dir: str = "runs/bench/engines"  # folder of the runs


def check_idle() -> None:
    """Raise UserError if other processes use the machine."""
    before = machine_seconds()
    if before is None:
        print("whether the machine is idle is not known on this system", file=sys.stderr)
        return
    time.sleep(IDLE_SECONDS)
    share = ((machine_seconds() or before) - before) / IDLE_SECONDS
    if share > IDLE_SHARE:
        raise UserError(
            f"other processes use {share:.0%} of a core, expected at most {IDLE_SHARE:.0%}. End "
            f"them, or measure all the same with busy=true."
        )


def overrides(chosen: Options, target: Path, dtype: str, folder: str) -> list[str]:
    """Return the overrides of one eval.run."""
    context = read_config(target).get("max_position_embeddings", chosen.max_length)
    drafters = [str(resolve_model(chosen.drafter))] if chosen.drafter else []
    return [
        f"engine=[{','.join(chosen.engines)}]",
        f"target.path={target}",
        f"target.dtype={dtype}",
        f"target.max_length={min(chosen.max_length, context)}",
        f"drafters=[{','.join(drafters)}]",
        f"prompt_lookup_control={chosen.lookup}",
        "benchmark=file",
        f"benchmark.path={resolve(chosen.prompts)}",
        "benchmark.spread=true",
        f"batch_sizes=[{','.join(map(str, chosen.batch_sizes))}]",
        f"temperatures=[{','.join(map(str, chosen.temperatures))}]",
        "sweep=[]",
        f"num_draft_tokens=[{chosen.num_draft_tokens}]",
        f"max_prompts={chosen.max_prompts}",
        f"max_new_tokens={chosen.max_new_tokens}",
        f"repeats={chosen.rounds}",
        f"threads={chosen.threads}",
        *(f"engine_target.{name}={path}" for name, path in chosen.engine_target.items()),
        f"output_dir={folder}",
    ]


def over_the_fastest(rows: list[EngineRow], rounds: int) -> list[str]:
    """Return our autoregressive decoding over the fastest engine's, in a line for each setting.

    In brackets is the 95 % interval of a paired bootstrap over prompts. rounds: number of runs of
    which the rows have the median.
    """
    lines = []
    for batch, temperature in sorted({(row.batch_size, row.temperature) for row in rows}):
        alone = {
            row.engine: row
            for row in rows
            if (row.batch_size, row.temperature) == (batch, temperature)
            and row.method == AUTOREGRESSIVE
        }
        ours = alone.pop(OURS, None)
        if ours is not None and alone:
            fastest = max(alone.values(), key=lambda row: row.tokens_per_second)
            # the row has the engine's speed over ours: invert the ratio and its interval
            low, high = fastest.over_ours_high, fastest.over_ours_low
            ratio = with_interval(1 / fastest.over_ours, low and 1 / low, high and 1 / high)
            lines.append(
                f"batch {batch}, temperature {temperature:g}: {ours.tokens_per_second:.1f} "
                f"tokens/s, {ratio} of {fastest.engine} ({count_label(ours.prompts, 'prompt')}, "
                f"median of {rounds} rounds)"
            )
    return lines


def run(job: str, arguments: list[str]) -> None:
    """Run a job in a process of its own, and end with its exit status if it fails."""
    done = subprocess.run([sys.executable, "-m", job, *arguments])
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    chosen = common.read_options(Options, engines=ENGINES)
    if chosen.rounds < LEAST_ROUNDS:
        raise UserError(f"rounds is {chosen.rounds}, expected at least {LEAST_ROUNDS}")
    if not chosen.busy:
        check_idle()
    for target in map(resolve_model, chosen.targets):
        for dtype in chosen.dtypes:
            folder = f"{chosen.output_dir}/{target.name}_{dtype}"
            run("eval.run", overrides(chosen, target, dtype, folder))
            rows = read_all_rows(Path(folder) / "results.jsonl")[1]
            lines = over_the_fastest(rows, chosen.rounds)
            print("\n".join([f"{target.name}, {dtype}", *lines]))
    if not (chosen.drafter or chosen.lookup):
        return  # eval.compare compares drafters
    compared = [f"runs=['{chosen.output_dir}/*']", f"output_dir={chosen.output_dir}_compared"]
    run("eval.compare", compared)


if __name__ == "__main__":
    run_script(main)
