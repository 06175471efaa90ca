"""What the recorder writes down, against what it is said to mean; in loops of one's own, on one process and on two."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from mlsyslab import ConfigError, launch, open_run, scaleup
from mlsyslab.labs.scaleup.recorder import PERIOD, Probe, Recorder, ids_hash, on_grid


class TestFingerprints:
    def test_of_samples_do_not_depend_on_order_and_add_up_over_shards(self) -> None:
        ids = list(range(0, 3000, 7))
        mixed = random.Random(0).sample(ids, len(ids))
        assert ids_hash(ids) == ids_hash(mixed) == ids_hash(torch.tensor(mixed))
        assert (ids_hash(ids[:100]) + ids_hash(ids[100:])) % 2**53 == ids_hash(ids)

    def test_of_samples_differ_where_one_sample_does(self) -> None:
        assert ids_hash([1, 2, 3]) != ids_hash([1, 2, 4])
        assert ids_hash([1, 1, 2]) != ids_hash([1, 2, 2])
        assert len({ids_hash([i]) for i in range(10_000)}) == 10_000
        assert ids_hash([]) == 0

    @pytest.mark.parametrize("size", [50, PERIOD, PERIOD + 1, 3 * PERIOD + 17])
    def test_projections_are_linear_and_see_every_element(self, size: int) -> None:
        probe = Probe(size, torch.device("cpu"))
        a, b = torch.randn(size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
        both = probe((a + b) / 2)
        assert both == pytest.approx([(x + y) / 2 for x, y in zip(probe(a), probe(b), strict=True)], abs=1e-9)
        for at in (0, size // 2, size - 1):
            one = torch.zeros(size)
            one[at] = 1
            assert {abs(value) for value in probe(one)} == {1.0}

    def test_a_format_is_seen_in_its_numbers(self) -> None:
        flat = torch.randn(10_000)
        assert on_grid(flat, torch.bfloat16) < 0.01
        assert on_grid(flat.bfloat16().float(), torch.bfloat16) == 1
        assert on_grid(flat.half().float(), torch.float16) == 1
        assert on_grid(flat.half().float(), torch.bfloat16) < 0.2
        assert on_grid(torch.zeros(10), torch.bfloat16) == 0


def loop(
    recorder: scaleup.ScaleupRecorder, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> None:
    for step in range(steps):
        loss = (model(torch.full((2, 3), float(step + 1))) ** 2).mean()
        loss.backward()
        optimizer.step()
        recorder.step(loss=loss, ids=[2 * step, 2 * step + 1])
        optimizer.zero_grad()
    recorder.close()


class TestOneProcess:
    def test_a_row_holds_what_happened(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        before = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        recorder = scaleup.ScaleupRecorder(
            model, optimizer, out=tmp_path / "run", dataset_size=20, batch_per_rank=2
        )
        loss = (model(torch.ones(2, 3)) ** 2).mean()
        loss.backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        optimizer.step()
        recorder.step(loss=loss, ids=[4, 7])
        row = open_run(tmp_path / "run").rows()[0]
        assert row["norm"] == pytest.approx(float(gradient.norm()), rel=1e-6)
        assert row["update_frac"] == pytest.approx(
            0.01 * float(gradient.norm()) / float(before.norm()), rel=1e-5
        )
        assert row["param_norm"] == pytest.approx(float(before.norm()), rel=1e-6)
        assert (row["loss"], row["lr"], row["ids"], row["samples"]) == (
            pytest.approx(loss.item()),
            0.01,
            [4, 7],
            2,
        )
        assert (row["nonfinite"], row["lost_frac"], row["rng_used"]) == (0, 0.0, False)

    def test_random_numbers_that_a_step_draws_are_noticed(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loop(scaleup.ScaleupRecorder(model, optimizer, out=tmp_path / "run"), model, optimizer, 3)
        assert [row["rng_used"] for row in open_run(tmp_path / "run").rows()] == [True] * 3

    def test_updates_too_small_for_bfloat16_are_counted(self) -> None:
        model = torch.nn.Linear(64, 64).bfloat16()
        recorder = Recorder(model, rank=0, world=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        model(torch.ones(1, 64).bfloat16()).sum().backward()
        recorder.reduced()
        optimizer.step()
        row = recorder.row(loss=0.0)
        assert row["lost_frac"] > 0.9
        assert row["weight_bf16_frac"] == 1

    def test_a_step_that_a_scaler_left_out_is_recorded_as_no_step(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        recorder = scaleup.ScaleupRecorder(model, optimizer, out=tmp_path / "run")
        (model(torch.ones(2, 3)) * float("inf")).sum().backward()
        recorder.step(loss=1.0)  # the optimizer was not called
        row = open_run(tmp_path / "run").rows()[0]
        assert row["nonfinite"] > 0
        assert row["update_frac"] == 0

    def test_the_optimizer_is_as_before_when_it_is_closed(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loop(scaleup.ScaleupRecorder(model, optimizer, out=tmp_path / "run"), model, optimizer, 2)
        assert not optimizer._optimizer_step_pre_hooks

    def test_bad_use_is_one_error_and_loses_nothing(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loop(scaleup.ScaleupRecorder(model, optimizer, out=tmp_path / "run"), model, optimizer, 2)
        kept = (tmp_path / "run" / "rank-0.jsonl").read_text()
        with pytest.raises(scaleup_error(), match="is not empty"):
            scaleup.ScaleupRecorder(model, optimizer, out=tmp_path / "run")
        assert (tmp_path / "run" / "rank-0.jsonl").read_text() == kept
        model.requires_grad_(False)
        with pytest.raises(ConfigError, match="no parameter that is trained"):
            scaleup.ScaleupRecorder(model, optimizer, out=tmp_path / "other")

    def test_a_run_of_ones_own_is_judged_and_says_what_it_cannot_know(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loop(
            scaleup.ScaleupRecorder(model, optimizer, out=tmp_path / "run", dataset_size=100),
            model,
            optimizer,
            4,
        )
        verdict = scaleup.diagnose(open_run(tmp_path / "run"))
        assert verdict.cause == "healthy"
        assert "control" in verdict.reason

    def test_a_loop_that_gives_neither_ids_nor_size_is_judged_by_its_gradients(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        recorder = scaleup.ScaleupRecorder(model, optimizer, out=tmp_path / "run")
        for step in range(3):
            loss = (model(torch.full((2, 3), float(step + 1))) ** 2).mean()
            loss.backward()
            optimizer.step()
            recorder.step(loss=loss)
            optimizer.zero_grad()
        verdict = scaleup.diagnose(open_run(tmp_path / "run"))
        assert verdict.cause == "healthy"
        assert open_run(tmp_path / "run").summary()["steps"] == 3

    def test_uneven_micro_batches_that_were_averaged_are_named(self, tmp_path: Path) -> None:
        """trl#2175, transformers#34191: the loss is the mean of means, although 10 and 30 tokens were counted."""
        for name, loss in (("wrong", 2.0), ("right", (10 * 1.0 + 30 * 3.0) / 40)):
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            recorder = scaleup.ScaleupRecorder(model, optimizer, out=tmp_path / name)
            for _ in range(4):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                recorder.step(loss=loss, tokens=[10, 30], losses=[1.0, 3.0])
            cause = scaleup.diagnose(open_run(tmp_path / name)).cause
            assert cause == ("healthy" if name == "right" else "accumulation averaged per micro-batch")


