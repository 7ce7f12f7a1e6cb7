"""Imports of the server that forks processes (forks.py)."""

import contextlib
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as jobs set it for `target.device=cpu`

import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401

import recurrent_drafting.train  # noqa: F401
from tests.support.brief_measurements import measure_briefly

measure_briefly()

with contextlib.suppress(ImportError):  # an extra; accelerate imports it when a model is saved
    import deepspeed  # noqa: F401
