"""Options of scripts/evaluate.py."""

import dataclasses

from megahedge.data.meta import SPLITS
from megahedge.evaluation.models import DTYPES, IMPLEMENTATIONS
from megahedge.evaluation.tasks import TaskOptions, expand_names
from megahedge.utils.cli import Count
from megahedge.utils.errors import InputError, check_known
from megahedge.utils.files import check_output

DEFAULT_DATA = "data/openwebtext"
_FOR_TASKS = ("include_path", "offline_data", "limit", "num_fewshot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """scripts/evaluate.py"""

    model: str
    """Run folder, one of its checkpoints, Hugging Face folder, or hub name."""
    teacher: str | None = None
    """A second model of the same kinds, scored after the first on the same data and tasks and compared with it."""
    data_path: str | None = None
    """Prefix of indexed data made by tools/preprocess_owt.py, to measure perplexity on; data/openwebtext where no --tasks are asked for."""
    split: str = "val"
    """Pair of the data to score: val or train."""
    seq_len: int = 1024
    """Tokens per window; windows do not overlap, and the model sees nothing before its window."""
    reset_at_documents: bool = False
    """Documents of a window do not see each other, as in a run with that option."""
    mmap: bool = True
    """Map the data files into memory; --no_mmap reads them, for file systems on which mapped files are slow."""
    eval_tokens: Count | None = None
    """Score the first so many tokens only; all of the split by default."""
    micro_batch_size: int = 4
    """Windows, or inputs of tasks at their longest, per forward; changes speed and memory, not the figures."""
    dtype: str = "fp32"
    """Precision of parameters and activations: fp32 or bf16; losses are summed in fp64."""
    implementation: str = "auto"
    """Whose forward pass scores a Hugging Face folder: megahedge, transformers, or auto (megahedge for the families that it knows)."""
    context_probe: bool = False
    """Measure too by how much the second half of a window suffers when its first half is shuffled."""
    probe_windows: int = 200
    """Windows of the probe: the first so many whole ones of the split."""
    seed: int = 1234
    """Seed of the probe's shuffling, and of the choice of worked examples."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval (the extra `eval`) by name; `paper` stands for the ten of the paper."""
    offline_data: str | None = None
    """Folder of JSON lines, <task>.jsonl, that take the place of each task's data set; nothing is downloaded then."""
    include_path: str | None = None
    """Folder of task files (.yaml) of your own, in lm-eval's format."""
    limit: Count | None = None
    """Score the first so many rows of each task only; all by default."""
    num_fewshot: int | None = None
    """Worked examples before each question of a task; by default what the task says, mostly 0."""
    bootstrap_iters: int = 1000
    """Resamplings behind the standard error of metrics that are no means, such as LAMBADA's perplexity (the paper: 100000)."""
    output: str | None = None
    """JSON file for figures, options, versions and digests; replaced if it exists."""

    def __post_init__(self):
        check_known("split", self.split, SPLITS)
        check_known("dtype", self.dtype, DTYPES)
        check_known("implementation", self.implementation, IMPLEMENTATIONS)
        least = {"seq_len": 2 if self.context_probe else 1, "micro_batch_size": 1, "eval_tokens": 1, "probe_windows": 2, "seed": 0}
        least |= {"limit": 1, "num_fewshot": 0, "bootstrap_iters": 2}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InputError(f"--{name}={value} must be at least {lowest}")
        expand_names(self.tasks)
        if not self.tasks:
            alone = [name for name in _FOR_TASKS if getattr(self, name) is not None]
            if alone:
                raise InputError(f"--{alone[0]}={getattr(self, alone[0])} says how to run tasks; name some with --tasks")
        if self.context_probe and self.scored_data is None:
            raise InputError("--context_probe reads indexed data; give --data_path beside --tasks")
        if self.output is not None:
            check_output("output", self.output, self.output, overwrite=True)

    @property
    def scored_data(self) -> str | None:
        """What perplexity is measured on; None where only tasks are asked for."""
        return self.data_path if self.data_path is not None or self.tasks else DEFAULT_DATA

    @property
    def task_options(self) -> TaskOptions:
        """How the tasks are put to each model."""
        return TaskOptions(self.micro_batch_size, self.limit, self.bootstrap_iters, self.seed)
