"""Whether what is being computed has been computed before: activations that were not kept, made again for the backward."""

import contextlib

_depth = 0  # of the process, as autograd may work in a thread of its own


def is_recomputing() -> bool:
    """Whether a recomputation is under way."""
    return _depth > 0


def recomputation_contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """`context_fn` of torch.utils.checkpoint: nothing around the forward, and a note around the recomputation."""
    return contextlib.nullcontext(), _Recomputing()


class _Recomputing(contextlib.AbstractContextManager):
    """May be entered again: a graph that is kept is gone through more than once."""

    def __enter__(self):
        global _depth
        _depth += 1

    def __exit__(self, *exception):
        global _depth
        _depth -= 1
