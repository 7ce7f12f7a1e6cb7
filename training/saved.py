"""A saved configuration of an earlier version, read as today's."""

from typing import Any


def as_of_now(saved: dict[Any, Any]) -> dict[Any, Any]:
    """A saved configuration as today's: before `max_seconds` there was, `max_epochs` bounded nothing beside `max_steps`."""

    def loop_of_now(loop: Any) -> Any:
        before = isinstance(loop, dict) and loop.get("max_steps") and "max_seconds" not in loop
        return {**loop, "max_epochs": None} if before else loop

    return saved | {key: loop_of_now(saved[key]) for key in ("loop", "between") if key in saved}


def with_defaults(saved: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """Fill in the keys that a saved configuration lacks because they came later. usual: today's configuration with every default."""
    inner = {
        key: with_defaults(value, usual[key]) if isinstance(value, dict) and isinstance(usual.get(key), dict) else value
        for key, value in saved.items()
    }
    return {**usual, **inner}
