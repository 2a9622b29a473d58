"""Substrate shared by everything that is trained or compiled for a pod."""
