"""Meshes: where arrays lie, and operators and models over many devices."""
