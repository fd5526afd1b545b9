"""The Python files of an exported folder: configuration and model, and copies of the kernels that they run on.

Made at export time from the package's own modules, so that there is nothing to keep in step.  transformers loads such files by flat
relative imports, so `from megahedge.kernels.scan import …` becomes `from .hedge_mamba_scan import …`; nothing else is changed.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path

import megahedge

ROOTS = ("megahedge.export.configuration_hedge_mamba", "megahedge.export.modeling_hedge_mamba")
_MODEL_FILE = "modeling_hedge_mamba.py"
REPLACED = {
    "megahedge.kernels.registry": "megahedge.export.scan_backends",
    "megahedge.kernels.conv_registry": "megahedge.export.conv_backends",
}
"""Modules in whose place another travels: the registries know compiled backends and our errors."""
_DIGEST = "all files: "
_IMPORT = re.compile(r"^from (megahedge[\w.]*) import ", re.MULTILINE)


def code_files() -> dict[str, str]:
    """Contents by file name: ROOTS and all modules of ours that they import, directly or not.

    Every file bears the digest of them all.  In one process transformers runs all models of one config class by the code of the first
    that it has loaded; with the digest, folders of different code have different config classes as well.
    """
    sources, waiting = {}, list(ROOTS)
    while waiting:
        module = waiting.pop()
        if module not in sources:
            sources[module] = _source(module)
            waiting += _own_imports(module, sources[module])
    bodies = {module: _IMPORT.sub(lambda match: f"from .{_flat_name(match[1])} import ", source) for module, source in sources.items()}
    bodies[ROOTS[1]] += _imports_of_the_rest(bodies, sources[ROOTS[1]])
    digest = hashlib.sha256(json.dumps(bodies, sort_keys=True).encode()).hexdigest()[:16]
    files = {f"{_flat_name(module)}.py": _header(module, digest) + bodies[module] for module in sorted(bodies)}
    assert len(files) == len(bodies), f"two of {sorted(bodies)} would have one name"
    return files


@functools.cache
def code_digest() -> str:
    """Tells this package's `code_files` from another version's."""
    return _digest(code_files()[_MODEL_FILE])


def folder_digest(folder: Path) -> str | None:
    """The same of the code in an exported folder; None where that bears none."""
    path = folder / _MODEL_FILE
    return _digest(path.read_text(encoding="utf-8")) if path.is_file() else None


def _digest(content: str) -> str | None:
    _, found, digest = content.partition("\n")[0].partition(_DIGEST)
    return digest if found else None


def _imports_of_the_rest(modules: Iterable[str], source: str) -> str:
    """Lines for the end of the model's file: earlier versions of transformers 5 fetch only the files that it imports itself."""
    rest = sorted(set(map(_flat_name, modules)) - set(map(_flat_name, [*_IMPORT.findall(source), *ROOTS])))
    lines = [f"from .{name} import __name__ as _  # noqa: E402" for name in rest]
    return "\n".join(["", "", "# What the imported files import themselves: not every version of transformers looks for it.", *lines, ""])


def _own_imports(module: str, source: str) -> list[str]:
    """Modules of ours that the source imports, all by `from … import` at the start of a line; anything else could not be rewritten."""
    nodes = list(ast.walk(ast.parse(source)))
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    ours = [name for name in found if name.split(".")[0] == "megahedge"]
    rewritten = _IMPORT.findall(source)
    assert sorted(ours) == sorted(rewritten), f"{module} imports {ours}, of which only {rewritten} can be rewritten"
    return rewritten


def _flat_name(module: str) -> str:
    """`hedge_mamba_scan` for megahedge.kernels.scan; names that transformers goes by stay."""
    last = REPLACED.get(module, module).rpartition(".")[2]
    return last if last.endswith("_hedge_mamba") else f"hedge_mamba_{last}"


def _source(module: str) -> str:
    path = Path(importlib.util.find_spec(REPLACED.get(module, module)).origin)
    assert path.name != "__init__.py", f"{module} is a package, which has no single file to travel"
    return path.read_text(encoding="utf-8")


def _header(module: str, digest: str) -> str:
    origin = REPLACED.get(module, module).replace(".", "/")
    return f"# Copied from {origin}.py of megahedge {megahedge.__version__} (Apache-2.0) by tools/convert_to_hf.py; {_DIGEST}{digest}\n"
