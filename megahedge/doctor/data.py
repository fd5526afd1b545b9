"""The teacher and the data: what they are, and whether they fit each other."""

import dataclasses
from pathlib import Path
from typing import Any

from megahedge.config.model import ModelConfig
from megahedge.data.blending import parse_data_path
from megahedge.data.indexed_dataset import IndexedDataset
from megahedge.data.meta import check_documents, check_tokenizer, count_eod, find_split, load_meta, tokenizer_digest
from megahedge.data.tokenizer import load_tokenizer
from megahedge.doctor.options import DoctorOptions
from megahedge.doctor.report import Section
from megahedge.models.hf_weights import PretrainedWeights, load_config
from megahedge.models.hub import find_local
from megahedge.stages.base import check_vocabulary, describe_data, describe_model, find_validation
from megahedge.utils.errors import InputError


@dataclasses.dataclass
class TeacherFound:
    """What there is of the teacher; each None where it is not there or not sound."""

    folder: Path | None = None
    config: ModelConfig | None = None
    tokenizer: Any = None
    tokenizer_digest: str | None = None


def look_at_teacher(section: Section, options: DoctorOptions, found: TeacherFound) -> None:
    """Config, weights and tokenizer; nothing is downloaded.  Fills `found`."""
    if options.teacher is None:
        section.row("teacher", "not given: --teacher names one")
        return
    section.row("teacher", options.teacher)
    found.folder = find_local(options.teacher, options.teacher_revision)
    if found.folder is None:
        section.row("place", "not on this machine; a stage downloads it at its start")
        return
    section.row("place", found.folder)
    found.config = section.attempt("model", lambda: load_config(found.folder))
    if found.config is not None:
        section.row("model", describe_model(found.config))
        weights = section.attempt("weights", lambda: PretrainedWeights(found.config, found.folder))
        if weights is not None:
            section.row("weights", f"all {len(weights)} tensors are there")
        section.figures |= {"model": dataclasses.asdict(found.config)}
    found.tokenizer = section.attempt("tokenizer", lambda: load_tokenizer(str(found.folder)))
    if found.tokenizer is not None:
        digest = found.tokenizer_digest = tokenizer_digest(found.tokenizer)
        section.row("tokenizer", f"digest {digest[:12]}, {len(found.tokenizer)} tokens, EOD {found.tokenizer.eos_token_id}")
        section.figures |= {"tokenizer_digest": digest}
        if found.config is not None:
            section.attempt("vocabulary", lambda: check_vocabulary(found.config, found.tokenizer, f"the teacher {options.teacher}"))


def look_at_data(section: Section, options: DoctorOptions, teacher: TeacherFound) -> None:
    """Each corpus and the validation split: counts, digests, and whether the teacher's tokenizer made them."""
    if not options.data_path:
        section.row("data", "not given: --data_path names the prefix of a dataset")
        return
    corpora = [prefix for _, prefix in parse_data_path(options.data_path)]
    pairs = {f"train {number}" if len(corpora) > 1 else "train": prefix for number, prefix in enumerate(corpora)}
    datasets = {
        label: section.attempt(label, lambda prefix=prefix: _open(find_split(prefix, "train"), options)) for label, prefix in pairs.items()
    }
    if options.val_data_path is not None or next(iter(datasets.values())) is not None:  # else it is missing as the first corpus is
        datasets["validation"] = section.attempt("validation", lambda: _open(find_validation(options), options))
    for label, dataset in datasets.items():
        if dataset is not None:
            _look_at_pair(section, label, dataset, options, teacher)


def _open(prefix: str, options: DoctorOptions) -> IndexedDataset:
    return IndexedDataset(prefix, mmap=options.mmap)


def _look_at_pair(section: Section, label: str, dataset: IndexedDataset, options: DoctorOptions, teacher: TeacherFound) -> None:
    meta = section.attempt(label, lambda: load_meta(dataset.prefix))
    eod_id = teacher.tokenizer.eos_token_id if teacher.tokenizer is not None else meta and meta.eod_id
    section.row(label, describe_data(dataset, eod_id))
    section.figures |= {label: {"documents": dataset.num_documents, "tokens": dataset.num_tokens, "idx_sha256": dataset.index_digest}}
    if dataset.num_tokens <= options.seq_len:
        section.problems.append(
            f"{dataset.prefix} has {dataset.num_tokens} tokens, and a sample takes {options.seq_len + 1}; use more text or lower --seq_len"
        )
    if options.reset_at_documents:
        section.attempt(label, lambda: check_documents(dataset, training=label != "validation"))
    elif eod_id is not None and dataset.num_tokens and count_eod(dataset, eod_id)[1] == 0:
        section.warnings.append(
            f"{dataset.prefix}: no token looked at ends a document (id {eod_id}), so documents run into each other and a model does not "
            "learn to end one; preprocess the text itself where that matters"
        )
    if meta is None:
        section.row("", "no meta.json: nothing says which tokenizer made it; a run looks at every id at its start")
    elif teacher.tokenizer is not None:
        _check_fit(section, label, meta, options, teacher)


def _check_fit(section: Section, label: str, meta, options: DoctorOptions, teacher: TeacherFound) -> None:
    try:
        check_tokenizer(meta, teacher.tokenizer_digest, f"the teacher {options.teacher}", teacher.tokenizer)
        section.row("", f"made with the teacher's tokenizer (digest {meta.tokenizer_digest[:12]})")
    except InputError as error:
        section.row("", "NOT made with the teacher's tokenizer: see the problems below")
        if str(error) not in section.problems:  # both splits have one meta.json
            section.problems.append(str(error))
