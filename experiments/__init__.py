"""Experiments that could refute each method's claims, and the runner behind `foliax`."""
