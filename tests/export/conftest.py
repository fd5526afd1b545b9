"""Exported folders, made once, and the models that transformers loads from them."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from megahedge.export.to_hf import ExportOptions, export
from tests.export.small import MIXERS, student, write_run, write_teacher


@pytest.fixture(scope="session", autouse=True)
def modules_of_these_tests(tmp_path_factory):
    """transformers copies a folder's code to a cache in the user's home; here it is a folder of its own.

    One for the session: its package, once imported, stays with the folder that it came from.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", sys.path[:])  # which transformers adds to
        yield


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Folder of a run of each of MIXERS, under its name, and of the `teacher` behind them."""
    folder = tmp_path_factory.mktemp("export")
    write_teacher(folder / "teacher")
    for name, mixer in MIXERS.items():
        write_run(folder / name, student(mixer), folder / "teacher")
    return folder


@pytest.fixture(scope="session")
def folders(root) -> dict[str, Path]:
    """By name of MIXERS the exported folder; each is verified as it is made."""
    return {name: export(ExportOptions(run=str(root / name), out=str(root / "exported" / name))).folder for name in MIXERS}


@pytest.fixture(scope="session")
def loaded(folders) -> dict:
    """By name of MIXERS the model of its folder, by the code in the folder."""
    return {
        name: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
        for name, folder in folders.items()
    }


@pytest.fixture(params=MIXERS)
def model(request, loaded):
    """Each of them."""
    return loaded[request.param]
