"""The operator `linear_scan`: see api.py."""
