"""The service carries out what the policies decide, with replicas played in the same loop: who, order, counts."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from serving_stand import Stand, play

from mlsyslab.labs.serving import service
from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.wire import Frames, pack

NOW = {"max_wait_s": 0.0}


def sizes(stand: Stand) -> list[int]:
    return [len(batch) for replica in stand.replicas for batch in replica.batches]


class TestBatches:
    def test_five_at_once_without_a_wait_run_as_one_and_four(self):
        """triton-inference-server/server#3624."""

        async def body():
            stand = Stand(Config(**NOW))
            for token in range(5):
                stand.ask(token)
            stand.replicas[0].finish()
            assert stand.replicas[0].batches == [[0], [1, 2, 3, 4]]

        play(body)

    def test_140_at_once_are_one_batch_where_256_fit(self):
        """ray-project/ray#43288."""

        async def body():
            stand = Stand(Config(max_batch=256, max_wait_s=0.05, max_queue=512))
            for token in range(140):
                stand.ask(token)
            await asyncio.sleep(0.1)
            assert sizes(stand) == [140]

        play(body)

    def test_a_lone_request_is_held_back_for_the_wait_and_no_longer(self):
        async def body():
            stand = Stand(Config(max_wait_s=0.02), took_s=0.0)
            began_s = stand.service.now()
            stand.ask(1)
            while not stand.answers:
                await asyncio.sleep(0)
            assert stand.service.now() - began_s >= 0.02
            assert stand.answers[1].batch_wait_s >= 0.02
            assert stand.answers[1].queue_s == pytest.approx(0.0, abs=1e-9)

        play(body)

    def test_the_cap_counts_rows_not_requests(self):
        """bentoml/BentoML#3710."""

        async def body():
            stand = Stand(Config(max_batch=8, rows=5, admission=False, **NOW))
            for token in range(20):
                stand.ask(token, rows=1 + token % 5)
            while len(stand.answers) < 20:
                assert sum(request.rows for request in stand.replicas[0].waiting.requests) <= 8
                stand.replicas[0].finish()
            assert sorted(token for batch in stand.replicas[0].batches for token in batch) == list(range(20))
            assert stand.replicas[0].batches[1][0] == 1  # first come, first served

        play(body)

    def test_an_idle_service_has_no_timer_and_a_busy_one_none_that_polls(self):
        async def body():
            stand = Stand(Config())
            assert stand.service._timer is None
            for token in range(8):  # a full batch never waits
                stand.ask(token)
            assert sizes(stand) == [8]
            assert stand.service._timer is None
            stand.ask(9)  # the replica is busy: nothing can happen before it is free
            assert stand.service._timer is None

        play(body)


class TestHungReplicas:
    def test_the_batch_of_one_that_hangs_is_done_by_another_and_a_new_one_is_asked_for(self, monkeypatch):
        monkeypatch.setattr(service, "HUNG_S", 0.05)

        async def body():
            stand = Stand(Config(replicas=2, **NOW))
            stand.ask(1)
            stuck, other = sorted(stand.replicas, key=lambda replica: not replica.batches)
            while not other.batches:
                await asyncio.sleep(0.001)
            other.finish()
            assert (stuck.batches, other.batches, stuck.closed) == ([[1]], [[1]], True)
            assert (stand.answers[1].status, stand.answers[1].retries) == (200, 1)
            assert [said["op"] for said in stand.told[-3:]] == ["hung", "lost", "start"]
            assert stand.told[-3]["name"] == stand.told[-2]["name"] == stuck.name

        play(body)

    def test_what_hangs_twice_is_answered_503(self, monkeypatch):
        monkeypatch.setattr(service, "HUNG_S", 0.02)

        async def body():
            stand = Stand(Config(replicas=2, **NOW))
            stand.ask(1)
            while not stand.answers:
                await asyncio.sleep(0.001)
            assert stand.statuses() == {1: 503}
            assert [replica.batches for replica in stand.replicas] == [[[1]], [[1]]]

        play(body)

    def test_nobody_watches_when_nothing_runs(self, monkeypatch):
        monkeypatch.setattr(service, "HUNG_S", 0.02)

        async def body():
            stand = Stand(Config(**NOW))
            stand.ask(1)
            stand.replicas[0].finish()
            while stand.service._watch:
                await asyncio.sleep(0.001)
            assert "hung" not in {said["op"] for said in stand.told}

        play(body)

    def test_slow_or_stopped_on_purpose_is_not_hung(self):
        async def body():
            paced = Config(paced=True, paced_base_s=2.0, paced_row_s=1.0)
            assert Stand(paced).service.patience_s() >= service.HUNG_TIMES * 10.0
            assert Stand(Config(stall_at_s=1.0, stall_s=50.0)).service.patience_s() >= 50.0 + service.HUNG_S
            slow = Stand(Config()).service
            slow.core.full_batch_s = 30.0  # as it was learnt
            assert slow.patience_s() >= service.HUNG_TIMES * 30.0

        play(body)


