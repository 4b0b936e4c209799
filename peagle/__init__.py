"""P-EAGLE: the drafter, its training, and its use inside vLLM. Knows nothing of Ray.

Tensor names end in their shape, one letter a dimension, in every module of this package. A module that uses a letter in
another sense says so in its docstring.

    B  sequences (requests) of a batch    H  hidden size of the drafter        V  vocabulary (V_draft where reduced)
    N  tokens of one sequence             S  hidden size of the target         K  draft tokens of one pass (= depths)
    T  rows of one pass over a sequence   C  auxiliary layers (3)              A  attention heads
    R  rows picked from a pass            X  C * S: all auxiliary states       G  key/value heads
    P  rows of one chunk of R             M  rows of mask tokens               D  size of one head
    U  keys that queries see, or the distinct labels of rows; 1 stands for a dimension of one

`depth` counts positions of a draft from 1. In training, `offset` = depth - 1 counts from 0, as the paper does: offset 0
is ordinary next-token prediction, offsets 1..K-1 are the positions that carry the mask token and the shared hidden
state.
"""

__version__ = "0.2.0"
