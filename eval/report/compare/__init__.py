"""What a comparison of runs shows: tables, plots and the page."""
