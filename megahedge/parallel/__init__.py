"""Tensor parallelism: process groups, collectives with gradients, sharded layers and losses.  All are no-ops at size 1."""
