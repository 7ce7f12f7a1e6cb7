"""Experiments that span several jobs: each stage is `python -m <stage>` in a process of its own, folder to folder.

Stages talk only through folders; a finished one (its manifest says so, for the same configuration) is passed over.
"""

import subprocess
import sys
from typing import Any

from decoding.errors import UserError
from training.config import JobConfig


def run_stages(config: JobConfig) -> None:
    """Run `config.stages` in order. A stage is `module` or `module:label`; `stage_overrides[stage]` are its Hydra overrides.

    In overrides, `{output_dir}` stands for this run's folder. Raises UserError naming the stage that failed.
    """
    for number, stage in enumerate(config.stages, start=1):
        module = stage.split(":")[0]
        overrides = [text.replace("{output_dir}", config.output_dir) for text in config.stage_overrides.get(stage, [])]
        if config.dry_run:
            overrides.append("dry_run=true")
        command = [sys.executable, "-m", module, *overrides]
        print(f"[{number}/{len(config.stages)}] python -m {module} {' '.join(overrides)}", flush=True)
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            raise UserError(
                f"stage {number} ({stage}) ended with status {status}; mend it and run the same command: finished stages are passed over"
            )
