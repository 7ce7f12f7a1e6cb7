"""Probes of the doctor, a file for each group; every probe names its cause only beyond doubt."""
