"""The label that data, losses and evaluation agree on for a position that counts nowhere."""

IGNORE_INDEX = -100
"""The default of torch's cross-entropy."""