class TestOneOutcomeEach:
    def test_a_request_past_its_deadline_is_answered_at_once_and_not_computed(self):
        async def body():
            stand = Stand(Config(**NOW))
            stand.ask(0)
            stand.ask(1, timeout_s=0.02)
            stand.ask(2)
            await asyncio.sleep(0.05)
            assert stand.statuses() == {1: 504}
            stand.replicas[0].finish()
            stand.replicas[0].finish()
            assert stand.replicas[0].batches == [[0], [2]]
            assert stand.statuses() == {1: 504, 0: 200, 2: 200}

        play(body)

    def test_what_a_client_that_is_gone_had_asked_is_not_computed_nor_answered(self):
        async def body():
            stand = Stand(Config(**NOW))
            running, queued, other = stand.ask(0), stand.ask(1), stand.ask(2)
            stand.service.cancel(queued)
            stand.service.cancel(running)
            stand.replicas[0].finish()
            stand.replicas[0].finish()
            assert stand.replicas[0].batches == [[0], [2]]
            assert stand.statuses() == {2: 200}
            assert other.state == "done"
            assert stand.service.outcomes["cancelled"] == 2

        play(body)

    def test_after_a_flood_of_which_most_disconnect_the_calm_load_is_served_completely(self):
        """ray-project/ray#50046."""

        async def body():
            stand = Stand(Config(admission=False, **NOW), took_s=0.001)
            flood = [stand.ask(token) for token in range(500)]
            chosen = random.Random(0).sample(flood, 400)
            gone = [request for request in chosen if request.state == "waiting"]
            for request in chosen:
                stand.service.cancel(request)
            await asyncio.sleep(0.3)
            computed = {token for batch in stand.replicas[0].batches for token in batch}
            assert not computed & {request.id for request in gone}
            for token in range(600, 650):
                stand.ask(token)
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)
            assert all(stand.answers[token].status == 200 for token in range(600, 650))
            assert len(stand.answers) == 500 - 400 + 50
            assert stand.service.core.batcher.rows == stand.service.core.batcher.count == 0

        play(body)

    def test_a_poisoned_item_fails_alone(self):
        """Lightning-AI/LitServe#340, ray-project/ray#66140."""

        async def body():
            stand = Stand(Config())
            for token in (*range(7), 5000):
                stand.ask(token)
            stand.replicas[0].finish()
            assert [stand.answers[token].status for token in (*range(7), 5000)] == [200] * 7 + [500]
            assert "index out of range" in stand.answers[5000].error
            for token in range(7):  # each has its own row, not its neighbour's
                assert np.frombuffer(stand.answers[token].output, np.float32).tolist() == [token] * 10

        play(body)

    def test_a_full_queue_says_429_and_when_to_come_again(self):
        async def body():
            stand = Stand(Config(max_queue=4, max_batch=4, **NOW))
            for token in range(10):
                stand.ask(token)
            refused = {token: answer for token, answer in stand.answers.items() if answer.status == 429}
            assert set(refused) == {5, 6, 7, 8, 9}  # one runs, four wait
            assert all(
                answer.outcome == "rejected" and answer.retry_after_s > 0 for answer in refused.values()
            )

        play(body)

    def test_a_drain_answers_everybody_who_was_let_in_and_nobody_else(self):
        async def body():
            stand = Stand(Config(max_wait_s=1.0, max_batch=4), took_s=0.01)
            for token in range(7):
                stand.ask(token)
            draining = asyncio.ensure_future(stand.service.drain())
            await asyncio.sleep(0)
            stand.ask(100)
            await draining
            assert stand.statuses() == {**dict.fromkeys(range(7), 200), 100: 503}
            assert stand.answers[100].outcome == "rejected"

        play(body)

    def test_a_drain_does_not_wait_for_ever_for_a_replica_that_hangs(self, monkeypatch):
        monkeypatch.setattr(service, "DRAIN_S", 0.05)

        async def body():
            stand = Stand(Config(**NOW))
            stand.ask(0)
            stand.ask(1)
            await stand.service.drain()
            assert stand.statuses() == {0: 503, 1: 503}

        play(body)


