"""Frozen dataclasses of every setting, checked when they are made; one owner per setting."""
