"""The frozen target in training and evaluation: auxiliary hidden states and logits, by Hugging Face transformers.

Any decoder-only model of full and sliding-window attention will do; what cannot be packed or scored exactly is refused
when it is loaded. Serving never uses this module: there vLLM runs the target.
"""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from peagle.checkpoint import build_drafter
from peagle.config import DrafterConfig, read_target_config, resolve_aux_layer_ids
from peagle.model import Drafter
from peagle.train.data import Batch, Conversations

_MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class Target:
    """A causal language model that gives its layers' inputs. All of it is frozen.

    config: `config.json` of its text model. Raises ValueError for a target whose tables have another shape than its
    config says, whose logits are more than its output matrix applied to its last hidden state, whose layers are neither
    full nor sliding-window attention, or in which a packed document changes with its neighbour.
    """

    def __init__(
        self,
        target_dir: str | Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        gpu_bytes: dict[int, int] | None = None,
    ) -> None:
        """compiled: its passes, where it is on one device. gpu_bytes: its layers go over these GPUs, each of which has
        so many bytes for them (`peagle.train.plan.spread`); results come to `device`. Raises ValueError where they do
        not fit."""
        self.config: dict[str, Any] = read_target_config(target_dir)
        read = {".json", ".safetensors", ".bin"}
        files = [path for path in sorted(Path(target_dir).iterdir()) if path.suffix in read]
        #: Changes with its weights or its configuration.
        self.fingerprint = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        try:
            spread = {} if gpu_bytes is None else {"device_map": "auto", "max_memory": gpu_bytes}
            model: Any = _load(target_dir, dtype=dtype, **spread)
            if {"cpu", "disk"} & set(map(str, getattr(model, "hf_device_map", {}).values())):
                raise ValueError(f"its layers do not fit on the GPUs, which have {gpu_bytes} bytes for them")
        except Exception as error:  # transformers and safetensors raise what they like
            raise ValueError(f"the target in {target_dir} cannot be loaded: {error}") from error
        self.model = (model if gpu_bytes else model.to(device)).eval().requires_grad_(False)
        self.device = torch.device(device)
        self._entry: torch.device = model.get_input_embeddings().weight.device
        #: As stored: a scale that the target puts on its embeddings is not in it, nor in a drafter's (vLLM's way).
        self.embed_VS: Tensor = model.get_input_embeddings().weight.to(device)
        self.lm_head_VS: Tensor = model.get_output_embeddings().weight.to(device)
        self._eager_body = model.get_decoder()
        self._text_config: Any = model.config.get_text_config()
        #: Kinds of layers where the model takes one mask a kind; none where it takes one mask.
        self._layer_types = sorted(set(getattr(self._text_config, "layer_types", None) or []))
        self._body = torch.compile(self._eager_body) if compiled and not gpu_bytes else self._eager_body
        self._check(str(target_dir))

    def build_drafter(self, config: DrafterConfig, tensors: dict[str, Tensor], dtype: torch.dtype) -> Drafter:
        """The drafter of a head, frozen, on this device; with the target's tables where the head has none."""
        tables = {"embed_VH": self.embed_VS, "lm_head_VH": self.lm_head_VS}
        return build_drafter(config, tensors, **tables, dtype=dtype, device=self.device)

    @torch.no_grad()
    def states(
        self, tokens_BN: Tensor, position_BN: Tensor, aux_layer_ids: tuple[int, ...], *, eager: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One pass over packed documents; no token sees another document. A head may leave its layers unnamed.

        position_BN: position within the document; where it does not go on by one, another document begins. eager: not
        compiled, for shapes that do not come again. Returns (aux [B, N, C * S]: residual stream entering each of
        `aux_layer_ids`, concatenated in that order; last [B, N, S]: what `lm_head_VS` turns into logits).

        Raises ValueError for a layer that the target does not have, and for the end of its last one.
        """
        num_layers = self.config["num_hidden_layers"]
        aux_layer_ids = resolve_aux_layer_ids(aux_layer_ids, num_layers)
        if max(aux_layer_ids) >= num_layers or min(aux_layer_ids) < 0:
            raise ValueError(
                f"aux_layer_ids = {aux_layer_ids}: must be in 0..{num_layers - 1}, inputs of the target's layers (vLLM "
                f"serves a head that reads {num_layers}, the end of the last one; it cannot be trained or evaluated)"
            )
        body = self._eager_body if eager else self._body
        tokens_BN, position_BN = tokens_BN.to(self._entry), position_BN.to(self._entry)
        out = body(
            input_ids=tokens_BN,
            position_ids=position_BN,
            attention_mask=self._masks(position_BN),
            output_hidden_states=True,
            use_cache=False,
        )
        aux = [out.hidden_states[layer].to(self.device) for layer in aux_layer_ids]
        return torch.cat(aux, dim=-1), out.last_hidden_state.to(self.device)

    def _masks(self, position_BN: Tensor) -> Any:
        """The mask that the model takes, or one for each kind of its layers."""
        given = dict(config=self._text_config, attention_mask=None, past_key_values=None, position_ids=position_BN)
        given["inputs_embeds"] = torch.empty(*position_BN.shape, 0, dtype=self.model.dtype, device=position_BN.device)
        given["allow_is_causal_skip"] = False  # a mask even where one document fills the batch: the pass is compiled
        if self._layer_types:
            return {kind: _MASKS[kind](**given) for kind in self._layer_types}
        is_sliding = getattr(self._text_config, "sliding_window", None) is not None
        return _MASKS["sliding_attention" if is_sliding else "full_attention"](**given)

    @torch.no_grad()
    def _check(self, source: str) -> None:
        if unknown := set(self._layer_types) - _MASKS.keys():
            raise ValueError(f"target {source}: layers of {sorted(unknown)} cannot keep packed documents apart")
        shape = (self.config["vocab_size"], self.config["hidden_size"])
        for name, table in (("input embeddings", self.embed_VS), ("output matrix", self.lm_head_VS)):
            if tuple(table.shape) != shape:
                raise ValueError(f"target {source}: its {name} have shape {list(table.shape)}, not {list(shape)}")
        # Two documents, of 5 and of 7 tokens, and the same with another first document.
        tokens_BN = (torch.arange(24, device=self.device).view(2, 12) * 7919 + 11) % shape[0]
        tokens_BN[1, 5:] = tokens_BN[0, 5:]
        position_BN = torch.cat([torch.arange(5), torch.arange(7)]).to(self.device).expand(2, -1)
        _, last_BNS = self.states(tokens_BN, position_BN, (0,), eager=True)
        if not torch.allclose(last_BNS[0, 5:], last_BNS[1, 5:], rtol=1e-3, atol=1e-3 * float(last_BNS.abs().max())):
            raise ValueError(f"target {source}: a packed document changes with the one before it")
        logits_NV = self.model(input_ids=tokens_BN[:1, :5].to(self._entry), use_cache=False).logits[0].to(self.device)
        expected_NV = (last_BNS[0, :5] @ self.lm_head_VS.T).float()
        difference, greatest = float((logits_NV.float() - expected_NV).abs().max()), float(expected_NV.abs().max())
        if difference > 0.03 * greatest:
            raise ValueError(
                f"target {source}: its logits differ from output matrix x last hidden state by up to {difference:.3g} "
                f"(of {greatest:.3g}): it caps, scales or biases them, or its attention cannot be packed"
            )


class KeptStates:
    """A target's states of a data set, kept in a file from the first pass over each conversation on.

    The file is named for the target's weights, the data, the auxiliary layers and the type, so that runs which agree in
    these share it, also at the same time. A conversation's states do not depend on what it is packed with, but for
    rounding.
    """

    def __init__(self, folder: str | Path, target: Target, data: Conversations, aux_layer_ids: tuple[int, ...]) -> None:
        """Raises ValueError where the folder has not the room."""
        self._target, self._aux_layer_ids = target, aux_layer_ids
        table, num_tokens = target.embed_VS, len(data.tokens)
        self._widths = [len(aux_layer_ids) * table.shape[1], table.shape[1]]
        size = num_tokens * sum(self._widths)
        made_of = (target.fingerprint, data.digest(), aux_layer_ids, str(table.dtype))
        path = Path(folder) / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}.states"
        path.parent.mkdir(parents=True, exist_ok=True)
        held = path.stat().st_blocks * 512 if path.exists() else 0
        missing, free = size * table.element_size() - held, shutil.disk_usage(folder).free
        if missing > free:
            raise ValueError(
                f"states_dir = {folder}: the target's states of {num_tokens} tokens take {missing / 2**30:.2f} GiB "
                f"more, and {free / 2**30:.2f} are free there; name another folder, or none"
            )
        self._states_NX = torch.from_file(str(path), shared=True, size=size, dtype=table.dtype).view(num_tokens, -1)
        self._known_N = torch.from_file(f"{path}.known", shared=True, size=num_tokens, dtype=torch.bool)
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def read(self, batch: Batch) -> Tensor | None:
        """States [B, N, C * S + S] of a batch on the host, for `to_device`; None where some are not known yet.

        On padding they are another token's.
        """
        if not bool(self._known_N[batch.index_BN[batch.index_BN >= 0]].all()):
            return None
        shape = (*batch.index_BN.shape, sum(self._widths))
        rows_BNX = torch.empty(shape, dtype=self._states_NX.dtype, pin_memory=self._target.device.type == "cuda")
        torch.index_select(self._states_NX, 0, batch.index_BN.clamp_min(0).flatten(), out=rows_BNX.flatten(0, 1))
        return rows_BNX

    def to_device(self, rows_BNX: Tensor) -> tuple[Tensor, Tensor]:
        """What `read` gave in the form of `Target.states`."""
        aux_BNX, last_BNS = rows_BNX.to(self._target.device, non_blocking=True).split(self._widths, dim=-1)
        # Compiled passes are made for the layout that the target's own states have.
        return aux_BNX.contiguous(), last_BNS.contiguous()

    def make(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`Target.states` of a batch on the target's device; they are in the file a little later."""
        states = self._target.states(batch.tokens_BN, batch.position_BN, self._aux_layer_ids)
        if self._writing is not None:
            self._writing.result()
        self._writing = self._writer.submit(self._write, batch.index_BN, *states)
        return states

    def _write(self, index_BN: Tensor, aux_BNX: Tensor, last_BNS: Tensor) -> None:
        rows_MX = torch.cat([aux_BNX, last_BNS], dim=-1)[index_BN >= 0]
        # Not blocking, a copy from a GPU goes to pinned memory that is used again, not to 100 MB of new pages a batch.
        rows_MX, places_M = (x.to("cpu", non_blocking=True) for x in (rows_MX, index_BN[index_BN >= 0]))
        if index_BN.is_cuda:
            torch.cuda.current_stream(index_BN.device).synchronize()
        self._states_NX[places_M] = rows_MX
        self._known_N[places_M] = True


def _load(target_dir: str | Path, **settings: Any) -> Any:
    """With SDPA, or, for architectures that have none, with eager attention."""
    try:
        return AutoModelForCausalLM.from_pretrained(target_dir, attn_implementation="sdpa", **settings)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return AutoModelForCausalLM.from_pretrained(target_dir, attn_implementation="eager", **settings)
