"""Options of scripts/doctor.py."""

import dataclasses

from megahedge.config.options import DataOptions, RunOptions, read_recipe
from megahedge.utils.errors import InputError
from megahedge.utils.files import check_output


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions(DataOptions, RunOptions):
    """What the stages understand of data and runs, under the same names; what is not given is not looked at."""

    data_path: tuple[str, ...] = ()
    """Prefix of indexed data to look at, or several with weights: 0.7 a 0.3 b."""
    teacher: str | None = None
    """Folder or hub name of the teacher to look at, and to plan the memory of both stages with; nothing is downloaded."""
    teacher_revision: str | None = None
    """Git revision of a hub teacher, for instance step143000."""
    recipe: str = "paper"
    """Values of the mixer's options in the memory plan: paper or tuned."""
    json: str | None = None
    """Write what was found to this file as well."""

    def __post_init__(self):
        DataOptions.__post_init__(self)
        RunOptions.__post_init__(self)
        read_recipe(self.recipe)  # refuses one that there is not
        if self.teacher_revision is not None and self.teacher is None:
            raise InputError(f"--teacher_revision={self.teacher_revision} goes with --teacher")
        if self.json is not None:
            check_output("json", self.json, self.json, overwrite=True)
