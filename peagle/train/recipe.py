"""The training recipe: one strict YAML file for data, drafter, training and evaluation. Unknown keys are errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from peagle.config import MAX_NUM_DEPTHS
from peagle.schema import Section, SettingsError, read_yaml


class GenerateRecipe(Section):
    """How the target writes its own training data."""

    removed: ClassVar[Mapping[str, str]] = {"prompts": "`peagle generate RECIPE --prompts FILE --out DIR` answers them"}

    engine: dict[str, Any] = Field(
        default_factory=lambda: {"max_model_len": 2048}, description="Arguments of vLLM's `LLM(...)`."
    )
    num_workers: int = Field(1, ge=1, description="Engines on this machine.")
    num_rounds: int = Field(1, ge=1, description="Rounds of each worker; each writes one part.")
    num_conversations: int = Field(1024, ge=1, description="User turns that the target writes in one round.")
    max_user_tokens: int = Field(200, ge=8, description="Longest user turn that the target writes.")
    max_answer_tokens: int = Field(512, ge=8, description="Longest answer.")
    max_loop_tokens: int = Field(64, ge=1, description="Repeated tokens after which an answer is cut.")
    temperature: float = Field(0.7, gt=0, description="Temperature of the answers that are not greedy.")
    greedy_share: float = Field(0.5, ge=0, le=1, description="Share of the answers that is greedy.")
    openings: dict[str, list[str]] = Field({}, description="Beginnings of user turns, by group.")
    shares: dict[str, float] = Field({}, description="Share of the prompts by group; the others have no opening.")

    @model_validator(mode="after")
    def _shares_match(self) -> GenerateRecipe:
        if unknown := set(self.shares) - set(self.openings):
            raise ValueError(f".shares has no openings for {sorted(unknown)}")
        if sum(self.shares.values()) > 1:
            raise ValueError(".shares must not add up to more than 1")
        return self


class DrafterRecipe(Section):
    """Shape of the drafter; its layers have the shape of the target's own, but for what is said here."""

    method: Literal["p-eagle", "eagle3"] = Field(
        "p-eagle", description="K tokens in one pass, or one after another (test-time unroll)."
    )
    num_layers: int = Field(4, ge=1, description="Layers of the drafter.")
    intermediate_size: int | None = Field(None, ge=16, description="Width of its MLPs; default: the target's.")
    num_depths: int = Field(
        8, ge=1, le=MAX_NUM_DEPTHS, description="K_train: draft tokens of one pass, or steps of the unroll."
    )
    ptd_token_id: int | None = Field(None, ge=0, description="Mask token, an id that no text has; P-EAGLE only.")
    fc_norm: bool = Field(True, description="Normalise each auxiliary hidden state before `fc` (EAGLE-3.1).")
    draft_vocab_size: int | None = Field(
        None, ge=16, description="Most frequent tokens that are drafted; default: the target's vocabulary."
    )
    start_from: str | None = Field(None, description="Directory of a head to start from.")

    @model_validator(mode="after")
    def _mask_token(self) -> DrafterRecipe:
        if (self.method == "p-eagle") != (self.ptd_token_id is not None):
            need = "needs a mask token" if self.method == "p-eagle" else "has no mask token, leave it out"
            raise ValueError(f".ptd_token_id: method {self.method} {need}")
        return self


class CodRecipe(Section):
    ratio: float = Field(0.8, gt=0, le=1, description="r: share of anchors kept from one position to the next.")


class BatchRecipe(Section):
    num_sequences: int = Field(8, ge=1, description="Packed sequences of one pass.")
    max_tokens: int = Field(2048, ge=16, description="Tokens of one packed sequence.")
    num_segments: int = Field(1, ge=1, description="S: parts of each sequence (paper section 3.2).")
    long: Literal["leave_out", "cut"] = Field(
        "leave_out", description="Conversations above `max_tokens`: left out, or cut (both counted)."
    )
    joined_share: float = Field(0.0, ge=0, le=1, description="Share of the passes with all sequences as one document.")


class OptimizerRecipe(Section):
    name: Literal["adamw", "muon"] = Field(
        "adamw", description="Optimizer of the layers' matrices; AdamW takes the rest."
    )
    lr: float = Field(1e-3, gt=0, description="Peak learning rate of AdamW.")
    muon_lr: float = Field(1e-3, gt=0, description="Peak learning rate of Muon, on AdamW's scale.")
    weight_decay: float = Field(0.1, ge=0, description="Weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    max_attention_score: float | None = Field(
        None, gt=0, description="Limit of attention scores (QK-clip); default: none."
    )
    ema_decay: float = Field(0.0, ge=0, lt=1, description="Decay of the saved moving average; 0: the last weights.")


