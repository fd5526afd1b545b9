"""A table of the paper as one command: its rows are run, evaluated and printed beside the paper's numbers.

python scripts/reproduce.py table2 --scale small --seeds 1 2

Runs lie below --output_dir, in a folder of the scale, where rows and tables that share a run find it; a second start repeats nothing
that has ended.
`--scale paper` prints the commands that are left to run, in an order in which each finds what it starts from, and files them for Slurm
arrays; once all have ended, it makes the table.
"""

import dataclasses
import functools
import itertools
import shlex
import sys
from pathlib import Path

from megahedge.config.options import TrainOptions
from megahedge.data.blending import parse_data_path
from megahedge.data.meta import find_split
from megahedge.evaluation.evaluate import evaluate
from megahedge.evaluation.options import EvaluateOptions
from megahedge.evaluation.perplexity import perplexity_of
from megahedge.models.hf_weights import resolve_pretrained
from megahedge.tables.report import Curve, Result, as_record, check_plotting, markdown, plot
from megahedge.tables.rows import Row, Table, read_row, read_scale, read_table
from megahedge.tables.runs import Planner, RowRuns, curve
from megahedge.utils.cli import parse_options, positional, run_main
from megahedge.utils.errors import InputError
from megahedge.utils.files import atomic_write, finite_or_none, write_json
from megahedge.utils.jobs import Job, check_jobs, run_jobs
from megahedge.utils.versions import code_version

SCRIPTS = Path(__file__).parent
CONFIGS = SCRIPTS / "configs"
LAUNCHER = "deepspeed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """scripts/reproduce.py"""

    table: str = positional()
    """table1, table2, table3, table4 or table6, or recipes, which is ours, as in scripts/configs/tables.yaml."""
    scale: str = "small"
    """small runs the table here; paper prints its commands until they have run.  A file of scripts/configs/scales."""
    teacher: str | None = None
    """Folder or hub name in place of the scale's teacher pythia-1b."""
    data_path: str | None = None
    """Prefix of indexed data in place of the scale's."""
    seeds: tuple[int, ...] = (1, 2)
    """Seeds of data order and fresh parameters."""
    rows: tuple[str, ...] = ()
    """Rows to run, by name (default: all of the table); others of scripts/configs/paper may be among them.  Their table is filed as
    TABLE-part."""
    output_dir: str = "runs/tables"
    """Folder of the runs, and of the tables that are made of them."""
    parallel: int = 1
    """Runs at a time."""
    plot: bool = True
    """Draw the curves of a table that has them."""

    def __post_init__(self):
        check_jobs(self.output_dir, self.parallel, seeds=self.seeds)
        if len(set(self.rows)) < len(self.rows):
            raise InputError(f"--rows={' '.join(self.rows)} names a row twice")
        if min(self.seeds) < 0:
            raise InputError(f"--seeds={min(self.seeds)} must be at least 0")


class Reproduction:
    """A table, what it takes, and what came of it."""

    def __init__(self, options: ReproduceOptions):
        self.options = options
        self.table = _some_rows(read_table(CONFIGS, options.table), options.rows)
        scale = read_scale(CONFIGS, options.scale)
        if options.teacher is not None:
            scale = dataclasses.replace(scale, teachers=scale.teachers | {"pythia-1b": options.teacher})
        if options.data_path is not None:
            scale = dataclasses.replace(scale, common=scale.common | {"data_path": options.data_path})
        self.scale = scale
        self.folder = Path(options.output_dir) / scale.name
        self.planner = Planner(scale, SCRIPTS, self.folder)
        self.runs = {row.name: [self.planner.runs(row, seed) for seed in options.seeds] for row in self.table.rows}

    def jobs(self) -> list[list[Job]]:
        """Runs that start from a teacher, each once, then those that start from one of them."""
        everything = [job for seeds in self.runs.values() for runs in seeds for job in runs.jobs]
        unique = {job.folder: job for job in everything}.values()
        return [[job for job in unique if job.start is None], [job for job in unique if job.start is not None]]

    def run(self) -> list[Result]:
        """Run what has not ended, and evaluate.  Raises InputError, before anything runs, where a run was made with other options."""
        self._check_inputs()
        waves = self.jobs()
        for job in itertools.chain(*waves):
            job.claim()
        for jobs in waves:
            run_jobs(jobs, self.options.parallel)
        return [self._result(row) for row in self.table.rows]

    def _check_inputs(self) -> None:
        """Find data and teachers now, instead of in the first run.  Raises InputError."""
        common = self.scale.common
        corpora = [prefix for _, prefix in parse_data_path(common["data_path"])]
        for prefix in corpora:
            find_split(prefix, "train")
        find_split(common.get("val_data_path", corpora[0]), "val")
        for teacher in {self.scale.teacher(row) for row in self.table.rows}:
            resolve_pretrained(teacher)

    def _result(self, row: Row) -> Result:
        teacher = self.teacher_loss(self.scale.teacher(row))
        if not row.trained:
            return Result(row, (teacher,), teacher, 0, 0.0)
        seeds = self.runs[row.name]
        losses = tuple(runs.last.summary()["validation_loss"] for runs in seeds)
        seconds = sum(job.seconds() for runs in seeds for job in runs.jobs) / len(seeds)
        return Result(row, losses, teacher, sum(job.summary()["tokens"] for job in seeds[0].jobs), seconds)

    @functools.cache  # noqa: B019 - one reproduction lives as long as its process
    def teacher_loss(self, teacher: str) -> float:
        """Of a folder or hub name, on what the runs are scored on, in their precision."""
        names = ("data_path", "seq_len", "eval_tokens", "dtype")
        asked = EvaluateOptions(model=teacher, **{name: self.scale.common.get(name, getattr(TrainOptions, name)) for name in names})
        return evaluate(asked).perplexity.loss

    def curves(self) -> dict[str, list[Curve]]:
        """By the row's model, those of its seeds that have not diverged."""
        found = {row.model: [curve(runs) for runs in self.runs[row.name] if not _diverged(runs)] for row in self.table.rows}
        return {model: curves for model, curves in found.items() if curves}


