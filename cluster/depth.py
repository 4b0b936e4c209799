"""The choice of K: its formulas, and the names under which the rest of the cluster uses it.

`allocate` trims the requests of one engine step (in the scheduler, with the batch it really has), `best_depths` finds
K per workload for a replica, `DepthChooser` holds K steady over time and probes (in the ingress).

**Worth of a draft.** S_i is the survival of depth i, L(k) = 1 + S_1 + ... + S_k the expected tokens of a step at K = k
(policy-and-apis.md, D1). P-EAGLE drafts K_max in one pass whatever K is, so drafting does not depend on K and only
verification does; t(requests, tokens) covers both, and K = 0 still pays the drafter.

That sum holds at the K at which S was measured. To compare one K with another, what each further draft adds to L is
taken from `cluster.transfer`, and stands for S_i in what follows; trimming within one step rests on S_i itself.

**Throughput** (D2; goodput in SmartSpec, arXiv 2406.14066). With b_c requests of workload c at K = k_c in a step,

    R = sum_c b_c L_c(k_c) / t(b, n),   b = sum_c b_c,   n = sum_c b_c (1 + k_c)

At the optimum, with lambda = R, depth i of workload c is admitted where S_c,i >= lambda dt, dt being the time that its
tokens add. Dinkelbach's iteration finds lambda where t is convex. Here t is a staircase with a jump, so every threshold
is tried instead: the drafts in the order of their worth per token are a path, and R is computed at each of its points
(the global ranking of vLLM's adaptive verification, PR 52228, with workloads in place of single drafts). A K that all
workloads share may run on a full CUDA graph at another price, and is compared as a whole: K = 0, K_max and what lies
between. Across the requests of one step (`allocate`) this is the exact optimum. Across workloads one depth is a lump of
b_c tokens: up to `cluster.planning.MAX_ENUMERATED` assignments are all compared, and beyond, the best point of the path
is improved by changes of one or two workloads; tests/test_planning.py holds its distance from the optimum.

**Several workloads.** Weights w_c count tokens. A workload whose objective is `latency` enters by the harmonic mean of
L, the others by the sum:

    worth = sum_{c: throughput} w_c b_c L_c + W^2 / sum_{c: latency} (w_c b_c / L_c),   W = sum_{c: latency} w_c b_c

and worth / t is maximised. With throughput alone this is R; with latency alone it is the least mean time per output
token, since TPOT_c = t / L_c; for one workload both are the same, since t / L = b / R. The sum of the two is this
project's own.

**Limits.** TPOT_c = t / L_c(k_c) <= limit_c comes before worth. Where nothing meets every limit, the greatest
TPOT_c / limit_c is made as small as it can be.

**Hardly more than one request in a step**: workloads then do not meet in a step, and each is decided alone.

**Prompts.** A step that takes in prompts runs off the full graphs, so K pays differently there. K is chosen for steps
that only decode, and `allocate` trims the others. What a prompt itself takes is left out: each request has one,
whatever its K, and tokens / (decoding + a constant for each token) is greatest where tokens / decoding is.
"""

from cluster.allocation import Allocation, SurvivalError, allocate, plan_step
from cluster.chooser import Choice, DepthChooser, Load
from cluster.demand import Demand, Objective, Plan
from cluster.planning import best_depths
from cluster.step_costs import CostCurves, StepCosts

__all__ = [
    "Allocation",
    "Choice",
    "CostCurves",
    "Demand",
    "DepthChooser",
    "Load",
    "Objective",
    "Plan",
    "StepCosts",
    "SurvivalError",
    "allocate",
    "best_depths",
    "plan_step",
]