def scaleup_error() -> type[Exception]:
    from mlsyslab import RunError

    return RunError


@pytest.mark.ranks
class TestTwoProcesses:
    def test_under_ddp_each_ranks_own_gradient_is_seen_and_their_mean_is_the_reduced(
        self, tmp_path: Path
    ) -> None:
        launch.Ranks("scaleup_cases:healthy", {}, tmp_path, 2).wait(60)
        rows = open_run(tmp_path / "run").rows()
        assert {row["rank"] for row in rows} == {0, 1}
        for step in range(12):
            own = [row for row in rows if row["step"] == step]
            assert own[0]["probe"] == own[1]["probe"]
            assert own[0]["local_probe"] != own[1]["local_probe"]
            mean = [(a + b) / 2 for a, b in zip(own[0]["local_probe"], own[1]["local_probe"], strict=True)]
            size = max(map(abs, mean))
            assert own[0]["probe"] == pytest.approx(mean, abs=1e-5 * size)
            assert own[0]["param_crc"] == own[1]["param_crc"]

    def test_a_scaled_loss_is_taken_out_of_each_ranks_own_gradient(self, tmp_path: Path) -> None:
        launch.Ranks("scaleup_cases:scaled_loss", {}, tmp_path, 2).wait(60)
        rows = [row for row in open_run(tmp_path / "run").rows() if row["step"] == 0]
        mean = [(a + b) / 2 for a, b in zip(*(row["local_probe"] for row in rows), strict=True)]
        assert rows[0]["probe"] == pytest.approx(mean, rel=1e-4, abs=1e-5 * max(map(abs, mean)))
        assert scaleup.diagnose(open_run(tmp_path / "run")).cause == "healthy"

    def test_a_hook_that_is_there_already_is_kept(self, tmp_path: Path) -> None:
        launch.call("scaleup_cases:own_hook", {}, ranks=2)

    def test_under_fsdp_the_norm_is_that_of_the_whole_gradient(self, tmp_path: Path) -> None:
        assert launch.Ranks("scaleup_cases:sharded", {}, tmp_path, 2).wait(60)
        expected = json.loads((tmp_path / "result-0.json").read_text())["norm"]
        rows = [row for row in open_run(tmp_path / "run").rows() if row["step"] == 0]
        assert [row["norm"] for row in rows] == pytest.approx([expected, expected], rel=1e-5)
        assert scaleup.diagnose(open_run(tmp_path / "run")).cause == "healthy"
