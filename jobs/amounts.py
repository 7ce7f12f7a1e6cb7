"""Text forms of sizes, durations and operation counts, for dry runs and stages."""

# key of a manifest's metrics: floating-point operations that a dry run counted
PLANNED = "planned_flop"


def size(count: float) -> str:
    """Format bytes in powers of ten: `1.4 GB`, `96 MB`, `0.3 MB`."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.0f} MB" if count >= 1e7 else f"{count / 1e6:,.1f} MB"


def hours(seconds: float) -> str:
    """Format seconds as hours: `101.42 hours`, `0.02 hours (87 s)`."""
    found = seconds / 3600
    if found >= 0.1:
        return f"{found:,.2f} hours"
    return f"{found:.2g} hours ({seconds:,.{0 if seconds >= 10 else 1}f} s)"


def operations(count: float) -> str:
    """Format floating-point operations: `36.5 EFLOP`, `5.6 TFLOP`, `23.6 GFLOP`."""
    units = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9))
    letter, unit = next(((letter, unit) for letter, unit in units if count >= unit), ("M", 1e6))
    return f"{count / unit:,.1f} {letter}FLOP"
