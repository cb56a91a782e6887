"""Measurements: ratios against baselines, taken in one run on the machine at hand."""
