"""The operator `diagonal_scan`: see api.py."""
