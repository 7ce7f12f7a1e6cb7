"""The engines that a drafter can be measured in, besides our own loop, and where they are found."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decoding.errors import UserError
from serving.engines.heads import HEADS, PARD

OURS = "ours"
ROOT = Path(__file__).resolve().parents[2]
CHECK = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


@dataclass(frozen=True)
class Engine:
    """What has to be known about an engine before it starts."""

    worker: str  # program in `workers`
    module: str  # that its Python environment must have
    install: str  # command that installs it
    # rule by which sampling tests drafted tokens: token (by p / q), or point_mass (the draft is the
    # drafter's likeliest token, accepted with the target's probability); empty: it is not known, so
    # drafts are measured at temperature 0 alone
    rule: str
    python: str = ""  # interpreter below the project's folder; empty: the one that runs us
    runs_here: bool = False  # its module is imported by us, so no other interpreter helps
    drafts_batches: bool = True  # false: drafts for one prompt at a time
    heads: tuple[str, ...] = ()  # methods by which it runs trained heads and parallel drafters
    # whether sampling with a drafter is tested against the exact distribution in each run
    distribution_is_tested: bool = False


ENGINES: dict[str, Engine] = {
    "hf": Engine(
        worker="hf_worker.py",
        module="transformers",
        install="pip install transformers",
        rule="token",
        drafts_batches=False,
        distribution_is_tested=True,
    ),
    "vllm": Engine(
        worker="vllm_worker.py",
        module="vllm",
        install="./scripts/engines/vllm.sh",
        rule="point_mass",
        python=".venv-vllm/bin/python",
        distribution_is_tested=True,
        heads=(*HEADS, PARD),
    ),
    "llama_cpp": Engine(
        worker="llama_cpp_worker.py",
        module="gguf",
        install="pip install -e '.[gguf]'",  # its program: see serving.engines.conversion
        rule="point_mass",
        runs_here=True,
    ),
    "openvino": Engine(
        worker="openvino_worker.py",
        module="openvino_genai",
        install="./scripts/engines/openvino.sh",
        rule="",  # see its worker
        python=".venv-openvino/bin/python",
    ),
}


def python_variable(name: str) -> str:
    """Return the environment variable that names another interpreter for an engine."""
    return f"SHALLOW_DRAFT_{name.upper()}_PYTHON"


def python_of(name: str, pythons: Mapping[str, str]) -> str:
    """Return the interpreter that an engine runs in.

    pythons: engine -> interpreter, empty for the usual one. Raises UserError with the command that
    installs the engine if the interpreter or the engine's module is missing, and for an interpreter
    of an engine that has none.
    """
    engine = ENGINES[name]
    key, variable = f"engine_python.{name}", python_variable(name)
    asked = pythons.get(name) or os.environ.get(variable, "")
    if asked and engine.runs_here:
        raise UserError(
            f"{key if pythons.get(name) else variable} is {asked}, but {name} runs in no Python "
            f"environment of its own: {sys.executable} needs the module {engine.module}. Remove it."
        )
    python = asked or (str(ROOT / engine.python) if engine.python else sys.executable)
    remedy = f"Install it with {engine.install}" + (
        "."
        if engine.runs_here
        else f", or name the interpreter that has it: {key}=PATH of eval.run, or {variable}=PATH."
    )
    try:
        found = subprocess.run([python, "-c", CHECK, engine.module], capture_output=True, text=True)
    except OSError as error:
        raise UserError(
            f"engine {name} is not installed: {python} cannot be run ({error.strerror}). {remedy}"
        ) from error
    if found.returncode:
        raise UserError(
            f"engine {name} is not installed: {python} has no module {engine.module}. {remedy}"
        )
    return python
