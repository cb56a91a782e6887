"""The operator `selective_scan`: see api.py."""
