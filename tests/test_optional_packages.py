"""Everything but what is made to adapt an optional package can be imported where none of them is installed."""

import subprocess
import sys

from tests.test_layers_of_imports import NAMES, PACKAGE

OPTIONAL = ("mamba_ssm", "causal_conv1d", "triton", "wandb", "lm_eval", "accelerate", "sentencepiece", "datasets")
ADAPTERS = ("megahedge.evaluation.lm_eval.", *(f"megahedge.kernels.triton_{name}" for name in ("channel", "chunk", "conv", "features")))
"""What the modules below are there for, and Triton's kernels with what launches them; who asks for these says what is missing."""

_PROGRAM = '''
import importlib, sys

class Hiding:
    """Finds nothing of the optional packages, as where they are not installed: transformers asks before it imports."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)  # find_distributions, which tells versions

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in OPTIONAL else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
for name in NAMES:
    importlib.import_module(name)
assert not {name.split(".")[0] for name in sys.modules} & set(OPTIONAL)
try:
    sys.modules["megahedge.evaluation.lm_eval"].check_installed()
except ValueError as error:
    assert "pip install -c constraints.txt -e .[eval]" in str(error) and "\\n" not in str(error), error
else:
    raise AssertionError("lm-eval is not missed")
print("imported", len(NAMES))
'''


def test_every_other_module_imports_without_the_optional_packages():
    names = sorted(name for name in NAMES if not name.startswith(ADAPTERS) or name.endswith("_backend"))
    assert len(names) == len(NAMES) - 5 - 6
    program = f"OPTIONAL, NAMES = {OPTIONAL!r}, {names!r}\n{_PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"imported {len(names)}" in done.stdout
