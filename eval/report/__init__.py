"""What a run shows: tables, plots and the page."""
