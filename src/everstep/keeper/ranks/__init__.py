"""Several ranks, on one node or on several: the rest of the keeper knows `Team` (the sessions of a
run's ranks here) and `NodeSave` (a step of theirs, with `nodes` where others have more of it)."""
