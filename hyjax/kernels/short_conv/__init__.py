"""The operator `short_conv`: see api.py."""
