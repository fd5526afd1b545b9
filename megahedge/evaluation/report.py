"""What scripts/evaluate.py says of a model and its teacher: the figures, for people and for JSON."""

import dataclasses
import math
from pathlib import Path

from megahedge.checkpoint.store import MANIFEST
from megahedge.evaluation.context_probe import ContextProbe
from megahedge.evaluation.models import ModelSource
from megahedge.evaluation.options import EvaluateOptions
from megahedge.evaluation.perplexity import Perplexity
from megahedge.evaluation.tasks import TaskResults, compare_results, tasks_table
from megahedge.evaluation.text import TextCounts
from megahedge.models.hf_weights import weights_digest
from megahedge.utils.files import finite_or_none, read_json_object


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was measured, on what."""

    options: EvaluateOptions
    source: ModelSource
    tokenizer_digest: str | None
    device: str
    data: dict | None = None
    """Identity of the scored pair; None, like what it is scored by, where only tasks were asked for."""
    perplexity: Perplexity | None = None
    text: TextCounts | None = None
    """Text of the scored tokens; None where no tokenizer is at hand to decode them."""
    probe: ContextProbe | None = None
    seconds: float | None = None
    """Time that scoring the data took, the probe left out."""
    tasks: TaskResults | None = None
    tasks_seconds: float | None = None
    teacher: "Evaluation | None" = None

    def figures(self) -> dict:
        """The numbers measured on the data; None where one is unknown or infinite."""
        if self.perplexity is None:
            return {}
        measured, text = self.perplexity, self.text
        figures = {
            "loss": measured.loss,
            "token_perplexity": measured.token_perplexity,
            "word_perplexity": measured.word_perplexity(text.words) if text and text.words else math.inf,
            "bits_per_byte": measured.bits_per_byte(text.text_bytes) if text and text.text_bytes else math.inf,
        }
        figures = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        counts = {"words": text.words, "text_bytes": text.text_bytes} if text else {"words": None, "text_bytes": None}
        return {**figures, "nats": measured.nats, "tokens": measured.tokens, **counts}

    def record(self) -> dict:
        """For JSON: None where a figure is not finite, such as the perplexity of a task that overflows."""
        record = self._record_of_model() | {"options": dataclasses.asdict(self.options), "device": self.device}
        if self.teacher is not None:
            record |= {"teacher": self.teacher._record_of_model(), "against_teacher": self._against_teacher()}
        return finite_or_none(record)

    def _record_of_model(self) -> dict:
        digests = {"tokenizer_digest": self.tokenizer_digest, "weights_digest": _digest_of_weights(Path(self.source.path))}
        return {
            "figures": self.figures() or None,
            "context_probe": self.probe and {**dataclasses.asdict(self.probe), "difference": self.probe.difference},
            "tasks": self.tasks and self.tasks.record(),
            "model": dataclasses.asdict(self.source) | digests,
            "data": self.data,
            "seconds": self.seconds,
            "tasks_seconds": self.tasks_seconds,
        }

    def _against_teacher(self) -> dict:
        """Differences and ratios of all figures."""
        ours, theirs = self.figures(), self.teacher.figures()
        names = ("loss", "token_perplexity", "word_perplexity", "bits_per_byte")
        known = [name for name in names if ours.get(name) is not None and theirs.get(name) is not None]
        figures = {name: {"value": ours[name] - theirs[name], "ratio": ours[name] / theirs[name]} for name in known}
        return {"figures": figures, "tasks": compare_results(self.tasks, self.teacher.tasks) if self.tasks else None}

    def table(self) -> str:
        """For people."""
        rows = _rows_of_model("model", self)
        if self.teacher is not None:
            rows |= _rows_of_model("teacher", self.teacher)
        rows["scored by"] = f"{self.source.implementation}, {self.options.dtype} on {self.device}"
        if self.perplexity is not None:
            rows |= self._rows_of_data()
        table = "\n".join(f"{label:<17} {value}" for label, value in rows.items())
        if self.tasks is None:
            return table
        return f"{table}\n\n{tasks_table(self.options.tasks, self.tasks, self.teacher and self.teacher.tasks)}"

    def _rows_of_data(self) -> dict[str, str]:
        figures = self.figures()
        text = f", {figures['words']} words, {figures['text_bytes']} bytes" if self.text else ""
        compared = self._against_teacher()["figures"] if self.teacher else {}
        of_teacher = self.teacher.figures() if self.teacher else {}
        rows = {
            "data": f"{self.data['prefix']}, windows of {self.options.seq_len}",
            "scored": f"{figures['tokens']} tokens{text}",
            "loss": f"{figures['loss']:.5f} nats per token",
            "token perplexity": _show(figures["token_perplexity"]),
            "word perplexity": _show(figures["word_perplexity"]),
            "bits per byte": _show(figures["bits_per_byte"]),
        }
        for label in rows:
            name = label.replace(" ", "_")
            if name in compared:
                difference = f"difference {compared[name]['value']:+.5f}" if name == "loss" else f"ratio {compared[name]['ratio']:.4f}"
                rows[label] += f", teacher {_show(of_teacher[name])}, {difference}"
        rows |= _row_of_probe("context probe", self.probe)
        return rows | (_row_of_probe("teacher's probe", self.teacher.probe) if self.teacher else {})


def _rows_of_model(label: str, evaluation: Evaluation) -> dict[str, str]:
    source = evaluation.source
    step = "" if source.step is None else f", step {source.step}"
    weights = "weights" if label == "model" else f"{label}'s weights"
    return {
        label: f"{source.path} ({source.kind}{step})",
        weights: f"{source.loaded} tensors loaded, {source.missing} missing, {source.unexpected} unexpected",
    }


def _row_of_probe(label: str, probe: ContextProbe | None) -> dict[str, str]:
    if probe is None:
        return {}
    return {
        label: f"second half {probe.intact:.4f} nats, with the first half shuffled {probe.shuffled:.4f}: "
        f"{probe.difference:+.4f} ± {probe.standard_error:.4f} (standard error, {probe.windows} windows)"
    }


def _digest_of_weights(folder: Path) -> str:
    """Identity of the weights in a checkpoint, or in a Hugging Face folder: there the one that runs record of their teacher."""
    if (folder / MANIFEST).is_file():
        return read_json_object(folder / MANIFEST)["sha256"]  # over a list that holds the digest of every file
    return weights_digest(folder)


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