class TestReplicas:
    def test_nothing_runs_before_the_replica_says_that_it_is_warm(self):
        """ray-project/ray#61649."""

        async def body():
            stand = Stand(Config(replicas=0, autoscale=True, floor=0, **NOW), took_s=0.0)
            stand.service._ask()
            stand.ask(1)
            await asyncio.sleep(0.01)
            assert stand.answers == {}
            stand.join(0)
            await asyncio.sleep(0.01)
            assert stand.statuses() == {1: 200}

        play(body)

    def test_the_requests_of_a_lost_replica_run_elsewhere_once_then_are_given_up(self):
        async def body():
            stand = Stand(Config(replicas=2, **NOW))
            stand.ask(0)
            first = next(one for one in stand.replicas if one.waiting)
            stand.service.left(first.name)
            second = next(one for one in stand.replicas if one is not first)
            assert second.batches == [[0]]
            assert [said["op"] for said in stand.told[-2:]] == ["lost", "start"]  # it is replaced
            stand.service.left(second.name)
            assert stand.statuses() == {0: 503}
            assert stand.answers[0].retries == 1
            stand.ask(1)
            stand.join(2).finish()
            assert stand.answers[1].status == 200

        play(body)

    def test_a_retired_replica_ends_its_batch_first(self):
        async def body():
            stand = Stand(Config(replicas=2, **NOW))
            stand.ask(0)
            busy = next(one for one in stand.replicas if one.waiting)
            stand.service.retire(busy.name, stand.service.now())
            assert not busy.closed
            busy.finish()
            assert busy.closed
            assert stand.statuses() == {0: 200}
            stand.service.left(busy.name)
            assert stand.told[-1]["op"] == "retired"

        play(body)

    def test_a_replica_that_is_not_wanted_any_more_when_it_is_ready_is_sent_away(self):
        async def body():
            stand = Stand(Config(replicas=1, autoscale=True, ceiling=2, **NOW))
            stand.service._ask()
            stand.service.retire(1, stand.service.now())
            assert stand.join(1).closed
            assert list(stand.service.core.replicas) == [0]

        play(body)


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_frames_survive_any_chopping(chunk):
    sent = [({"rows": [1, 2]}, b"abc" * 9), ({}, b""), ({"x": "ü"}, bytes(range(256)))]
    stream = b"".join(pack(head, body) for head, body in sent)
    frames, got = Frames(), []
    for start in range(0, len(stream), chunk):
        got += frames.feed(stream[start : start + chunk])
    assert got == sent
