"""scripts/setup_venv.sh: what is installed is shown while it is, is installed once, and fails where pip fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "setup_venv.sh"
# notes what it is asked for, and prints as pip does where its output is no terminal; it fails on the line in the file `broken`
PIP = """#!/bin/bash
[ "$1" = -m ] || exit 0
case $* in
    *references*)
        [ ! -f unreachable ]
        exit
        ;;
esac
echo "$*" >>calls
echo "Looking in indexes: somewhere"
echo "Collecting numba==0.68.1 (from -c constraints.txt (line 66))"
echo "  Using cached numba-0.68.1.whl.metadata (3 kB)"
echo "Requirement already satisfied: torch in .venv"
if [ -f broken ]; then echo "ERROR: no space left" >&2; exit 1; fi
echo "  Downloading numba-0.68.1.whl (3.9 MB)"
echo "Installing collected packages: numba"
echo "Successfully installed numba-0.68.1"
"""


@pytest.fixture
def setup_venv(tmp_path):
    """A function that runs `setup_venv EXTRAS` as the scripts do, in an environment whose pip is made up."""
    shutil.copy(SCRIPT, tmp_path)
    for name in ("setup.py", "constraints.txt"):
        (tmp_path / name).write_text("torch==2.13.0\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PIP)
    python.chmod(0o755)

    def run(extras: str) -> subprocess.CompletedProcess:
        script = f"set -euo pipefail; source setup_venv.sh; setup_venv {extras}; echo ready"
        return subprocess.run(["bash", "-c", script], cwd=tmp_path, env=os.environ, capture_output=True, text=True)

    return run


def test_what_is_fetched_and_installed_is_shown(setup_venv):
    done = setup_venv("cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "installing megahedge[cpu] and the versions in constraints.txt (some minutes on a fresh machine)",
        "Collecting numba==0.68.1 (from -c constraints.txt (line 66))",
        "  Downloading numba-0.68.1.whl (3.9 MB)",
        "Installing collected packages: numba",
        "Successfully installed numba-0.68.1",
        "ready",
    ]


def test_a_failed_installation_ends_the_script_and_is_tried_again(setup_venv, tmp_path):
    (tmp_path / "broken").touch()
    done = setup_venv("cpu")
    assert (done.returncode, done.stderr) == (1, "ERROR: no space left\n")
    assert "ready" not in done.stdout
    (tmp_path / "broken").unlink()
    assert setup_venv("cpu").returncode == 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


@pytest.mark.parametrize(("order", "installed"), [(["cpu", "cpu", "dev", "dev"], ["cpu", "dev"]), (["dev", "cpu"], ["dev"])])
def test_a_set_is_installed_once(setup_venv, tmp_path, order, installed):
    """The tests need more than the quickstart, and hold what that needs."""
    for extras in order:
        assert setup_venv(extras).stdout.endswith("ready\n")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == [f".[{extras}]" for extras in installed]


def test_the_tests_go_without_reference_code_that_cannot_be_had(setup_venv, tmp_path):
    (tmp_path / "unreachable").touch()
    done = setup_venv("dev")
    assert done.stdout.endswith("ready\n")
    assert done.stderr == "the reference code of mamba-ssm and causal-conv1d cannot be had: tests that need it are skipped\n"


def test_other_versions_are_installed_over_it(setup_venv, tmp_path):
    setup_venv("cpu")
    (tmp_path / "constraints.txt").write_text("torch==2.14.0\n")
    assert "Successfully installed" in setup_venv("cpu").stdout
