"""Imports of the package point down its layers, and there are no cycles."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megahedge"
LAYERS = [
    {"utils"},
    {"config"},
    {"parallel", "kernels", "data"},
    {"models", "checkpoint"},
    {"distill", "export"},
    {"evaluation"},
    {"training", "tables"},
    {"stages"},
    {"doctor"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Dotted name of a file of the package; a package's own is that of its folder."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


def imported(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, at its top or within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in NAMES else node.module for alias in node.names}
    return found


def subpackage(name: str) -> str | None:
    """`models` for megahedge.models.mlp; None for what is not below a subpackage."""
    parts = name.split(".")
    return parts[1] if parts[0] == "megahedge" and len(parts) > 1 else None


def test_every_subpackage_has_a_layer():
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in MODULES if path.parent != PACKAGE}
    assert folders <= set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path):
    here = subpackage(module_name(path))
    for name in imported(path):
        assert name.split(".")[0] not in ("tests", "scripts", "tools"), name
        there = subpackage(name)
        if here is None or there is None or there == here:
            continue
        assert LEVEL[there] < LEVEL[here], f"{module_name(path)} imports {name}"


def test_no_module_imports_itself_by_way_of_others():
    graph = {module_name(path): imported(path) & NAMES for path in MODULES}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for following in graph[name]:
                visit(following, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def _files(folder: str, pattern: str = "*.py") -> list[Path]:
    return sorted((PACKAGE / folder).rglob(pattern))


def test_training_names_no_stage_and_no_model():
    for path in _files("training"):
        assert not {subpackage(name) for name in imported(path)} & {"stages", "models"}, path


def test_kernels_know_no_process_groups():
    for path in _files("kernels"):
        assert not any(name.startswith("torch.distributed") for name in imported(path)), path
