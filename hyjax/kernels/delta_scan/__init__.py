"""The operator `delta_scan`: see api.py."""
