"""Ways in which frames come from a peer, behind one contract (`contract.Transport`)."""
