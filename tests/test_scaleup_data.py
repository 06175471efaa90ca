"""Data, models and curvature of the clinic, against independent computations."""

from __future__ import annotations

import itertools

import pytest
import torch
from scaleup_runs import small

from mlsyslab import scaleup
from mlsyslab.labs.scaleup import data, nets
from mlsyslab.labs.scaleup.config import Config


def first(config: Config, rank: int, steps: int) -> list[data.Batch]:
    train, _ = data.data_sets(config)
    return list(itertools.islice(data.batches(train, config, rank, config.ranks), steps))


class TestDigits:
    def test_they_are_real_standardised_and_of_ten_classes(self) -> None:
        train, test = data.digits(4096)
        assert train.x.shape == (4096, 64)
        assert len(test) == data.TEST_SAMPLES
        assert sorted(set(train.y.tolist())) == list(range(10))
        assert abs(float(train.x.mean())) < 0.02
        assert float(train.x.std()) == pytest.approx(1, abs=0.02)

    def test_no_sample_is_another_one(self) -> None:
        train, _ = data.digits(4096)
        assert len({row.numpy().tobytes() for row in train.x}) == 4096

    def test_a_mean_of_the_training_digits_knows_the_test_digits(self) -> None:
        """Labels belong to their images, in both sets: nearest class mean is well above chance, although they are shifted."""
        train, test = data.digits(4096)
        means = torch.stack([train.x[train.y == c].mean(0) for c in range(10)])
        right = (torch.cdist(test.x, means).argmin(1) == test.y).float().mean()
        assert right > 0.35


class TestProse:
    def test_paragraphs_differ_in_length_and_targets_follow_their_characters(self) -> None:
        train, _ = data.prose(256)
        lengths = (train.y != data.PAD).sum(1)
        assert lengths.min() >= data.PARAGRAPH[0]
        assert lengths.max() > 2 * lengths.min()
        x, y = train.x[0], train.y[0]
        for at in range(10, 30):  # what was to be predicted is the last character that is then seen
            assert x[at + 1, -1] == y[at]

    def test_the_weight_counts_targets(self) -> None:
        train, _ = data.prose(256)
        batch = train.__getitems__([0, 1])
        assert batch.weight() == int((train.y[:2] != data.PAD).sum())


class TestBatches:
    def test_the_ranks_batches_are_the_whole_batch(self) -> None:
        """Step for step, also in the second epoch: what makes the control a control."""
        config = small("healthy")
        whole = Config(**{**_fields(config), "ranks": 1})
        steps = config.epoch_steps + 2
        parts = [first(config, rank, steps) for rank in range(4)]
        for step, batch in enumerate(first(whole, 0, steps)):
            together = torch.cat([part[step].ids for part in parts])
            assert sorted(together.tolist()) == sorted(batch.ids.tolist())

    def test_epochs_have_other_orders_unless_set_epoch_is_forgotten(self) -> None:
        for cause, same in (("healthy", False), ("set_epoch forgotten", True)):
            config = small(cause)
            batches = first(config, 0, 2 * config.epoch_steps)
            assert torch.equal(batches[0].ids, batches[config.epoch_steps].ids) == same

    def test_without_a_distributed_sampler_all_ranks_draw_alike(self) -> None:
        config = small("samples duplicated")
        assert torch.equal(first(config, 0, 1)[0].ids, first(config, 3, 1)[0].ids)

    def test_a_short_shard_begins_its_next_epoch_a_batch_early(self) -> None:
        config, healthy = small("samples skipped"), small("healthy")
        n = config.epoch_steps
        faulty, right = first(config, 1, n), first(healthy, 1, n + 1)
        assert torch.equal(faulty[n - 2].ids, right[n - 2].ids)
        assert torch.equal(faulty[n - 1].ids, right[n].ids)

    def test_ten_samples_on_four_ranks_are_twelve_with_two_twice(self) -> None:
        """pytorch#25162, as torch's sampler does it."""
        dataset = data.Tensors(torch.zeros(10, 1), torch.zeros(10, dtype=torch.int64))
        drawn = [i for rank in range(4) for i in data.DistributedSampler(dataset, 4, rank, shuffle=False)]
        assert len(drawn) == 12
        assert [i for i in range(10) if drawn.count(i) == 2] == [0, 1]


def _fields(config: Config) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


class TestNets:
    def test_sharpness_is_the_largest_eigenvalue_of_the_hessian(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
        names, values = zip(*model.named_parameters(), strict=True)
        sizes = [v.numel() for v in values]

        def loss(flat: torch.Tensor) -> torch.Tensor:
            parts = {n: p.reshape(v.shape) for n, p, v in zip(names, flat.split(sizes), values, strict=True)}
            return torch.nn.functional.cross_entropy(torch.func.functional_call(model, parts, (x,)), y)

        hessian = torch.autograd.functional.hessian(loss, torch.cat([v.detach().reshape(-1) for v in values]))
        exact = torch.linalg.eigvalsh(hessian)
        found = nets.sharpness(model, x, y, iterations=200)
        assert found == pytest.approx(float(exact.max()), rel=1e-3)

    def test_gain_sets_the_deviation_of_the_weights(self) -> None:
        model = nets.build(scaleup.Config(gain=1.5), 0)
        assert float(model[0].weight.detach().std()) == pytest.approx(1.5 * (2 / 64) ** 0.5, rel=0.05)
        assert float(model[0].bias.abs().max()) == 0

    def test_the_same_seed_gives_the_same_weights(self) -> None:
        one, same, other = (nets.build(scaleup.Config(), seed) for seed in (3, 3, 4))
        assert torch.equal(one[0].weight, same[0].weight)
        assert not torch.equal(one[0].weight, other[0].weight)

    @pytest.mark.parametrize("norm", ["batch", "group"])
    def test_normalisation_sits_after_each_hidden_layer(self, norm: str) -> None:
        kinds = [type(layer).__name__ for layer in nets.build(scaleup.Config(norm=norm), 0)]
        assert sum("Norm" in kind for kind in kinds) == 3

    def test_loss_counts_targets_and_nothing_else(self) -> None:
        output = torch.randn(2, 3, 7)
        target = torch.tensor([[1, 2, data.PAD], [3, data.PAD, data.PAD]])
        logs = torch.log_softmax(output, -1)
        expected = -(logs[0, 0, 1] + logs[0, 1, 2] + logs[1, 0, 3])
        assert nets.loss_sum(output, target).item() == pytest.approx(expected.item(), rel=1e-6)
