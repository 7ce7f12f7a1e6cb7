"""A saved configuration of an earlier version, read as today's."""

from typing import Any

from omegaconf import OmegaConf


def as_of_now(saved: dict[Any, Any]) -> dict[Any, Any]:
    """A saved configuration as today's: before `max_seconds` there was, `max_epochs` bounded nothing beside `max_steps`."""

    def loop_of_now(loop: Any) -> Any:
        before = isinstance(loop, dict) and loop.get("max_steps") and "max_seconds" not in loop
        return {**loop, "max_epochs": None} if before else loop

    return saved | {key: loop_of_now(saved[key]) for key in ("loop", "between") if key in saved}


def with_defaults(saved: dict[Any, Any], schema: type[Any]) -> dict[Any, Any]:
    """A saved configuration with the fields that it has none of, as they are by default: what it meant when they were not there."""
    fields = OmegaConf.to_container(OmegaConf.structured(schema))
    merged = OmegaConf.to_container(OmegaConf.merge(fields, saved))
    assert isinstance(merged, dict)
    return merged