class ScheduleRecipe(Section):
    """Cosine from the peak to `final_ratio`, over whichever of the two limits is nearer."""

    max_steps: int = Field(10_000, ge=1, description="Optimizer steps at most.")
    max_minutes: float | None = Field(
        None, gt=0, description="Training time at most, evaluation and compilation apart."
    )
    warmup_steps: int = Field(100, ge=0, description="Steps of linear warm-up.")
    final_ratio: float = Field(0.02, ge=0, le=1, description="Learning rate at the end, relative to the peak.")


class LossRecipe(Section):
    offset_decay: float = Field(1.0, gt=0, le=1, description="Weight of position g (from 0) is `offset_decay ** g`.")
    reach: float = Field(1.0, ge=0, le=1, description="Weight of rows that decoding never reaches.")
    chunk: int = Field(8192, ge=16, description="Rows whose logits exist at once.")


class EvaluateRecipe(Section):
    data: str | None = Field(None, description="Folder of answers; default: none, or `held_out`.")
    held_out: float = Field(0.0, ge=0, lt=1, description="Share of the prompts to evaluate on instead of training.")
    every_steps: int = Field(2000, ge=1, description="Steps between evaluations.")
    max_conversations: int | None = Field(None, ge=1, description="Conversations of each category in one evaluation.")

    @model_validator(mode="after")
    def _one_source(self) -> EvaluateRecipe:
        if self.data is not None and self.held_out:
            raise ValueError(".held_out goes without .data: leave one out")
        return self


class Recipe(Section):
    target: str = Field(description="Embedded target's name, checkpoint directory, or Hugging Face id.")
    data: str = Field(description="Folder of training conversations, as token ids.")
    conversations: str | None = Field(None, description="Source from which `peagle train` makes a missing `data`.")
    output: str = Field(description="Folder of checkpoints and of the finished head.")
    seed: int = Field(0, ge=0, description="Seed of data order and initialisation.")
    compile: bool = Field(True, description="`torch.compile` on a GPU; never used on a CPU.")
    states_dir: str | None = Field(None, description="Folder that keeps the target's hidden states; default: none.")
    log_every_steps: int = Field(50, ge=1, description="Steps between log lines.")
    save_every_steps: int = Field(1000, ge=1, description="Steps between checkpoints.")
    generate: GenerateRecipe = Field(default_factory=GenerateRecipe, description="How the target writes conversations.")
    drafter: DrafterRecipe = Field(description="Shape of the drafter.")
    cod: CodRecipe = Field(
        default_factory=CodRecipe, description="Conditional drop-token sampling (paper section 3.2)."
    )
    batch: BatchRecipe = Field(default_factory=BatchRecipe, description="Packing and partition of sequences.")
    optimizer: OptimizerRecipe = Field(default_factory=OptimizerRecipe, description="Optimizer.")
    schedule: ScheduleRecipe = Field(default_factory=ScheduleRecipe, description="Cosine schedule and limits.")
    loss: LossRecipe = Field(default_factory=LossRecipe, description="Loss.")
    evaluate: EvaluateRecipe = Field(default_factory=EvaluateRecipe, description="Evaluation during training.")

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | None = None) -> Recipe:
        """Reads a recipe; overrides are `section.key=value` with YAML values.

        Raises ValueError that names the file and every wrong key.
        """
        raw = read_yaml(Path(path).read_bytes(), path)
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: a recipe is a mapping of settings")
        for override in overrides or []:
            dotted, separator, value = override.partition("=")
            if not separator:
                raise ValueError(f"override {override!r}: expected section.key=value")
            *sections, key = dotted.split(".")
            at = raw
            for section in sections:
                at = at.setdefault(section, {})
                if not isinstance(at, dict):
                    raise ValueError(f"{path}: override {override!r}: {section} is no section, but {at!r:.40}")
            at[key] = read_yaml(value, f"{path}: override {override!r:.80}")
        if "applications" in raw:
            raise ValueError(f"{path} is the config of a service: `peagle serve {path}`")
        try:
            return cls.read(raw)
        except SettingsError as error:
            raise ValueError(f"{path}: {error}") from error

    def target_dir(self) -> Path:
        """`target_checkpoint` of its target."""
        return target_checkpoint(self.target)


def target_checkpoint(target: str) -> Path:
    """Directory of a checkpoint by its name, directory or Hugging Face id; converted or downloaded when it is not
    there yet.

    Raises ValueError for what is none of these, OSError where the hub does not give it.
    """
    if Path(target).is_dir():
        return Path(target)
    if is_hub_id(target):
        from huggingface_hub import snapshot_download

        patterns = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*/*"]  # the same weights once more
        try:
            return Path(snapshot_download(target, ignore_patterns=patterns))
        except Exception as error:  # of the hub's package and of its HTTP client
            raise OSError(f"target {target} is not to be had from Hugging Face: {error}") from error
    from peagle.embedded import prepare_target

    return prepare_target(target)


def is_hub_id(name: str) -> bool:
    """Whether it has the form ORG/NAME, that of an id and not of a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")
