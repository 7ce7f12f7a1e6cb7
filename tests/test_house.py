"""Structure of the packages: few entries in a folder and short chains of imports; the nightly run.

The layers are contracts of import-linter (pyproject.toml).
"""

from functools import cache
from pathlib import Path

import grimp
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
MOST_ENTRIES = MOST_IN_A_CHAIN = 16


@pytest.fixture(scope="module")
def decoding_imports() -> grimp.ImportGraph:
    """Return the graph of imports inside `decoding`."""
    return grimp.build_graph("decoding", exclude_type_checking_imports=True, cache_dir=None)


def longest_chain(graph: grimp.ImportGraph) -> list[str]:
    """Return the longest chain of modules, each of which imports the next."""

    @cache
    def below(module: str) -> list[str]:
        found = (below(one) for one in graph.find_modules_directly_imported_by(module))
        return [module, *max(found, key=len, default=[])]

    return max(map(below, graph.modules), key=len)


def test_decoding_has_few_entries():
    entries = [path for path in (ROOT / "decoding").iterdir() if path.name != "__pycache__"]
    folders = [path for path in entries if path.is_dir() and any(path.glob("*.py"))]
    assert len(folders) + sum(path.suffix == ".py" for path in entries) <= MOST_ENTRIES


def test_the_longest_chain_of_imports_is_short(decoding_imports: grimp.ImportGraph):
    chain = longest_chain(decoding_imports)
    assert len(chain) <= MOST_IN_A_CHAIN, " -> ".join(chain)


def test_interfaces_import_no_other_module_of_the_project(decoding_imports: grimp.ImportGraph):
    package = "decoding.interfaces"
    modules = {package, *decoding_imports.find_descendants(package)}
    assert len(modules) > 1
    for module in modules:
        assert decoding_imports.find_modules_directly_imported_by(module) <= modules, module


def test_control_a_longer_chain_is_found():
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("a", "c"), ("d", "a")):
        graph.add_import(importer=importer, imported=imported)
    assert longest_chain(graph) == ["d", "a", "b", "c"]


def test_the_long_tests_run_every_night():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    [time] = workflow[True]["schedule"]  # YAML 1.1 reads the key `on` as true
    minute, hour, *days = time["cron"].split()
    assert minute.isdigit() and hour.isdigit() and days == ["*", "*", "*"]
    [job] = workflow["jobs"].values()
    assert job["runs-on"].startswith("ubuntu") and 60 < job["timeout-minutes"] <= 360
    assert job["steps"][-1]["run"].endswith("./scripts/test.sh --all")
