"""Import packages in a process of its own: a broken wheel may end the process that imports it.

python megahedge/doctor/try_imports.py torch:torch lm-eval:lm_eval

Of each PACKAGE:MODULE one line of JSON before the import and, if it is installed, one after it; what the imports print goes nowhere.
Of PACKAGE: without a module the version is all that is told.
"""

import importlib
import importlib.metadata
import json
import os
import sys


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fault(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except BaseException as error:  # some packages end the program
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def main(words: list[str]) -> None:
    """Entry point."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for package, module in (word.split(":") for word in words):
        version = _version(package)
        print(json.dumps({"package": package, "version": version}), file=told)
        if version is not None:
            fault = _fault(module) if module else None
            print(json.dumps({"package": package, "version": version, "fault": fault}), file=told)
    told.flush()
    os._exit(0)  # what was imported may have threads, and nothing of it is to be kept


if __name__ == "__main__":
    main(sys.argv[1:])
