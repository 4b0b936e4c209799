"""P-EAGLE: the drafter, its training, and its use inside vLLM. Knows nothing of Ray.

Tensor names end in their shape, one letter a dimension, in every module of this package:

    B  sequences in a batch        H  hidden size of the drafter     V  vocabulary (V_draft where reduced)
    T  rows of one sequence        A  attention heads                K  draft tokens of one pass (= depths)
    N  tokens of one sequence      G  key/value heads                C  target layers tapped (3)
    D  size of one head            S  target hidden size

`depth` counts positions of a draft from 1. In training, `offset` = depth - 1 counts from 0, as the paper does: offset 0
is ordinary next-token prediction, offsets 1..K-1 are the positions that carry the mask token and the shared hidden
state.
"""
