"""Typical wrong answers to the scale-up exercises."""

from exercises.wrong import Wrong

WRONG = [
    Wrong(exercise="5.1a", old="return growth * lr", new="return lr", why="the rate is not scaled after all"),
    Wrong(exercise="5.1a", old="lr + (growth - 1) * lr * step / climb", new="growth * lr * step / climb", why="climbs from zero, so that the first step does nothing"),
    Wrong(exercise="5.1a", old="step >= climb", new="step > climb", why="the peak comes a step late"),
    Wrong(exercise="5.1b", old="2 * (1 + momentum) / lr", new="2 / lr", why="momentum is forgotten"),
    Wrong(exercise="5.1b", old="(1 + momentum)", new="(1 - momentum)", why="momentum with the wrong sign"),
    Wrong(exercise="5.2a", old="1 - len(set(ids)) / len(ids)", new="len(set(ids)) / len(ids)", why="the share that is different"),
    Wrong(exercise="5.2a", old="ids = [index for rank in ranks for index in rank]", new="ids = ranks[0]", why="one rank alone, where nothing repeats"),
    Wrong(exercise="5.2b", old="repeated(epochs[0][0]) > 0", new="repeated(epochs[0][0]) > 1", why="duplicates are never seen"),
    Wrong(exercise="5.2b", old='sorted(epochs[0][0][0]) == sorted(epochs[1][0][0])', new='epochs[0] is epochs[1]', why="asks for the same object"),
    Wrong(exercise="5.2b", old="for epoch in epochs:", new="for epoch in epochs[:0]:", why="no epoch is looked at as a whole"),
    Wrong(exercise="5.3", old="norm**2 for step in local", new="norm for step in local", why="norms instead of their squares"),
    Wrong(exercise="5.3", old="(1 / small - 1 / big)", new="(1 / big - 1 / small)", why="the sign"),
    Wrong(exercise="5.3", old="at_small - trace / small", new="at_small", why="the noise is left in the gradient"),
    Wrong(exercise="5.4a", old="len(tokens) / sum", new="1 / sum", why="DDP's own division is forgotten"),
    Wrong(exercise="5.4a", old="sum(sum(rank) for rank in tokens)", new="sum(tokens[0])", why="the tokens of one rank alone"),
    Wrong(exercise="5.4b", old="loss * count for", new="loss for", why="losses are not weighed"),
    Wrong(exercise="5.4b", old="(sum(losses) / len(losses) - right) / right", new="(right - sum(losses) / len(losses)) / right", why="the sign"),
    Wrong(exercise="5.5", old='signs["same_order"] > 0.5', new='signs["same_order"] > 1', why="an order that repeats is never seen"),
    Wrong(exercise="5.5", old='signs["ranks_apart"] > 1e-5', new="False", why="gradients that differ are taken for a fault of the mean"),
    Wrong(exercise="5.5", old="(ranks - 1)", new="ranks", why="the sum is ranks times the mean, and so ranks - 1 more than it"),
    Wrong(exercise="5.5", old="signs[name] > 1e-5 for", new="signs[name] >= 0 for", why="a healthy run is accused"),
    Wrong(exercise="5.5", old='signs["start_differs"] > 0', new='signs["start_differs"] > 9', why="the first cause is taken for its consequence"),
    Wrong(exercise="5.5", old="zip(CAUSES, wrong, strict=True)", new="reversed(list(zip(CAUSES, wrong, strict=True)))", why="the last thing that is wrong, which is a consequence"),
]  # fmt: skip