def _some_rows(table: Table, names: tuple[str, ...]) -> Table:
    if not names:
        return table
    known = {row.name: row for row in table.rows}
    others = {name for name in names if name not in known and (CONFIGS / "paper" / f"{name}.yaml").is_file()}
    unknown = [name for name in names if name not in known and name not in others]
    if unknown:
        raise InputError(
            f"--rows: {', '.join(unknown)} is none of {table.name}'s, which has {', '.join(known)}, and no file of scripts/configs/paper"
        )
    known |= {name: read_row(CONFIGS, name) for name in others}
    compare = tuple(pair for pair in table.compare if set(pair) <= set(names))
    # under a name of its own: the files of the whole table stay
    return dataclasses.replace(table, name=f"{table.name}-part", rows=tuple(known[name] for name in names), compare=compare)


def _diverged(runs: RowRuns) -> bool:
    return runs.last is None or runs.last.summary()["validation_loss"] is None


def write_commands(reproduction: Reproduction) -> bool:
    """Print the commands of the runs that have not ended, and file those of all; returns whether any is left.

    There are two files: runs of the second start from some of the first, those of one file do not wait for each other.  Each line is a
    task of a Slurm array, under the same number however many have ended: a file that is written again changes nothing for an array that
    waits.
    """
    waits = ""
    for name, jobs in zip(("first", "then"), reproduction.jobs(), strict=True):
        for job in jobs:
            job.claim()
        left = [number for number, job in enumerate(jobs, start=1) if job.summary() is None]
        if not left:
            continue
        lines = [shlex.join([LAUNCHER, *job.command()[1:]]) for job in jobs]
        path = reproduction.folder / f"{reproduction.table.name}-{name}.txt"
        with atomic_write(path, "w") as handle:
            handle.write("".join(f"{line}\n" for line in lines))
        print(f"# {len(left)} runs" + (" that start from some of those above" if waits else ""))
        print("\n".join(lines[number - 1] for number in left))
        array = f"--array={','.join(map(str, left))}{waits} scripts/slurm/array.sbatch {shlex.quote(str(path))}"
        print(f"# the same as an array: {name}=$(sbatch --parsable {array})")
        waits = f" --dependency=afterany:${name}"  # whoever lacks what it starts from says so; the others run
    if waits:
        print("# Submit in the repository's root; a task takes a node of 8 GPUs for a day unless sbatch is told otherwise before the file.")
        print("# Once they have ended, this command makes the table, and evaluates the teachers for it: call it where there is a GPU.")
    return bool(waits)


def write(reproduction: Reproduction, results: list[Result], command: str) -> str:
    """The table's files beside its runs, with the command that made them; returns its Markdown."""
    options, table, folder = reproduction.options, reproduction.table, reproduction.folder
    code = code_version()
    version = f"{code['version']} ({code['git_commit']})" if code["git_commit"] else code["version"]
    seeds = ", ".join(map(str, options.seeds))
    text = markdown(table, results, f"`{command}`, seeds {seeds}, megahedge {version}.  Minutes are those of one seed.")
    record = as_record(table, results) | {"command": command, "options": dataclasses.asdict(options), "code": code}
    if table.curves:
        record["curves"] = reproduction.curves()
        if options.plot:
            teacher = perplexity_of(results[0].teacher_loss)
            plot(record["curves"], teacher, f"{table.name}: {table.title}", folder / f"{table.name}.svg")
    write_json(folder / f"{table.name}.json", finite_or_none(record))
    with atomic_write(folder / f"{table.name}.md", "w") as handle:
        handle.write(text)
    return text


def main() -> None:
    """Entry point."""
    options = parse_options(ReproduceOptions, prog="reproduce.py", description="Run a table of the paper.")
    reproduction = Reproduction(options)
    if reproduction.scale.cluster and write_commands(reproduction):
        return
    if reproduction.table.curves and options.plot:
        check_plotting()
    print(write(reproduction, reproduction.run(), shlex.join(["python", *sys.argv])))


if __name__ == "__main__":
    run_main(main)
