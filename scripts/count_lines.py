"""Count the lines of tracked Python files by top-level folder.

    python scripts/count_lines.py [REVISION]

"lines" are physical lines; "code" leaves out blank lines, comments and docstrings.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.usage import show_usage


def code_lines(source: str) -> int:
    """Return the number of lines without blank lines, comments and docstrings."""
    text = source.splitlines()
    kept = {
        n for n, line in enumerate(text, 1) if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(ast.parse(source)):
        constant = node.value if isinstance(node, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            kept -= set(range(constant.lineno, (constant.end_lineno or constant.lineno) + 1))
    return len(kept)


def git(*words: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print the counts of every top-level folder, of the product (no tests), and of everything."""
    show_usage(__doc__)
    revision = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path in git("ls-tree", "-r", "--name-only", revision).splitlines():
        if path.endswith(".py"):
            source, folder = git("show", f"{revision}:{path}"), path.split("/")[0]
            for name in (folder, "all") if folder == "tests" else (folder, "product", "all"):
                counts = (1, len(source.splitlines()), code_lines(source))
                sums[name] = [before + now for before, now in zip(sums[name], counts, strict=True)]
    print(f"{'':20}{'files':>8}{'lines':>8}{'code':>8}")
    last = {"product": 1, "all": 2}
    for name in sorted(sums, key=lambda name: (last.get(name, 0), name)):
        print(f"{name:20}" + "".join(f"{number:8}" for number in sums[name]))


if __name__ == "__main__":
    main()
