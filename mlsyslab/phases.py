"""How the phases of a step look in every figure. Pure."""

from __future__ import annotations

# Okabe-Ito colours, and a hatch each, so that no phase is told apart by colour alone.
STYLE = {
    "data_s": ("data wait", "#E69F00", "//"),
    "h2d_s": ("copy to device", "#F0E442", ".."),
    "forward_s": ("forward", "#56B4E9", ""),
    "backward_s": ("backward", "#0072B2", ""),
    "sync_s": ("exposed sync", "#CC79A7", "\\\\"),
    "optimizer_s": ("optimizer", "#009E73", ""),
    "other_s": ("other (host)", "#999999", "xx"),
}
