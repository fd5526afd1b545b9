"""The commands behind a row: which stage-1 runs it shares with others, its stage 2, and the curve that both draw."""

import dataclasses
import json
from pathlib import Path

from megahedge.tables.rows import Row, Scale
from megahedge.utils.errors import InputError
from megahedge.utils.jobs import Job

NEVER = 10**9
"""An interval that no run reaches: where the scale says nothing else, it saves once, at its end."""


@dataclasses.dataclass(frozen=True)
class RowRuns:
    """The runs of a row for one seed; a row of one stage has one of them only, the teacher none."""

    stage1: Job | None
    stage2: Job | None

    @property
    def last(self) -> Job | None:
        """The one whose validation loss is the row's."""
        return self.stage2 or self.stage1

    @property
    def jobs(self) -> list[Job]:
        """In their order."""
        return [job for job in (self.stage1, self.stage2) if job is not None]


@dataclasses.dataclass(frozen=True)
class Planner:
    """Makes commands of rows.  A run depends on its row alone, so that tables share it; rows with the same stage 1 share that."""

    scale: Scale
    scripts: Path
    """Folder of stage1.py and stage2.py."""
    output_dir: Path

    def runs(self, row: Row, seed: int) -> RowRuns:
        """Raises InputError where the scale lacks the row's teacher."""
        if not row.trained:
            return RowRuns(None, None)
        total = round(self.scale.tokens * row.budget)
        first = self._whole_steps(total * row.stage1_share)
        if total < self._step_tokens or (row.stage1_share < 1 and total - first < self._step_tokens):
            raise InputError(f"row {row.name}: {total} tokens are not enough for its stages, whose steps have {self._step_tokens} each")
        stage1 = self._stage1(row, seed, first) if row.stage1_share > 0 else None
        stage2 = self._stage2(row, seed, total - first, stage1) if row.stage1_share < 1 else None
        return RowRuns(stage1, stage2)

    def _whole_steps(self, tokens: float) -> int:
        """The nearest number of tokens that whole steps have; one step at least, unless there are no tokens."""
        return 0 if tokens == 0 else max(1, round(tokens / self._step_tokens)) * self._step_tokens

    @property
    def _step_tokens(self) -> int:
        return self.scale.common["seq_len"] * self.scale.common["global_batch_size"]

    def _common(self, row: Row, seed: int, tokens: int) -> dict:
        common = {"save_interval": NEVER, "eval_interval": self._eval_interval} | self.scale.common
        return common | {"recipe": row.recipe, "seed": seed, "train_tokens": tokens}

    @property
    def _eval_interval(self) -> int:
        """Steps, so that both stages of a row with the whole budget are evaluated `curve_points` times."""
        return max(1, round(self.scale.tokens / self._step_tokens / self.scale.curve_points))

    def _stage1(self, row: Row, seed: int, tokens: int) -> Job:
        rates = self.scale.rates_of(row)
        options = self._common(row, seed, tokens) | {"teacher": self.scale.teacher(row), "lr": rates.stage1} | row.stage1
        return self._job("stage1", f"{row.teacher}-{row.recipe}-{_short(tokens)}{_changes(row.stage1)}", options, seed)

    def _stage2(self, row: Row, seed: int, tokens: int, stage1: Job | None) -> Job:
        rates = self.scale.rates_of(row)
        start = {"init_from": str(stage1.folder)} if stage1 else {"stage1_steps": 0, "teacher": self.scale.teacher(row)}
        lr_new = {"lr_new": rates.lr_new * row.rate_factor} if row.separate_rate else {}
        options = self._common(row, seed, tokens) | start | {"lr": rates.stage2 * row.rate_factor} | lr_new | row.stage2
        return self._job("stage2", row.name, options, seed, stage1)

    def _job(self, stage: str, what: str, options: dict, seed: int, start: Job | None = None) -> Job:
        return Job(self.scripts / f"{stage}.py", options, self.output_dir / "runs" / f"{stage}-{what}-seed{seed}", start)


def _short(tokens: int) -> str:
    return f"{tokens / 1e6:.4g}M"


def _changes(options: dict) -> str:
    return "".join(f"-{name}={value}" for name, value in options.items())


def curve(runs: RowRuns) -> list[tuple[int, float]]:
    """Tokens of both stages so far and the validation perplexity there, of runs that have ended."""
    points, before = [], 0
    for job in runs.jobs:
        lines = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        tokens_per_step = job.options["seq_len"] * job.options["global_batch_size"]
        points += [
            (before + line["step"] * tokens_per_step, line["perplexity"])
            for line in lines
            if line["kind"] == "eval" and line["perplexity"] is not None
        ]
        before += job.summary()["tokens"]
    return points
