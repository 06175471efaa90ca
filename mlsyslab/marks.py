"""The marks that a model, its backward and its optimizer set in a running step, and the hooks that set them.

A mark is a phase and a token of the clock. The handlers write marks of their own accord instead of calling
`_mark`: a call more costs a microsecond where caches are cold, and they run seven times a step.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from mlsyslab.wiring import WatchedBackward, WrappedForward, differentiable, hook_gradient


class Marks:
    """The marks of the running step, and what the hooks have seen so far; StepTimer's inner half.

    world: number of ranks. stamp: gives a token of the clock for now.
    """

    def __init__(self, model: Any, optimizer: Any, world: int, stamp: Callable[[], Any]) -> None:
        import torch

        engine: Any = torch.autograd.Variable._execution_engine
        self._after_backward = engine.queue_callback
        self._marks: list[Any] | None = None  # [phase, token, phase, token, ...]; None between steps
        self._stamp, self.world = stamp, world
        self._forwards = self._awaited = self._backwards = self._updates = False
        self._in_backward = self._asked = self._by_call = False
        self._calls, self._thread = 0, get_ident()
        self._handles: list[Any] = [
            WrappedForward(model, self._on_forward, self._on_output),
            WatchedBackward(self._on_call, self._on_return),
        ]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._on_optimizer))
            self._handles.append(optimizer.register_step_post_hook(self._on_updated))

    def _mark(self, phase: str) -> None:
        marks = self._marks
        if marks is not None and marks[-2] != phase:
            marks += phase, self._stamp()

    def _on_forward(self) -> None:
        # Activation checkpointing calls forward again: part of backward's own work.
        if self._marks is not None and not self._in_backward:
            self._marks += "forward_s", self._stamp()

    def _on_output(self, output: Any) -> None:
        if self._marks is None:
            return
        self._forwards = True
        if self._by_call:
            return  # the calls of backward() tell the rest, and these hooks cost more than all else
        # A hook on the tensors, not a full backward hook: that one copies each output, and misses dicts.
        for tensor in (output,) if getattr(output, "requires_grad", False) else differentiable(output):
            self._awaited = True
            hook_gradient(tensor, self._on_gradient)

    def _on_call(self) -> None:
        """backward() is called: by the loop, or by a checkpoint inside backward, or in a thread not the loop's."""
        if self._forwards and get_ident() == self._thread:
            self._calls += 1
            if self._calls == 1:
                self._in_backward = True
                if self._marks is not None:
                    self._marks += "backward_s", self._stamp()

    def _on_return(self) -> None:
        if self._calls and get_ident() == self._thread:
            self._calls -= 1
            if not self._calls:
                self._on_backward_end()

    def _on_gradient(self, gradient: object) -> None:
        """A gradient has reached the model's output; the first time in a backward, ask for the end of it."""
        if self._marks is None or self._asked:
            return
        if self._calls and self.world == 1:
            self._backwards = self._by_call = True
        else:  # under DDP, or in a backward that did not come through torch.autograd.backward
            self._backwards = self._in_backward = self._asked = True
            self._mark("backward_s")
            self._after_backward(self._on_last_gradient)

    def _on_last_gradient(self) -> None:
        if self.world > 1:
            self._mark("sync_s")
            self._after_backward(self._on_backward_end)
        else:
            self._on_backward_end()

    def _on_backward_end(self) -> None:
        self._in_backward = self._asked = False
        self._mark("other_s")

    def _on_optimizer(self, *_: object) -> None:
        self._updates = True
        if self._marks is not None:
            self._marks += "optimizer_s", self._stamp()

    def _on_updated(self, *_: object) -> None:
        if self._marks is not None:
            self._marks += "other_s", self._stamp()
