"""Packages of the wheel; everything else about it is in pyproject.toml.

The configurations and the embedded target are folders of the repository (conf/, assets/). In a
wheel they lie in the namespace `shallow_draft_data`, where `jobs.paths.data_folder` finds them.
"""

from setuptools import find_namespace_packages, find_packages, setup

CODE = ["decoding", "jobs", "training", "distill", "recurrent_drafting", "heads", "serving", "eval"]
DATA = ["conf", "assets"]
FILES = ["decoding.models.native.step", "eval.report.templates"]  # C++, and templates of pages

data = [
    f"shallow_draft_data.{found}"
    for found in find_namespace_packages(include=[*DATA, *(f"{one}.*" for one in DATA)])
]
setup(
    packages=[*find_packages(include=[*CODE, *(f"{one}.*" for one in CODE)]), *FILES, *data],
    package_dir={f"shallow_draft_data.{one}": one for one in DATA},
)
