"""The training recipe: one strict YAML file for data, drafter, training and evaluation. Unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from peagle.schema import Section, SettingsError, problem_lines, read_yaml


class GenerateRecipe(Section):
    """How the target writes its own training data."""

    engine: dict[str, Any] = Field(
        default_factory=lambda: {"max_model_len": 2048}, description="vLLM's LLM(...) arguments"
    )
    num_workers: int = Field(1, ge=1, description="engines on this machine")
    num_rounds: int = Field(1, ge=1, description="rounds of each worker; each writes one part")
    num_conversations: int = Field(
        1024, ge=0, description="user turns that the target is asked to write in one round (with `prompts`: 0)"
    )
    prompts: str | None = Field(
        None,
        description="JSONL file (peagle.train.data.read_jsonl): each prompt is answered once, besides the target's own",
    )
    max_user_tokens: int = Field(200, ge=8)
    max_answer_tokens: int = Field(512, ge=8)
    max_loop_tokens: int = Field(64, ge=1, description="answers are cut after repeating themselves for so many tokens")
    temperature: float = Field(0.7, gt=0, description="of the answers that are not greedy")
    greedy_share: float = Field(0.5, ge=0, le=1, description="share of the answers that is greedy")
    openings: dict[str, list[str]] = Field(default_factory=dict, description="group -> beginnings of user turns")
    shares: dict[str, float] = Field(
        default_factory=dict, description="group -> share of prompts; the rest begins free"
    )

    @model_validator(mode="before")
    @classmethod
    def _given_prompts_alone(cls, raw: Any) -> Any:
        """With a file of prompts the target writes user turns of its own only where the recipe asks for them."""
        return {"num_conversations": 0, **raw} if isinstance(raw, dict) and raw.get("prompts") else raw

    @model_validator(mode="after")
    def _shares_match(self) -> GenerateRecipe:
        if unknown := set(self.shares) - set(self.openings):
            raise ValueError(f".shares has no openings for {sorted(unknown)}")
        if sum(self.shares.values()) > 1:
            raise ValueError(".shares must not add up to more than 1")
        if not self.num_conversations and not self.prompts:
            raise ValueError(".num_conversations is 0, which without `prompts` leaves nothing to answer")
        return self


class DrafterRecipe(Section):
    """Shape of the drafter; its layers have the shape of the target's own, but for what is said here."""

    method: Literal["p-eagle", "eagle3"] = Field(
        "p-eagle", description="p-eagle: K tokens in one pass; eagle3: one after another, trained by a test-time unroll"
    )
    num_layers: int = Field(4, ge=1)
    intermediate_size: int | None = Field(None, ge=16, description="width of its MLPs; none: the target's")
    num_depths: int = Field(8, ge=1, description="K_train: draft tokens of one pass, or steps of the unroll")
    ptd_token_id: int | None = Field(
        None, ge=0, description="mask token: an id of the target's vocabulary that text does not use (p-eagle only)"
    )
    aux_layer_ids: list[int] | None = Field(
        None, min_length=1, description="target layers whose inputs are read; none: vLLM's default (2, L // 2, L - 3)"
    )
    fc_norm: bool = Field(True, description="normalise each tapped hidden state before fc (EAGLE-3.1)")
    norm_before_residual: bool = False
    qk_norm: bool = Field(False, description="normalise queries and keys of each head: Qwen 3's layers, not Llama's")
    draft_vocab_size: int | None = Field(
        None, ge=16, description="the most frequent tokens of the training answers only; none: the target's vocabulary"
    )
    trainable_embedding: bool = Field(
        False, description="an embedding table of the head's own, started from the target's (paper table 5)"
    )
    sliding_window: int | None = Field(None, ge=16, description="tokens that a row sees back; none: all")
    start_from: str | None = Field(
        None, description="directory of a head whose tensors of equal name and shape are taken"
    )

    @model_validator(mode="after")
    def _mask_token(self) -> DrafterRecipe:
        if (self.method == "p-eagle") != (self.ptd_token_id is not None):
            need = "needs a mask token" if self.method == "p-eagle" else "has no mask token, leave it out"
            raise ValueError(f".ptd_token_id: method {self.method} {need}")
        return self


class CodRecipe(Section):
    ratio: float = Field(0.8, gt=0, le=1, description="r: share of anchors kept from one offset to the next")


