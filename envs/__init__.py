"""Environments behind the gymnax 1.x interface."""
