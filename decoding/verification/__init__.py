"""Verification rules for chains and trees, and their twins that stay on the device."""
