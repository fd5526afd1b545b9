"""What code and which packages a result was made with."""

import importlib.metadata
import subprocess
from pathlib import Path

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy", "mamba-ssm", "causal-conv1d", "triton", "wandb")


def code_version() -> dict[str, str | None]:
    """Version of megahedge and, in a git checkout, its commit with `-dirty` where files differ from it."""
    import megahedge

    folder = Path(megahedge.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {"version": megahedge.__version__, "git_commit": commit}


def package_versions() -> dict[str, str | None]:
    """Installed versions of the packages that can change a result; None for those that are absent."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
