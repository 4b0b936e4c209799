"""One packed sequence with documents, a prompt, padding and dropped rows, for tests of partitioning."""

import torch

from peagle.config import DrafterConfig
from peagle.train.cod import chain_lengths, sample_rows
from peagle.train.partition import PackedSequence

NUM_TOKENS = 45
#: documents of a packed sequence; the last 6 tokens are padding
DOCUMENTS = (17, 2, 20)


def packed_sequence(config: DrafterConfig, ratio: float, seed: int = 0) -> PackedSequence:
    random = torch.Generator().manual_seed(seed)
    document_1N = torch.full((1, NUM_TOKENS), -1)
    position_1N = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
    start = 0
    for number, length in enumerate(DOCUMENTS):
        document_1N[0, start : start + length] = number
        position_1N[0, start : start + length] = torch.arange(length)
        start += length
    wanted_1N = torch.rand(1, NUM_TOKENS, generator=random) < 0.7
    wanted_1N[:, :12] = False  # a prompt: rows of offset 0 alone
    chain_1N = chain_lengths(document_1N, wanted_1N, config.num_depths)
    rows = sample_rows(chain_1N, config.num_depths, ratio, generator=random)
    return PackedSequence(
        tokens_1N=torch.randint(0, config.vocab_size, (1, NUM_TOKENS), generator=random),
        document_1N=document_1N,
        aux_1NX=torch.randn(1, NUM_TOKENS, config.fc_input_size, generator=random).double(),
        rows=rows,
        position_1T=position_1N.gather(1, rows.anchor_BT) + rows.offset_BT,
    )