class BatchRecipe(Section):
    num_sequences: int = Field(8, ge=1, description="packed sequences of one pass")
    max_tokens: int = Field(2048, ge=16, description="tokens of one packed sequence")
    num_segments: int = Field(
        1, ge=1, description="S: parts that each sequence is worked through in (paper section 3.2)"
    )
    long: Literal["leave_out", "cut"] = Field(
        "leave_out",
        description="conversations of more than max_tokens: left out, or their first max_tokens used (both counted)",
    )
    num_accumulated: int = Field(1, ge=1, description="passes whose gradients make one optimizer step")
    joined_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the passes in which the drafter sees all sequences as one document, and the target each "
        "conversation by itself: it learns to draft in contexts of num_sequences * max_tokens from short conversations",
    )


class OptimizerRecipe(Section):
    name: Literal["adamw", "muon"] = "adamw"
    lr: float = Field(1e-3, gt=0, description="peak, of AdamW")
    muon_lr: float = Field(1e-3, gt=0, description="peak, of Muon (matrices), on AdamW's scale")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    max_attention_score: float | None = Field(
        None, gt=0, description="attention scores above it are clipped (peagle.train.qk_clip); none: they grow freely"
    )
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="the head saved is this moving average of the weights; 0: the last"
    )


class ScheduleRecipe(Section):
    """Cosine from the peak to `final_ratio`, over whichever of the two limits is nearer."""

    max_steps: int = Field(10_000, ge=1)
    max_minutes: float | None = Field(None, gt=0, description="training time, evaluation and compilation left out")
    warmup_steps: int = Field(100, ge=0)
    final_ratio: float = Field(0.02, ge=0, le=1)


class LossRecipe(Section):
    name: Literal["soft", "hard"] = Field(
        "soft",
        description="soft: forward KL to the target's distribution; hard: cross-entropy to its most likely token",
    )
    offset_decay: float = Field(1.0, gt=0, le=1, description="weight of offset g is offset_decay ** g")
    reach: float = Field(
        1.0,
        ge=0,
        le=1,
        description="weight of rows behind a draft of their chain that is not the conversation's token: decoding never "
        "reaches them",
    )
    chunk: int = Field(8192, ge=16, description="rows whose logits exist at once")


class EvaluateRecipe(Section):
    data: str | None = Field(
        None, description="folder of greedy answers (peagle.vllm.generate --prompts); none: no evaluation"
    )
    every_steps: int = Field(2000, ge=1)
    max_conversations: int | None = Field(None, ge=1, description="of each category, in evaluations during training")


class Recipe(Section):
    target: str = Field(
        description="name of the embedded target, a directory with a Hugging Face checkpoint, or a Hugging Face id"
    )
    data: str = Field(description="folder of training conversations")
    output: str = Field(description="folder of checkpoints and, at the end, of the head")
    seed: int = 0
    device: Literal["auto", "cuda", "cpu"] = "auto"
    compile: bool = Field(True, description="torch.compile on a GPU; never used on a CPU")
    states_dir: str | None = Field(
        None,
        description="folder whose file keeps the target's hidden states of all data, so that the target runs over each "
        "conversation once: (taps + 1) x hidden size numbers a token, in memory (/dev/shm) or on a fast disk; runs "
        "with the same target, data and taps share it; none: the target runs in every pass",
    )
    log_every_steps: int = Field(50, ge=1)
    save_every_steps: int = Field(1000, ge=1)
    generate: GenerateRecipe = Field(default_factory=GenerateRecipe)
    drafter: DrafterRecipe
    cod: CodRecipe = Field(default_factory=CodRecipe)
    batch: BatchRecipe = Field(default_factory=BatchRecipe)
    optimizer: OptimizerRecipe = Field(default_factory=OptimizerRecipe)
    schedule: ScheduleRecipe = Field(default_factory=ScheduleRecipe)
    loss: LossRecipe = Field(default_factory=LossRecipe)
    evaluate: EvaluateRecipe = Field(default_factory=EvaluateRecipe)

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
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            raise ValueError(f"{path}: {SettingsError(problem_lines(error, cls))}") from error

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
        return Path(snapshot_download(target, ignore_patterns=patterns))
    from peagle.embedded import prepare_target

    return prepare_target(target)


def is_hub_id(name: str) -> bool:
    """Whether it has the form ORG/NAME, that of an id and not of a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/")
