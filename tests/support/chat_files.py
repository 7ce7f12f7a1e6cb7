"""A valid chat, and files of records."""

from pathlib import Path

GOOD = {
    "id": "a",
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
}


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n"
    )
    return path
