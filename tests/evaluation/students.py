"""A small student of the recipe `tuned` as a run, as a folder, and beside the teacher that it came from; one token a byte."""

import contextlib
from pathlib import Path

from megahedge.data.meta import tokenizer_digest
from megahedge.export.to_hf import ExportOptions, export
from tests.evaluation import small
from tests.export.small import MIXERS, student, write_run


def write_student(root: Path) -> dict[str, str]:
    """Paths of the student's run and export, and of its teacher; exported in `root`, from where the folder names its teacher."""
    root.mkdir(parents=True, exist_ok=True)
    teacher = root / "teacher" / "hf"
    small.write_run(root / "teacher", tokenizer_digest(small.byte_tokenizer()))
    small.byte_tokenizer().save_pretrained(teacher)
    write_run(root / "run", student(MIXERS["tuned"], vocab_size=small.VOCAB_SIZE), teacher)
    with contextlib.chdir(root):
        export(ExportOptions(run="run", out="hf", verify=False))
    return {"run": str(root / "run"), "hf": str(root / "hf"), "teacher": str(teacher)}
