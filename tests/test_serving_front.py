"""The front speaks the Open Inference Protocol, and what one client does wrong harms no other."""

from __future__ import annotations

import asyncio
import gzip
import json

import numpy as np
import psutil
import pytest
from serving_stand import Stand, exchange, infer, play, post, read_response

from mlsyslab.contract import RunError
from mlsyslab.labs.serving.config import Config

front = pytest.importorskip("mlsyslab.labs.serving.front")
pytest.importorskip("aiohttp", reason="the extra serving is not installed")


def with_front(body, config: Config | None = None, took_s: float | None = 0.001):
    """Run `body(stand, port)` against a front on a free port."""

    async def run():
        stand = Stand(config or Config(max_wait_s=0.0), took_s)
        close, port = await front.open_front(stand.service, "127.0.0.1", 0)
        await body(stand, port)
        await close()

    play(run)


async def get(port: int, path: str, method: str = "GET") -> tuple[int, dict]:
    status, headers, body = await exchange(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return status, json.loads(body) if "json" in headers["content-type"] else {"text": body.decode()}


BAD = {
    "malformed JSON": (post(b"{"), 400, "malformed JSON"),
    "JSON that is too deep": (post(b"[" * 60000), 400, "malformed JSON"),
    "no object": (post(b"[1]"), 400, "must be an object"),
    "no inputs": (post(b"{}"), 400, "must be an object"),
    "two inputs": (post(json.dumps({"inputs": [{}, {}]}).encode()), 400, "one input"),
    "other input": (post(infer(name="words")), 400, "has the input 'tokens'"),
    "other output": (post(infer(top={"outputs": [{"name": "x"}]})), 400, "the output 'logits'"),
    "datatype": (post(infer(datatype="FP32")), 400, "must be 'INT64'"),
    "shape": (post(infer(shape=[1, 9])), 400, r"must be [rows, 8]"),
    "shape of one number": (post(infer(shape=8)), 400, r"must be [rows, 8]"),
    "no rows": (post(infer(shape=[0, 8], data=[])), 400, r"must be [rows, 8]"),
    "rows above max_batch": (post(infer(rows=9)), 400, "split the request"),
    "too few values": (post(infer(data=[1, 2])), 400, "has 2 values"),
    "ragged values": (post(infer(rows=2, data=[[1], [1, 2]])), 400, "no regular array"),
    "NaN": (post(infer(data=[float("nan")] * 8)), 400, "NaN"),
    "fraction": (post(infer(data=[0.5] * 8)), 400, "not INT64"),
    "text": (post(infer(data=["a"] * 8)), 400, "not INT64"),
    "beyond INT64": (post(infer(data=[2**63] * 8)), 400, "out of range"),
    "far beyond INT64": (post(infer(data=[10**30] * 8)), 400, "INT64"),
    "priority": (post(infer(top={"parameters": {"priority": 99}})), 400, "priority must be"),
    "timeout": (post(infer(top={"parameters": {"timeout": -1}})), 400, "timeout must be"),
    "parameters of no kind": (post(infer(top={"parameters": [1]})), 400, "must be an object"),
    "id": (post(infer(top={"id": 7})), 400, "id must be a string"),
    "binary size": (post(infer(parameters={"binary_data_size": 9})), 400, "needs 64 bytes"),
    "length header": (post(infer(), "Inference-Header-Content-Length: 99999"), 400, "does not fit"),
    "unknown model": (post(infer()).replace(b"/encoder/", b"/gpt/"), 404, "unknown model 'gpt'"),
    "unknown path": (b"GET /v3 HTTP/1.1\r\nHost: x\r\n\r\n", 404, "nothing is at"),
    "method": (b"GET /v2/models/encoder/infer HTTP/1.1\r\nHost: x\r\n\r\n", 405, "takes POST"),
    "out-of-range token": (post(infer(token=1000)), 500, "index out of range"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_request_gets_the_protocols_error_and_a_parallel_good_one_its_answer(what):
    data, expected, says = BAD[what]

    async def body(_stand, port):
        bad, good = await asyncio.gather(exchange(port, data), exchange(port, post(infer(token=5))))
        assert bad[0] == expected
        assert says in json.loads(bad[2])["error"]
        assert good[0] == 200
        assert json.loads(good[2])["outputs"][0]["data"] == [5.0] * 10

    with_front(body, Config())


def test_an_answer_has_the_protocols_form_the_callers_id_and_where_the_time_went():
    async def body(_stand, port):
        status, headers, text = await exchange(port, post(infer(rows=2, token=7, top={"id": 'a"b'})))
        answer = json.loads(text)
        assert status == 200
        assert headers["content-type"] == "application/json"
        assert (answer["model_name"], answer["model_version"], answer["id"]) == ("encoder", "1", 'a"b')
        assert answer["outputs"][0]["shape"] == [2, 10]
        times = answer["parameters"]
        assert times["batch_size"] == 2
        assert times["replica"] == 0
        assert times["service_s"] >= 0.001
        assert times["queue_s"] >= 0

    with_front(body)


def test_tensors_may_travel_as_bytes_both_ways():
    async def body(_stand, port):
        tokens = np.arange(16, dtype=np.int64).reshape(2, 8)
        tensor = {"parameters": {"binary_data_size": tokens.nbytes}, "data": None}
        head = infer(rows=2, **tensor, top={"parameters": {"binary_data_output": True}})
        asked = post(head + tokens.tobytes(), f"Inference-Header-Content-Length: {len(head)}")
        status, headers, text = await exchange(port, asked)
        length = int(headers["inference-header-content-length"])
        assert status == 200
        assert json.loads(text[:length])["outputs"][0]["parameters"] == {"binary_data_size": 80}
        assert np.frombuffer(text[length:], np.float32).tolist() == [0.0] * 10 + [8.0] * 10

    with_front(body)


def test_priority_and_timeout_mean_what_triton_says():
    async def body(stand, port):
        asking = [asyncio.ensure_future(exchange(port, post(infer(token=0))))]
        await asyncio.sleep(0.05)
        for token, more in ((1, {}), (2, {"priority": 1}), (3, {"timeout": 20_000})):
            asking.append(
                asyncio.ensure_future(exchange(port, post(infer(token=token, top={"parameters": more}))))
            )
            await asyncio.sleep(0.05)
        stand.replicas[0].finish()
        assert stand.replicas[0].batches == [[0], [2, 1]]  # the urgent one first, the late one not at all
        stand.replicas[0].finish()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200, 200, 200, 504]

    with_front(body, Config(max_wait_s=0.0, aging_s=1.0), took_s=None)


def test_metadata_and_health():
    async def body(stand, port):
        assert (await get(port, "/v2"))[1]["name"] == "mlsyslab"
        assert (await get(port, "/v2/health/live"))[0] == 200
        assert (await get(port, "/v2/models/encoder"))[1]["inputs"][0]["shape"] == [-1, 8]
        assert (await get(port, "/v2/models/encoder/versions/1"))[0] == 200
        assert (await get(port, "/v2/models/other"))[0] == 404
        assert (await get(port, "/v2/models/other/ready"))[0] == 404
        assert (await get(port, "/v2", "DELETE"))[0] == 405
        for path in ("/v2/health/ready", "/v2/models/encoder/ready"):
            assert (await get(port, path))[0] == 200
        stand.service.core.draining = True
        assert (await get(port, "/v2/health/ready"))[0] == 503

    with_front(body)


def test_metrics_are_prometheus_text_and_agree_with_what_happened():
    parser = pytest.importorskip("prometheus_client.parser")

    async def body(_stand, port):
        for token in (1, 2, 1000):
            await exchange(port, post(infer(token=token)))
        _, text = await get(port, "/metrics")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in parser.text_string_to_metric_families(text["text"])
            for sample in family.samples
        }
        assert samples["mlsyslab_requests_total", "ok"] == 2
        assert samples["mlsyslab_requests_total", "error"] == 1
        assert samples["mlsyslab_request_seconds_count",] == 2
        assert samples["mlsyslab_batch_rows_sum",] == 3
        assert samples["mlsyslab_replicas", "ready"] == 1

    with_front(body)


def test_a_full_queue_is_429_with_retry_after():
    async def body(stand, port):
        asking = [asyncio.ensure_future(exchange(port, post(infer(token=token)))) for token in range(6)]
        await asyncio.sleep(0.1)
        stand.replicas[0].finish()
        stand.replicas[0].finish()
        answers = await asyncio.gather(*asking)
        assert sorted(status for status, _, _ in answers) == [200, 200, 200, 429, 429, 429]
        assert all(int(headers["retry-after"]) >= 1 for status, headers, _ in answers if status == 429)

    with_front(body, Config(max_wait_s=0.0, max_queue=2, max_batch=2), took_s=None)


@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_body_of_100_mb_is_refused_without_being_kept(says_its_length):
    async def body(_stand, port):
        before = psutil.Process().memory_info().rss
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        how = "Content-Length: 100000000" if says_its_length else "Transfer-Encoding: chunked"
        writer.write(f"POST /v2/models/encoder/infer HTTP/1.1\r\nHost: x\r\n{how}\r\n\r\n".encode())

        async def push():
            block = bytes(1 << 20)
            for _ in range(100):
                writer.write(block if says_its_length else b"100000\r\n" + block + b"\r\n")
                await writer.drain()

        pushing = asyncio.ensure_future(push())
        status, _, text = await read_response(reader)
        good = await exchange(port, post(infer()))
        await asyncio.wait([pushing], timeout=5)
        pushing.cancel()
        writer.close()
        assert (status, good[0]) == (413, 200)
        assert "larger than" in json.loads(text)["error"]
        assert psutil.Process().memory_info().rss - before < 30e6

    with_front(body)


def test_a_small_body_that_unpacks_to_a_huge_one_is_refused():
    async def body(_stand, port):
        bomb = gzip.compress(bytes(50_000_000))
        status, _, text = await exchange(port, post(bomb, "Content-Encoding: gzip"))
        assert status == 413
        assert "larger than" in json.loads(text)["error"]
        assert (await exchange(port, post(infer())))[0] == 200

    with_front(body)


def test_a_packed_body_is_unpacked_and_a_broken_one_refused():
    async def body(_stand, port):
        packed = post(gzip.compress(infer()), "Content-Encoding: gzip")
        broken = post(b"no gzip at all", "Content-Encoding: gzip")
        assert (await exchange(port, packed))[0] == 200
        assert (await exchange(port, broken))[0] == 400
        assert (await exchange(port, post(infer())))[0] == 200

    with_front(body)


def test_a_client_that_sends_its_body_too_slowly_is_given_up(monkeypatch):
    monkeypatch.setattr(front, "BODY_WITHIN_S", 0.2)

    async def body(_stand, port):
        slow = asyncio.ensure_future(exchange(port, post(infer())[:-5]))
        assert (await exchange(port, post(infer())))[0] == 200
        status, headers, _ = await slow
        assert status == 408
        assert headers["connection"] == "close"

    with_front(body)


def test_a_client_that_sends_half_a_head_is_closed(monkeypatch):
    monkeypatch.setattr(front, "IDLE_S", 0.2)

    async def body(_stand, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v2/models/enc")
        assert (await exchange(port, post(infer())))[0] == 200
        assert await reader.read() == b""
        writer.close()

    with_front(body)


@pytest.mark.parametrize("part", ["half a head", "half a body", "everything"])
def test_a_half_closed_connection_ends_and_harms_nobody(part):
    async def body(stand, port):
        whole = post(infer(token=9))
        data = {"half a head": whole[:30], "half a body": whole[:-9], "everything": whole}[part]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        writer.write_eof()
        good = await exchange(port, post(infer(token=4)))
        await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert good[0] == 200
        assert stand.service.core.batcher.count == 0

    with_front(body)


def test_what_a_client_asked_that_disconnects_in_the_queue_is_not_computed():
    async def body(stand, port):
        first = asyncio.ensure_future(exchange(port, post(infer(token=0))))
        await asyncio.sleep(0.05)
        _, gone = await asyncio.open_connection("127.0.0.1", port)
        gone.write(post(infer(token=1)))
        last = asyncio.ensure_future(exchange(port, post(infer(token=2))))
        await asyncio.sleep(0.05)
        assert stand.service.core.batcher.count == 2
        gone.close()
        await asyncio.sleep(0.05)
        assert stand.service.core.batcher.count == 1
        stand.replicas[0].finish()
        stand.replicas[0].finish()
        assert stand.replicas[0].batches == [[0], [2]]
        assert [(await one)[0] for one in (first, last)] == [200, 200]
        assert stand.service.outcomes["cancelled"] == 1

    with_front(body, took_s=None)


def test_requests_in_a_row_on_one_connection_are_answered_in_order():
    async def body(_stand, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"".join(post(infer(token=token)) for token in range(5)))
        got = [json.loads((await read_response(reader))[2])["outputs"][0]["data"][0] for _ in range(5)]
        writer.close()
        assert got == [0, 1, 2, 3, 4]

    with_front(body)


def test_a_port_that_is_taken_is_one_clear_error():
    async def body(stand, port):
        with pytest.raises(
            RunError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use; choose"
        ):
            await front.open_front(stand.service, "127.0.0.1", port)

    with_front(body)
