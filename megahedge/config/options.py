"""Every option of the training commands, each in one place; a command's options are a union of these groups."""

import dataclasses
import math
from pathlib import Path
from typing import ClassVar

import yaml

from megahedge.config.mixer import STEP_AXES, MixerConfig
from megahedge.utils.cli import Count
from megahedge.utils.errors import InputError
from megahedge.utils.words import divisors, either

RECIPES = ("paper", "tuned")
STUDENT_MIXERS = ("hedge_mamba", "mamba")
"""What stage 2 may put in place of attention."""
MAX_LR = 1e6
"""Far beyond use; larger ones overflow fp32 inside AdamW."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which tokens, in what order, in what pieces."""

    data_path: tuple[str, ...] = ("data/openwebtext",)
    """Prefix of indexed data made by tools/preprocess_owt.py, or several with weights: 0.7 a 0.3 b."""
    val_data_path: str | None = None
    """Prefix of the validation data: its val pair, or a bare pair (default: the val pair beside the first of data_path)."""
    train_tokens: Count = 10**9
    """Tokens to train on, in all (1e9, 1B and 300M are understood); rounded down to whole steps."""
    seq_len: int = 1024
    """Tokens per sequence."""
    global_batch_size: int = 48
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int | str = "auto"
    """Sequences per rank per forward; auto is the largest divisor of global_batch_size / dp_size that is at most 4."""
    reset_at_documents: bool = False
    """Documents of a sequence do not see each other: attention, scan, convolution and positions start anew where the index begins one."""
    index_cache_dir: str | None = None
    """Folder for what is derived from large data, such as orders of samples (default: .index_cache beside the data)."""
    mmap: bool = True
    """Map the data files into memory; --no_mmap reads them, for file systems on which mapped files are slow."""
    eval_tokens: Count = 10**6
    """Tokens of the validation split that each evaluation scores (all of them where there are fewer)."""

    def __post_init__(self):
        for name in ("train_tokens", "seq_len", "global_batch_size", "eval_tokens"):
            _require(getattr(self, name) >= 1, f"--{name}={getattr(self, name)} must be at least 1")
        valid = self.micro_batch_size == "auto" or (isinstance(self.micro_batch_size, int) and self.micro_batch_size >= 1)
        _require(valid, f"--micro_batch_size={self.micro_batch_size} must be auto or a whole number of at least 1")
        per_step = self.seq_len * self.global_batch_size
        _require(
            self.train_tokens >= per_step,
            f"--train_tokens={self.train_tokens} is less than one step of global_batch_size × seq_len = {per_step} tokens",
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.seq_len * self.global_batch_size

    @property
    def train_steps(self) -> int:
        """Optimizer steps that the token budget pays for."""
        return self.train_tokens // self.tokens_per_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimOptions:
    """AdamW and its schedule (Attention to Mamba, section 4)."""

    lr: float = 1e-2
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """The cosine ends at this share of the peak."""
    warmup_fraction: float = 0.01
    """Share of the steps in which the rate rises linearly (the paper names no length)."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay, on matrices only."""
    adam_beta1: float = 0.9
    """AdamW's first decay rate."""
    adam_beta2: float = 0.95
    """AdamW's second decay rate."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    clip_grad: float = 1.0
    """Largest L2 norm of the gradient of all parameters; 0 clips nothing."""

    def __post_init__(self):
        _require(0 < self.lr <= MAX_LR, f"--lr={self.lr} must be positive and at most {MAX_LR:g}")
        for name in ("min_lr_ratio", "warmup_fraction"):
            _require(0 <= getattr(self, name) <= 1, f"--{name}={getattr(self, name)} must lie between 0 and 1")
        for name in ("adam_beta1", "adam_beta2"):
            _require(0 <= getattr(self, name) < 1, f"--{name}={getattr(self, name)} must lie in [0, 1)")
        _require(0 < self.adam_eps < math.inf, f"--adam_eps={self.adam_eps} must be positive and finite: 0 / 0 would follow")
        for name in ("weight_decay", "clip_grad"):
            _require(0 <= getattr(self, name) < math.inf, f"--{name}={getattr(self, name)} must be finite and not negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where and how a run happens."""

    output_dir: str | None = None
    """Run folder: config, metrics.jsonl, checkpoints and summary.json go here; each command has a default of its own."""
    ds_config: str = "ds_configs/zero1.json"
    """DeepSpeed settings: ZeRO stage, offload, communication; batch sizes, optimizer, precision and clipping are options of ours."""
    dtype: str = "bf16"
    """Precision of parameters and activations: bf16 (masters, moments and gradient sums stay fp32) or fp32."""
    tp_size: int = 1
    """Ranks that share one copy of the model, split by head."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    seed: int = 1234
    """Seed of fresh parameters and of the data order."""
    log_interval: int = 1
    """Steps between lines of metrics.jsonl."""
    eval_interval: int = 500
    """Steps between evaluations; one more follows the last step."""
    save_interval: int = 1000
    """Steps between checkpoints; one more follows the last step."""
    keep_last: int = 2
    """Checkpoints kept; older ones are removed."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest validation loss as well; OUTPUT_DIR/checkpoints/best is a link to it."""
    resume: bool = False
    """Go on from the newest complete checkpoint in output_dir."""
    dry_run: bool = False
    """Print the header and the plan, then end."""
    print_trainable: bool = False
    """Print each trainable parameter with its shape in the header."""
    stop_after: int | None = None
    """Save and stop after this step, with the schedule still planned for train_tokens; --resume goes on."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project too (WANDB_MODE=offline works without a network)."""
    peak_tflops: float | None = None
    """Peak of a rank's device, 10¹² operations a second, of which `mfu` in metrics.jsonl is the share (default: the GPU's data sheet)."""
    run_name: str | None = None
    """Name of the run in Weights & Biases; by default the name of output_dir."""

    def __post_init__(self):
        _require(self.dtype in ("bf16", "fp32"), f"--dtype={self.dtype} is not known; use bf16 or fp32")
        for name in ("tp_size", "log_interval", "eval_interval", "save_interval", "keep_last"):
            _require(getattr(self, name) >= 1, f"--{name}={getattr(self, name)} must be at least 1")
        _require(self.stop_after is None or self.stop_after >= 1, f"--stop_after={self.stop_after} must be at least 1")
        _require(
            self.peak_tflops is None or 0 < self.peak_tflops < math.inf, f"--peak_tflops={self.peak_tflops} must be positive and finite"
        )
        _require(self.output_dir != "", "--output_dir='' is empty; name a folder")
        _require(0 <= self.seed < 2**31, f"--seed={self.seed} must lie between 0 and {2**31 - 1}")
        _require(
            Path(self.ds_config).is_file(),
            f"--ds_config={self.ds_config} is not a file in {Path.cwd()}; the repository's ds_configs/ holds zero0.json … zero3.json, "
            "zero2_offload.json and zero3_offload.json",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(DataOptions, OptimOptions, RunOptions):
    """What every training command understands."""

    def __post_init__(self):
        DataOptions.__post_init__(self)
        OptimOptions.__post_init__(self)
        RunOptions.__post_init__(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainOptions(TrainOptions):
    """tools/pretrain_teacher.py"""

    lr: float = 2e-3
    """Peak learning rate; the default suits a model of a few million parameters."""
    warmup_fraction: float = 0.02
    """Share of the steps in which the rate rises linearly."""
    model_config: str | None = None
    """JSON file with the sizes of a fresh model: a Hugging Face config.json of a supported family."""
    init_from: str | None = None
    """Folder or hub name of a model to train on, in place of a fresh one."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer that made the data; saved with the model (default: the one that the data names)."""
    export_dtype: str = "fp16"
    """Precision of the weights in the folder `hf` that the finished run holds: fp16, bf16 or fp32."""

    def __post_init__(self):
        TrainOptions.__post_init__(self)
        given = [name for name in ("model_config", "init_from") if getattr(self, name) is not None]
        _require(
            len(given) == 1,
            f"{' and '.join(f'--{name}={getattr(self, name)}' for name in given) or 'neither --model_config nor --init_from is given'}; "
            "give --model_config for a fresh model (such as tools/configs/neox-small.json) or --init_from for one with weights",
        )
        _require(self.export_dtype in ("fp16", "bf16", "fp32"), f"--export_dtype={self.export_dtype} is not known; use fp16, bf16 or fp32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Where the teacher comes from."""

    teacher: str = "EleutherAI/pythia-1b"
    """Folder or hub name of the softmax-attention teacher."""
    teacher_revision: str | None = None
    """Git revision of a hub teacher, for instance step143000."""


def read_recipe(name: str) -> dict[str, dict]:
    """Values by option of each stage, from the recipe's file.  Raises InputError for a recipe that there is not."""
    _check_recipe(name)
    with (Path(__file__).parent / "recipes" / f"{name}.yaml").open(encoding="utf-8") as handle:
        return yaml.safe_load(handle)


def _check_recipe(name: str) -> None:
    _require(name in RECIPES, f"--recipe={name} is not known; use {either(RECIPES)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Which values the other options start from."""

    section: ClassVar[str]
    """Name of the command's part of a recipe file."""

    recipe: str = "paper"
    """Values that the other options start from, mixer and training alike, megahedge/config/recipes/RECIPE.yaml: paper or tuned."""

    def __post_init__(self):
        _check_recipe(self.recipe)

    @classmethod
    def presets(cls, values: dict) -> dict:
        """What the chosen recipe says of this stage."""
        return read_recipe(values["recipe"])[cls.section]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureMapOptions:
    """Hedgehog's feature maps; stage 2 keeps what stage 1 has learnt, so these must be stage 1's there."""

    feature_map_per_head: bool = False
    """Each head has feature maps of its own instead of sharing the layer's."""
    feature_map_scale: bool = False
    """Divide queries and keys by the square root of head_dim before their feature maps."""
    rope: str = "after"
    """Where RoPE rotates: the feature maps' outputs (after: the paper's Listing 2) or their inputs (before)."""
    normalizer_eps: float = 1e-6
    """Least magnitude of the normaliser; only rotated features (--rope after), which have signs, come near."""

    def mixer_config(self, kind: str) -> MixerConfig:
        """The options of a mixer that are among these.  Raises InputError where one is not valid."""
        names = {field.name for field in dataclasses.fields(MixerConfig)} & {field.name for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in names}
        known = ["auto", *sorted({axis for axes in STEP_AXES.values() for axis in axes})]
        if values.get("decay_step", "auto") not in known:  # without a decay nothing else would look at it
            raise InputError(f"--decay_step={values['decay_step']} is not known; use {either(known)}")
        if values.get("decay_step") == "auto":
            values["decay_step"] = values["decay"]
        try:
            return MixerConfig(kind=kind, **values)
        except InputError as error:  # it begins with the field's name, which is the option's
            raise InputError(f"--{error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage1Options(RecipeOptions, TeacherOptions, FeatureMapOptions, TrainOptions):
    """scripts/stage1.py"""

    section = "stage1"

    train_tokens: Count = 20_000 * 49_152
    """Tokens to train on, in all (1e9, 1B and 300M are understood); rounded down to whole steps."""
    match_inputs: str = "student"
    """What feeds a student block: the student block before it (student) or the teacher's (teacher, which is cheaper)."""
    match_targets: str = "block"
    """Whose outputs are compared: block or mixer."""
    match_loss: str = "cosine"
    """How they are compared: cosine, mse (relative to the teacher's square, token by token) or cosine_mse (their sum)."""

    def __post_init__(self):
        RecipeOptions.__post_init__(self)
        TrainOptions.__post_init__(self)
        known = {"match_inputs": ("student", "teacher"), "match_targets": ("block", "mixer"), "match_loss": ("cosine", "mse", "cosine_mse")}
        for name, values in known.items():
            _require(getattr(self, name) in values, f"--{name}={getattr(self, name)} is not known; use {either(values)}")
        self.mixer_config("hedgehog")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HedgeMambaOptions(FeatureMapOptions):
    """What stage 2 adds to the mixer, each part starting as an identity."""

    decay: str = "channel"
    """Structure of the decay rates: none, head (one a head), state (one a feature) or channel (one a feature and output channel)."""
    decay_step: str = "auto"
    """What the decay's step varies over besides the token: head, state, channel, or auto for what the rates do."""
    decay_per_head: bool = False
    """Each head has rates and steps of its own instead of sharing the layer's."""
    decay_tie_signs: bool = True
    """A feature and its negative share one rate."""
    decay_init: float = 0.0
    """Starting value of the rates; the check of the hand-over is made before they get it."""
    decay_rank: int = 0
    """Width between the two maps that make the step (0: hidden_size / 16)."""
    conv_kernel: int = 4
    """Taps of the causal convolution on the mixer's input (0: no convolution)."""
    gate: bool = True
    """Multiply the scan's output by SiLU(x W + b)."""
    bypass: bool = False
    """Add x W + b of the layer's input to the scan's output: as many parameters as the gate, without its product."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage2Options(RecipeOptions, HedgeMambaOptions, TrainOptions):
    """scripts/stage2.py"""

    section = "stage2"

    mixer: str = "hedge_mamba"
    """hedge_mamba, or mamba: the naive baseline, Mamba's own initialisation in place of attention (goes with --stage1_steps 0);
    of the mixer's options it reads decay_rank and conv_kernel."""
    init_from: str | None = None
    """Run folder of stage 1, or one of its checkpoints."""
    stage1_steps: int | None = None
    """Steps of stage 1 behind --init_from, checked where given; 0 starts without a stage 1, from --teacher with fresh feature maps."""
    teacher: str | None = None
    """Folder or hub name of the teacher (default: the one that the run of --init_from names); it must be that run's teacher."""
    teacher_revision: str | None = None
    """Git revision of a hub teacher, for instance step143000."""
    train_tokens: Count = 180_000 * 49_152
    """Tokens to train on, in all (1e9, 1B and 300M are understood); rounded down to whole steps."""
    lr: float = 1e-5
    """Peak learning rate."""
    lr_new: float | None = None
    """Peak learning rate of what stage 2 adds: decay, convolution, gate and bypass, or all of a mamba (default: --lr)."""
    kd_alpha: float = 0.0
    """Share a of the loss (1 − a) · cross-entropy + a · KL(teacher ‖ student)."""
    kd_temperature: float = 1.0
    """Temperature of both softmaxes in that KL."""

    def __post_init__(self):
        RecipeOptions.__post_init__(self)
        TrainOptions.__post_init__(self)
        _require(
            (self.init_from is None) == (self.stage1_steps == 0),
            f"--init_from={self.init_from} with --stage1_steps={self.stage1_steps}; give --init_from RUN (a run of scripts/stage1.py), "
            "or --stage1_steps 0 with --teacher to start without a stage 1",
        )
        _require(
            self.stage1_steps is None or self.stage1_steps >= 0, f"--stage1_steps={self.stage1_steps} must be a whole number of at least 0"
        )
        _require(self.init_from is not None or self.teacher is not None, "--stage1_steps 0 needs a --teacher to start from")
        _require(self.mixer in STUDENT_MIXERS, f"--mixer={self.mixer} is not known; use {either(STUDENT_MIXERS)}")
        _require(
            self.hands_over or self.init_from is None,
            f"--mixer={self.mixer} starts afresh and takes over nothing that --init_from={self.init_from} has learnt; "
            "give --stage1_steps 0 with --teacher instead",
        )
        _require(self.lr_new is None or 0 < self.lr_new <= MAX_LR, f"--lr_new={self.lr_new} must be positive and at most {MAX_LR:g}")
        _require(0 <= self.kd_alpha <= 1, f"--kd_alpha={self.kd_alpha} must lie between 0 and 1")
        _require(0 < self.kd_temperature < math.inf, f"--kd_temperature={self.kd_temperature} must be positive and finite")
        self.mixer_config(self.mixer)

    @property
    def hands_over(self) -> bool:
        """Whether the student's mixers start as what was there before them; those of the naive baseline do not."""
        return self.mixer == "hedge_mamba"


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut for the ranks."""

    global_batch_size: int
    micro_batch_size: int
    dp_size: int

    @property
    def accumulation_steps(self) -> int:
        """Forward passes of each rank per optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)


def plan_batches(options: DataOptions, dp_size: int) -> BatchPlan:
    """Cut the global batch for `dp_size` ranks.

    Raises InputError naming the sizes that work when the sizes do not divide.
    """
    batch = options.global_batch_size
    if batch % dp_size:
        raise InputError(f"dp_size={dp_size} does not divide --global_batch_size={batch}; a dp_size of {either(divisors(batch))} does")
    per_rank = batch // dp_size
    micro = options.micro_batch_size
    if micro == "auto":
        micro = max(size for size in range(1, 5) if per_rank % size == 0)
    if per_rank % micro:
        fitting = either(divisors(per_rank))
        raise InputError(f"--micro_batch_size={micro} does not divide global_batch_size / dp_size = {per_rank}; use {fitting}")
    return BatchPlan(global_batch_size=batch, micro_batch_size=micro, dp_size=dp_size)
