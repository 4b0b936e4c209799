"""58.C: drafts of one pass chosen from left to right, on a trained head.

python choice.py RECIPE MODE OUT MINUTES ANSWERS [section.key=value ...]; drafter.start_from names the head.
MODE: selector (top 16), markov (full vocabulary): on a frozen backbone. "-detached": backbone trained by its own loss
alone, "-joint": by both, the choice's loss weighs JOINT (.5); control. Trained backbones leave OUT/head, with selector/.
"""
import json, sys, time, math, os
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from peagle.train import passes, trainer as T, evaluate as E
from peagle.train.recipe import Recipe

RANK, TOP = 256, int(os.environ.get("TOP", 16))

class Markov(nn.Module):
    def __init__(self, drafter):
        super().__init__()
        h, dev = drafter.config.hidden_size, drafter.lm_head.weight.device
        self.previous, self.hidden, self.out = (nn.Linear(a, b, bias=False, device=dev) for a, b in ((h, RANK), (h, RANK), (RANK, h)))
        for l in (self.previous, self.hidden): nn.init.normal_(l.weight, std=0.02)
        nn.init.zeros_(self.out.weight)
        self.drafter = [drafter]
    def move(self, normed, prev_ids):
        d = self.drafter[0]
        with torch.autocast(normed.device.type, torch.bfloat16, enabled=normed.is_cuda):
            return normed + self.out(F.silu(self.previous(d.embed(prev_ids).to(normed.dtype)) + self.hidden(normed)))

class Selector(nn.Module):
    def __init__(self, drafter):
        super().__init__()
        dev = drafter.lm_head.weight.device
        ids, head = drafter.target_ids, drafter.lm_head.weight.detach().float()
        table = drafter.embed_tokens.weight.detach()[ids].float()
        low = lambda M: (lambda u, s, v: u * s)(*torch.svd_lowrank(M - M.mean(0), q=RANK, niter=3))
        a, b = low(table), low(head)
        self.A, self.B = (nn.Parameter(x / x.pow(2).sum(1).mean().sqrt()) for x in (a, b))  # rows of length 1 on average
        self.W = nn.Linear(drafter.config.hidden_size, RANK, device=dev); nn.init.zeros_(self.W.weight); nn.init.zeros_(self.W.bias)
        size = drafter.embed_tokens.weight.shape[0]
        self.register_buffer("index", torch.full((size,), -1, device=dev, dtype=torch.int64)); self.index[ids] = torch.arange(len(ids), device=dev)
    def scores(self, normed, prev_ids, values, idx):
        """values, idx [P, 16] of the base; prev_ids: target ids."""
        prev = self.index[prev_ids]
        a = self.A[prev.clamp_min(0)] * (prev >= 0)[:, None]
        key = a * self.W(normed.float())
        return values.float() + torch.einsum("pr,pcr->pc", key, self.B[idx])

