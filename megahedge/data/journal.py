"""What a long job has done so far, on the disk, so that the same command goes on after whatever has ended it."""

import os
from pathlib import Path

from megahedge.utils.errors import InputError
from megahedge.utils.files import disk_errors_explained, read_json, write_json


class Journal:
    """A JSON file with the task, which must be the same one on restart, and the state that was reached.

    path: the file.
    task: what decides the result, by the names under which a user knows it.
    """

    def __init__(self, path: str | os.PathLike, task: dict):
        self.path = Path(path)
        self.task = task

    def load(self) -> dict | None:
        """The state of an unfinished job, or None where there is none.

        Raises InputError where it is that of another task, naming what differs, or cannot be read.
        """
        if not self.path.exists():
            return None
        try:
            content = read_json(self.path)
            before, state = dict(content["task"]), dict(content["state"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.path}, which tells of unfinished work, cannot be read ({error}); begin anew with --overwrite"
            ) from None
        changed = [name for name in {**before, **self.task} if before.get(name) != self.task.get(name)]
        if changed:
            pairs = ", ".join(f"{name} {_brief(before.get(name))} (now {_brief(self.task.get(name))})" for name in changed)
            raise InputError(
                f"{self.path} tells of unfinished work that was begun with {pairs}; use these again, or begin anew with --overwrite"
            )
        return state

    def save(self, state: dict) -> None:
        """Put a new state in the place of the last one, atomically."""
        with disk_errors_explained(self.path):
            write_json(self.path, {"task": self.task, "state": state})

    def remove(self) -> None:
        """The job is done, or given up."""
        self.path.unlink(missing_ok=True)


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
