"""Everything can be imported where none of the optional packages is installed."""

import subprocess
import sys

from tests.test_layers_of_imports import NAMES, PACKAGE

OPTIONAL = ("mamba_ssm", "causal_conv1d", "triton", "wandb", "lm_eval", "accelerate", "sentencepiece", "datasets")

_PROGRAM = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
for name in NAMES:
    importlib.import_module(name)
assert not {name.split(".")[0] for name in sys.modules} & set(OPTIONAL)
print("imported", len(NAMES))
"""


def test_every_module_imports_without_the_optional_packages():
    program = f"OPTIONAL, NAMES = {OPTIONAL!r}, {sorted(NAMES)!r}\n{_PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"imported {len(NAMES)}" in done.stdout
