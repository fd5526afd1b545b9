"""What a run on machines without a network needs of the Hugging Face hub, fetched beforehand."""

import dataclasses
from pathlib import Path

import huggingface_hub.constants

from megahedge.data.tokenizer import load_tokenizer
from megahedge.evaluation import lm_eval
from megahedge.evaluation.tasks import expand_names
from megahedge.models.hf_weights import PretrainedWeights, load_config
from megahedge.models.hub import resolve_pretrained
from megahedge.utils.errors import InputError
from megahedge.utils.files import check_output_folder, disk_errors_explained, file_lock, fresh_folder
from megahedge.utils.logging import get_logger

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """tools/download.py"""

    teacher: tuple[str, ...] = ()
    """Hub names of models: config, tokenizer and weights go into the hub's cache (HF_HOME), where every command looks."""
    teacher_revision: str | None = None
    """Git revision of a single --teacher, for instance step143000."""
    text: str | None = None
    """Hub name of a data set of text; its train split goes into --text_dir, which tools/preprocess_owt.py takes as --input."""
    text_dir: str | None = None
    """Folder for --text."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval (the extra `eval`) whose rows go into the cache of `datasets`; `paper` stands for the ten of the paper."""

    def __post_init__(self):
        if not (self.teacher or self.text or self.tasks):
            raise InputError("nothing to fetch; give --teacher NAME, --text NAME with --text_dir FOLDER, or --tasks paper")
        if self.teacher_revision is not None and len(self.teacher) != 1:
            raise InputError(f"--teacher_revision={self.teacher_revision} goes with one --teacher; here are {len(self.teacher)}")
        if (self.text is None) != (self.text_dir is None):
            raise InputError(f"--text={self.text} with --text_dir={self.text_dir}; they go together")
        if self.text_dir is not None:
            check_output_folder("text_dir", self.text_dir)
            _is_there(Path(self.text_dir))


def download(options: DownloadOptions) -> None:
    """Fetch everything that is asked for; what is there already is not fetched again.

    Raises InputError for names that are not there, and for a model that could not be trained on.
    """
    for name in options.teacher:
        folder = resolve_pretrained(name, options.teacher_revision)
        weights = PretrainedWeights(load_config(folder), folder)
        tokenizer = load_tokenizer(folder)
        logger.info("%s: %d tensors, %d tokens, in %s", name, len(weights), len(tokenizer), folder)
    if options.text:
        _fetch_text(options.text, Path(options.text_dir))
    if options.tasks:
        lm_eval.check_installed()
        from megahedge.evaluation.lm_eval.data import find_tasks  # an extra, and seconds to import

        with find_tasks(expand_names(options.tasks)).load() as loaded:
            for name, task in loaded.tasks.items():
                logger.info("task %s: %d rows", name, len(task.eval_docs))
    logger.info("the hub's cache is %s; on nodes without a network set HF_HUB_OFFLINE=1", huggingface_hub.constants.HF_HOME)


def _is_there(folder: Path) -> bool:
    """Whether the folder holds text from an earlier start.  Raises InputError where it holds anything else."""
    if (folder / "dataset_info.json").is_file():
        import datasets

        try:
            datasets.load_from_disk(str(folder))
        except Exception as error:  # whatever the library makes of a damaged folder
            reason = " ".join(str(error).split())
            raise InputError(f"--text_dir={folder} holds text that cannot be read ({reason}); remove it, or name a new folder") from None
        return True
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"--text_dir={folder} holds other files; name a new folder")
    return False


def _fetch_text(name: str, folder: Path) -> None:
    import datasets

    if _is_there(folder):
        logger.info("%s holds text already; remove it to fetch %s again", folder, name)
        return
    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:  # not found, no network, a script that this version of datasets does not run
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"--text={name} cannot be had: {reason}") from None
    with disk_errors_explained(folder), file_lock(folder.with_name(f".{folder.name}.lock"), remove=True):
        if _is_there(folder):  # another process has been faster
            logger.info("%s holds text meanwhile", folder)
            return
        with fresh_folder(folder) as unfinished:
            rows.save_to_disk(unfinished)
    logger.info("%s: %d documents in %s", name, len(rows), folder)
