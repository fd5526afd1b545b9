"""Packages of other projects on a machine without a GPU: real ones with their binaries stubbed, and fakes that are broken."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BINARIES = ("selective_scan_cuda", "causal_conv1d_cuda")
REFERENCES = Path(sys.prefix, "references")
"""Where scripts/setup_venv.sh puts packages without their binaries."""

BREAKS = {
    "binary missing": "raise ImportError('libcudart.so.12: cannot open shared object file')",
    "for another torch": "raise OSError('undefined symbol: _ZN3c105ErrorC2')",
    "symbol missing": "",
    "symbol empty": "{function} = None",
    "symbol missing at the call": "def {function}(*_, **__): raise AttributeError(\"module has no attribute 'fwd'\")",
    "other GPU": "def {function}(*_, **__): raise RuntimeError('no kernel image is available for execution on the device')",
}
"""What a module that should define a function holds instead."""


def import_or_skip(monkeypatch, module):
    """A module of a package that wants its CUDA binaries, which no code that runs on a CPU calls."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(REFERENCES)])
    for binary in BINARIES:
        if binary not in sys.modules and importlib.util.find_spec(binary) is None:
            monkeypatch.setitem(sys.modules, binary, ModuleType(binary))
    reason = f"there is no {module.split('.')[0]}, not even without CUDA; scripts/setup_venv.sh installs it for tests"
    return pytest.importorskip(module, reason=reason, exc_type=ImportError)


def install_fake(monkeypatch, folder, package, contents):
    """A package that pip knows and that is found before a real one.  contents: source by module, dotted."""
    forget(monkeypatch, package)
    metadata = folder / f"{package}-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.9\n")
    for module, source in contents.items():
        *parents, name = module.split(".")
        place = folder
        for parent in parents:
            place = place / parent
            place.mkdir(exist_ok=True)
            (place / "__init__.py").touch()
        (place / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)


def uninstall(monkeypatch, package):
    """As where pip has never heard of it."""
    forget(monkeypatch, package)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("megahedge.utils.packages.is_installed", lambda name: False)


def forget(monkeypatch, package):
    """Its modules, until the test is over."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
