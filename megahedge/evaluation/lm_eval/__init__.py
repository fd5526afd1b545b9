"""lm-eval's tasks on our models: the one folder that knows lm-eval, which is optional.  Its modules are imported where it is there.

Prompts, metrics and standard errors are lm-eval's own; tokenisation follows the rules of its `hf` model, so that the figures agree.
"""

import importlib

from megahedge.utils.errors import InputError


def check_installed() -> None:
    """Raise InputError where lm-eval cannot be imported."""
    try:
        importlib.import_module("lm_eval.api.model")
    except ImportError as error:
        raise InputError(f"--tasks needs lm-eval ({error}); install it with `pip install -c constraints.txt -e .[eval]`") from None
