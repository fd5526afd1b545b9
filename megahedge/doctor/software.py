"""Which code and which packages there are, and whether these can be imported."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from megahedge.doctor.report import Section
from megahedge.training.op_builds import is_anything_built
from megahedge.utils.versions import code_version

MODULES = {
    "torch": "torch",
    "deepspeed": "deepspeed",
    "transformers": "transformers",
    "datasets": "datasets",
    "triton": "triton",
    "mamba-ssm": "mamba_ssm",
    "causal-conv1d": "causal_conv1d",
    "numba": "numba",
    "megatron-core": None,
    "wandb": "wandb",
    "lm-eval": "lm_eval",
}
"""What is imported of each package; nothing of one that only our tests import, and that slowly."""
NEEDED = ("torch", "deepspeed", "transformers")
"""Those without which nothing trains."""
IMPORT_SECONDS = 120.0
"""What all of them together may take; a slow file system needs a minute."""


class PackageTrial:
    """Packages being imported by another process, so that other checks need not wait for it."""

    def __init__(self, modules: dict[str, str | None] = MODULES, seconds: float = IMPORT_SECONDS):
        # what this process has imported needs no trial
        self._modules = {package: None if module in sys.modules else module for package, module in modules.items()}
        self._seconds = seconds
        self._process = self._start(list(modules))

    def _start(self, packages: list[str]) -> subprocess.Popen:
        words = [f"{package}:{self._modules[package] or ''}" for package in packages]
        # by its place, and -P: the folder that the doctor was started in may hold a folder `wandb`, which is no package
        command = [sys.executable, "-P", str(Path(__file__).with_name("try_imports.py")), *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def outcome(self) -> dict[str, dict]:
        """Of each package its version (None: it is not installed) and what its import raised (None: nothing)."""
        found, left = {}, list(self._modules)
        while left:
            told, end = self._await()
            found |= {line["package"]: line for line in told}
            left = [package for package in left if package not in found]
            if told and "fault" not in told[-1] and told[-1]["version"] is not None:  # it is this one's import that has ended it
                found[told[-1]["package"]] |= {"fault": end}
            elif left and not told:
                return found | {package: {"version": None, "fault": f"nothing can be imported at all: {end}"} for package in left}
            if left:
                self._process = self._start(left)
        return {package: {"version": found[package]["version"], "fault": found[package].get("fault")} for package in self._modules}

    def _await(self) -> tuple[list[dict], str]:
        """What the process has told, and how it has ended."""
        try:
            told, end = self._process.communicate(timeout=self._seconds)[0], None
        except subprocess.TimeoutExpired:
            self._process.kill()
            told, end = self._process.communicate()[0], f"its import does not end within {self._seconds:g} s"
        status = self._process.returncode
        crash = f"its import ends the process ({f'signal {-status}' if status < 0 else f'status {status}'})"
        return [json.loads(line) for line in told.splitlines()], end or crash


def look_at_software(section: Section, trial: PackageTrial) -> None:
    """Versions of code, interpreter and packages."""
    code = code_version()
    section.row("megahedge", f"{code['version']}, {'commit ' + code['git_commit'] if code['git_commit'] else 'not in a git checkout'}")
    section.row("Python", f"{platform.python_version()} ({sys.executable})")
    outcome = trial.outcome()
    for package, state in outcome.items():
        section.row(package, _state(package, **state))
        if state["fault"] is not None:
            _tell_of_fault(section, package, state["fault"])
        elif package in NEEDED and state["version"] is None:
            section.problems.append(f"{package} is not installed; pip install -c constraints.txt -e . in megahedge's folder")
    if outcome["torch"]["fault"] is None and outcome["torch"]["version"] is not None:
        _look_at_compiler(section)
    section.figures |= {"code": code, "python": platform.python_version(), "packages": outcome}


def _state(package: str, version: str | None, fault: str | None) -> str:
    if fault is not None:
        return f"{version or ''} broken: {fault}".strip()
    if version is None:
        return "not installed"
    return f"{version}, {_build()}" if package == "torch" else version


def _build() -> str:
    """Of torch: what it is made for, and whether that is there."""
    import torch  # not at the top: this module tells of a torch that is broken, too

    if torch.version.cuda is None:
        return "a build without CUDA"
    if torch.cuda.is_available():
        return f"built for CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs visible"
    return f"built for CUDA {torch.version.cuda}, which is not available: {_why_no_cuda()}"


def _why_no_cuda() -> str:
    """What torch says when it is made to try."""
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError, AssertionError, whatever the driver leads to
        return " ".join(str(error).split())
    return "no GPU is visible"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _tell_of_fault(section: Section, package: str, fault: str) -> None:
    if package in NEEDED:
        section.problems.append(f"{package} is broken ({fault}); pip install --force-reinstall -c constraints.txt {package}")
    else:
        section.warnings.append(
            f"{package} is broken ({fault}) and counts as missing; training does without it: pip uninstall {package}, or install a build "
            "that fits this torch"
        )


def _look_at_compiler(section: Section) -> None:
    """Without GPUs, DeepSpeed compiles a helper at its first start in an environment."""
    compiler, built = shutil.which(os.environ.get("CXX", "c++")), is_anything_built()
    section.row("C++ compiler", compiler or "none")
    section.row(
        "DeepSpeed's helpers", "compiled" if built else "none yet; without GPUs one is compiled at the first start, for about a minute"
    )
    if compiler is None and not built and not _has_cuda():
        section.problems.append("DeepSpeed compiles a helper at its first start, and there is no C++ compiler; install the package g++")
