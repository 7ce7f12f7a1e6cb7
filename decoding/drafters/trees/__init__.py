"""Draft trees: their growth, their sizes, and the sampling of children."""
