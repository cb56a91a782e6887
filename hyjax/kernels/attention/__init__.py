"""The operator `attention`: see api.py."""
