"""Everything can be imported where none of the optional packages is installed."""

import subprocess
import sys

from tests.test_layers_of_imports import NAMES, PACKAGE

OPTIONAL = ("mamba_ssm", "causal_conv1d", "triton", "wandb", "lm_eval", "accelerate", "sentencepiece", "datasets")

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
print("imported", len(NAMES))
'''


def test_every_module_imports_without_the_optional_packages():
    program = f"OPTIONAL, NAMES = {OPTIONAL!r}, {sorted(NAMES)!r}\n{_PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"imported {len(NAMES)}" in done.stdout
