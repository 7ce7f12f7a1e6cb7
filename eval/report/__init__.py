"""Report of an evaluation or a comparison: tables, plots and pages."""
