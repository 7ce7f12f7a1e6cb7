"""Block drafters on one backbone: DFlash (arXiv 2602.06036) and the heads that extend it."""
