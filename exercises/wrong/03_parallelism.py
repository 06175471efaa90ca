"""Typical wrong answers to the parallelism exercises."""

from exercises.wrong import Wrong

FLAT = "flat = torch.cat([gradient.flatten() for gradient in gradients])"
CHOICE = 'faster = [p for p in fits if p["step_s"] * 1.4 <= fits[0]["step_s"]]'

WRONG = [
    Wrong(exercise="3.1", old='"optimizer": 12 * params', new='"optimizer": 8 * params', why="the float32 copy of the weights is forgotten"),
    Wrong(exercise="3.1", old='["optimizer", "grads", "params"]', new='["params", "grads", "optimizer"]', why="ZeRO-1 cuts the parameters first"),
    Wrong(exercise="3.1", old="size / (ranks if", new="size / (1 if", why="cut and whole exchanged"),
    Wrong(exercise="3.2a", old="(ranks - 1) / ranks", new="(ranks - 1)", why="each rank sends the whole in every turn"),
    Wrong(exercise="3.2a", old="2 * once if", new="once if", why="an all-reduce of one round"),
    Wrong(exercise="3.2b", old="2 * gather + scatter", new="gather + scatter", why="backward does not gather again"),
    Wrong(exercise="3.2b", old='"zero1": reduce + gather', new='"zero1": reduce', why="the paper's bytes, not torch's"),
    Wrong(exercise="3.3a", old="(microbatches + stages - 1)", new="microbatches", why="idle time over useful time, not over all"),
    Wrong(exercise="3.3a", old="(stages - 1) /", new="stages /", why="one stage more than are waited for"),
    Wrong(exercise="3.3b", old="min(stages - stage, microbatches)", new="stages - stage", why="more than there are"),
    Wrong(exercise="3.3b", old="min(stages - stage, microbatches)", new="min(stage + 1, microbatches)", why="the last stage holds most"),
    Wrong(exercise="3.4a", old="+ size > limit", new=">= limit", why="closed when full, so that a bucket overflows"),
    Wrong(exercise="3.4a", old="not buckets or ", new="", why="nothing to put the first one into"),
    Wrong(exercise="3.4b", old=" / world", new="", why="the sum instead of the mean"),
    Wrong(exercise="3.4b", old=FLAT, new=FLAT.replace("in gradients]", "in gradients[:1]]"), why="the first gradient alone"),
    Wrong(exercise="3.4b", old="    all_reduce(flat)", new="    if len(gradients) > 1:\n        all_reduce(flat)", why="a small bucket is not sent"),
    Wrong(exercise="3.5", old="return all_reduce(torch.relu(x @ a) @ b)", new="return torch.relu(x @ a) @ b", why="each rank keeps its part of the sum"),
    Wrong(exercise="3.5", old="torch.relu(x @ a) @ b", new="torch.relu(all_reduce(x @ a)) @ b", why="halves of the hidden layer that do not belong together are summed"),
    Wrong(exercise="3.5", old="return all_reduce(((grad_y @ b.T) * (x @ a > 0)) @ a.T)", new="return ((grad_y @ b.T) * (x @ a > 0)) @ a.T", why="the gradient of x from one half of A alone"),
    Wrong(exercise="3.5", old=" * (x @ a > 0)", new="", why="relu's own gradient is forgotten"),
    Wrong(exercise="3.6", old='if p["peak_gb"] <= memory_gb', new='if p["peak_gb"] > 0', why="what does not fit is chosen"),
    Wrong(exercise="3.6", old=CHOICE, new='faster = [min(fits, key=lambda p: p["step_s"])]', why="the fastest, however complex"),
    Wrong(exercise="3.6", old=CHOICE, new="faster = []", why="the simplest, however slow"),
]  # fmt: skip
