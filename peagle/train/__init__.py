"""Training of a drafter: COD, masks, partition, losses, trainer. Knows nothing of Ray."""