class Losses(passes.PassLosses):
    choice = None; mode = ""; joint = False; detached = False; weight = float(os.environ.get("JOINT", 0.5))
    def __init__(self, recipe, score, drafter, rows, chain_BN, tokens_BN, states):
        super().__init__(recipe, score, drafter, rows, chain_BN, tokens_BN, states)
        self._tokens = tokens_BN.flatten()
    def __call__(self, normed_RH, index_R=None, first=0):
        total = 0.0
        if self.joint:
            total = super().__call__(normed_RH, index_R, first); self._seen.pop()
        useful_R, label_R, offset_R = self._useful_T, self._label_T, self._offset_T
        chosen = useful_R.nonzero().squeeze(1)
        label_R, offset_R = label_R[chosen], offset_R[chosen]
        normed = normed_RH[chosen]
        if self.detached or not self.joint: normed = normed.detach()
        prev_R = self._tokens[label_R]
        if self.mode == "markov":
            moved = self.choice.move(normed, prev_R)
            moved = torch.where((offset_R > 0)[:, None], moved, normed.to(moved.dtype))
            loss, correct = self._score(moved, self._lm_head_VH, self._labels, label_R, lambda d: self._weights.weigh(label_R, offset_R, d))
        else:
            losses = normed.new_zeros(len(label_R), dtype=torch.float32)
            draft = torch.empty_like(label_R); correct = torch.zeros_like(label_R, dtype=torch.bool)
            parts, places = [], []
            for rows, target, index_P in self._labels.walk(label_R, self._score.chunk // 2):
                h = normed[rows]
                with torch.no_grad():
                    logits = h.to(self._lm_head_VH.dtype) @ self._lm_head_VH.T
                    idx = logits.topk(TOP, dim=-1).indices
                    best = target.best_U[index_P]
                    missing = ~(idx == best[:, None]).any(1) & (best >= 0)
                    idx2 = idx.clone(); idx2[:, -1] = torch.where(missing, best, idx[:, -1])
                    values = logits.gather(1, idx2)
                    wanted = target.logits_UV[index_P[:, None], idx2].float().softmax(-1)
                if h.requires_grad:  # the gradient of 16 logits, not of all
                    values = torch.einsum("ph,pch->pc", h.to(self._lm_head_VH.dtype), self._lm_head_VH[idx2])
                del logits, target
                s = self.choice.scores(h, prev_R[rows], values, idx2)
                parts.append(-(wanted * s.log_softmax(-1)).sum(-1)); places.append(rows)
                with torch.no_grad():
                    s = s.clone(); s[:, -1] = torch.where(missing, -torch.inf, s[:, -1])
                    first_row = offset_R[rows] == 0
                    best_c = torch.where(first_row, values.float().masked_fill(torch.arange(TOP, device=s.device) == (TOP - 1), -torch.inf).argmax(-1), s.argmax(-1))
                    draft[rows] = idx2.gather(1, best_c[:, None]).squeeze(1)
                    correct[rows] = draft[rows] == best
            weight = self._weights.weigh(label_R, offset_R, draft) * (offset_R > 0)
            order = torch.cat(places)
            loss = (torch.cat(parts) * weight[order]).sum() * (self.weight if self.joint and not self.detached else 1.0)
        self._seen.append((loss.detach(), correct, offset_R))
        return total + loss

def accepted(choice, mode):
    def _accepted(drafter, target, batch, num_depths):
        config, document_BN = drafter.config, batch.document_BN
        aux_BNX, _ = target.states(batch.tokens_BN, batch.position_BN, config.aux_layer_ids, eager=True)
        last = batch.tokens_BN.shape[1] - 1
        anchor_R = torch.arange(last + 1, device=target.device)
        is_compared_R = batch.answer_BN[0].roll(-1)
        accepted_N = torch.zeros_like(anchor_R)
        attend = E.ChainAttention(document_BN)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
            embeds_BMH, hidden_BMH = E.row_inputs(drafter, E.next_tokens(batch.tokens_BN), aux_BNX, 1)
            embeds_BRH, hidden_BRH = embeds_BMH[:, : last + 1], hidden_BMH[:, : last + 1]
            for depth in range(num_depths):
                normed_BRH, _ = drafter(embeds_BRH, hidden_BRH, batch.position_BN[:, anchor_R] + depth, attend)
                label_R = (anchor_R + depth + 2).clamp_max(last)
                inside = (anchor_R + depth + 2 <= last) & (document_BN[0, label_R] == document_BN[0, anchor_R])
                index_R = (is_compared_R & inside).nonzero().squeeze(1)
                best = []
                prev = batch.tokens_BN[0, label_R[index_R] - 1]
                for part, p in zip(normed_BRH[0, index_R].split(4096), prev.split(4096)):
                    if depth and mode == "markov": part = choice.move(part, p)
                    logits = drafter.logits(part)
                    if depth and mode == "selector":
                        values, idx = logits.topk(TOP, dim=-1)
                        best.append(idx.gather(1, choice.scores(part, p, values, idx).argmax(-1, keepdim=True)).squeeze(1))
                    else: best.append(logits.argmax(-1))
                index_R = index_R[drafter.target_ids[torch.cat(best)] == batch.tokens_BN[0, label_R[index_R]]]
                if not len(index_R): break
                anchor_R, is_compared_R = anchor_R[index_R], torch.ones_like(index_R, dtype=torch.bool)
                accepted_N[anchor_R] += 1
                attend.keep(index_R, anchor_R)
                embeds_BRH, hidden_BRH = (x[:, -1:].expand(-1, len(index_R), -1) for x in (embeds_BMH, hidden_BMH))
        return accepted_N
    return _accepted

AGAINST = os.environ.get("AGAINST")

@__import__("functools").cache
def _theirs(): return []

def replayed_against(target, data):
    if not _theirs():
        from peagle.checkpoint import load_head
        with torch.no_grad(): _theirs().append(E.replay(target.build_drafter(*load_head(AGAINST), torch.bfloat16 if torch.cuda.is_available() else torch.float32), target, data, 8 if torch.cuda.is_available() else 4))
    return _theirs()[0]

def measure(drafter, target, folder, choice, mode, original):
    answers = E.load_answers(folder); out = {}
    names = E.group_names(answers.data, answers.categories); runs = {}
    with torch.no_grad():
        E._accepted = original; runs["base"] = E.replay(drafter, target, answers.data)
        if choice is not None: E._accepted = accepted(choice, mode); runs["choice"] = E.replay(drafter, target, answers.data); E._accepted = original
    groups = E.members([names[i] for i in runs["base"].walked])
    for g in [g for g in groups if g in ("all", "humaneval", "non-looping")] or list(groups)[:3]:
        out[g] = {}
        for k, run in runs.items():
            f = E.figures(run.counts.select(groups[g])); s = [1.0, *f["survival"]]
            out[g][k] = f | {"conditional": [round(b / a, 4) if a else None for a, b in zip(s, s[1:])]}
        if choice is not None:
            out[g]["ratio"] = E.ratios(runs["choice"].counts.select(groups[g]), runs["base"].counts.select(groups[g]), [k for k in (3, 5, 7) if k <= runs["base"].num_depths])
        if AGAINST:
            theirs = replayed_against(target, answers.data); out[g]["against"] = {k: E.ratios(run.counts.select(groups[g]), theirs.counts.select(groups[g]), [k for k in (3, 5, 7) if k <= theirs.num_depths]) for k, run in runs.items()}
    return out

def main():
    recipe_path, mode, out, minutes, answers, *overrides = sys.argv[1:]
    kind, _, how = mode.partition("-"); joint = how in ("joint", "detached") or kind == "control"
    output = str(Path(out) / "run"); torch.set_float32_matmul_precision("high")
    overrides = ["evaluate.data=null", f"output={output}", f"schedule.max_minutes={minutes}", *overrides]
    if not joint: overrides.append("optimizer.max_attention_score=null")
    recipe = Recipe.load(recipe_path, overrides)
    t = T.Trainer(recipe)
    choice = None
    if kind != "control":
        choice = (Markov if kind == "markov" else Selector)(t.drafter)
        Losses.choice, Losses.mode, Losses.joint, Losses.detached = choice, kind, joint, how == "detached"
        passes.PassLosses = Losses
        own = torch.optim.AdamW(choice.parameters(), lr=1e-3, betas=T.ADAMW_BETAS, weight_decay=0.01)
        if not joint:
            for p in t.drafter.trainable().values(): p.requires_grad_(False)
        kept = t.update
        def update(scale):
            nn.utils.clip_grad_norm_(choice.parameters(), 1.0)
            for group in own.param_groups: group["lr"] = 1e-3 * scale
            own.step(); own.zero_grad(set_to_none=True)
            if joint: return kept(scale)
            t.step += 1; return 0.0
        t.update = update
    original = E._accepted
    before = measure(t.drafter, t.target, answers, None, kind, original) if recipe.drafter.start_from else None
    started = time.time()
    t.output.mkdir(parents=True, exist_ok=True); t._loop()
    print(mode, "steps", t.step, "seconds", round(time.time() - started))
    if joint:
        from peagle.checkpoint import save_drafter
        from safetensors.torch import save_file
        head = Path(out, "head"); save_drafter(head, t.drafter, t.average.values)
        if kind == "selector":
            (head / "selector").mkdir(exist_ok=True); half = lambda x: x.detach().to(torch.bfloat16).contiguous().cpu()
            save_file({"previous_VR": half(choice.A), "candidate_VR": half(choice.B), "query_RH": half(choice.W.weight), "bias_R": half(choice.W.bias)}, head / "selector" / "model.safetensors")
        t.average.swap()
    result = {"mode": mode, "steps": t.step, "minutes": minutes, "start": before, "end": measure(t.drafter, t.target, answers, choice, kind, original)}
    log = [json.loads(l) for l in (t.output / "log.jsonl").read_text().splitlines()]
    result["log"] = [{k: r[k] for k in ("step", "loss", "accuracy") if k in r} for r in log[:: max(1, len(log) // 20)]] + log[-1:]
    Path(out, "choice.json").write_text(json.dumps(result, indent=1))
    for g, f in result["end"].items():
        for k in ("base", "choice"):
            if k in f: print(mode, g, k, "AL", {x: f[k]["acceptance_length"][x] for x in ("3", "5", "7") if x in f[k]["acceptance_length"]}, "cond", f[k]["conditional"])
        print(mode, g, f.get("ratio"), f.get("against"))
main()
