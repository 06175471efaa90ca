"""The Open Inference Protocol v2 (KServe, Triton) as functions: bytes in, requests or errors out; no I/O.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol, with Triton's extensions "binary
tensor data", "parameters" and "schedule policy" (timeout in microseconds, 0: none; priority 1 is the highest,
0 the default).
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlsyslab.labs.serving.config import Config
from mlsyslab.labs.serving.policies import LEVELS

MODEL, VERSION = "encoder", "1"
INPUT, OUTPUT = "tokens", "logits"
VOCABULARY, CLASSES = 1000, 10
DEFAULT_PRIORITY = 1  # the lab's own levels begin at 0, Triton's at 1

REJECTED, EXPIRED, FAILED, GONE = 429, 504, 500, 503
WHY = {REJECTED: "rejected", EXPIRED: "expired"}


class ProtocolError(Exception):
    """What a client did wrong, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Answer:
    """How a request ended. status: as in HTTP. Seconds and batch size are None for what never ran.

    queue_s: waited for a replica; batch_wait_s: held back for company; service_s: from the batch's start to its end.
    """

    status: int
    error: str = ""
    output: bytes | bytearray = b""
    queue_s: float | None = None
    batch_wait_s: float | None = None
    service_s: float | None = None
    batch_size: int | None = None
    replica: int | None = None
    retries: int = 0
    retry_after_s: float = 0.0

    @property
    def outcome(self) -> str:
        """ok, rejected, expired or error; an answer of a service that shuts down is a rejection, too."""
        if self.status == 200:
            return "ok"
        return "rejected" if self.retry_after_s else WHY.get(self.status, "error")


@dataclass(slots=True)
class Inference:
    """A request that is well formed. tokens: INT64, little-endian. timeout_s: infinity for none."""

    rows: int
    tokens: bytes
    priority: int
    timeout_s: float
    id: str | None
    binary: bool


def body_limit(config: Config) -> int:
    """Bytes of the largest body that a request may have; 24 for a token is more than any INT64 needs."""
    return 65536 + 24 * config.max_batch * config.tokens


def too_large(limit: int) -> ProtocolError:
    """For a body of more than `limit` bytes."""
    return ProtocolError(413, f"the body is larger than {limit} bytes")


def unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """A body that came as gzip or deflate; never more than `limit` bytes of it. Raises ProtocolError."""
    if encoding.lower() not in ("gzip", "deflate"):
        raise ProtocolError(415, f"Content-Encoding {encoding!r} is not known; use gzip, deflate or none")
    try:
        unpacked = zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(
            body, limit + 1
        )  # either kind of header
    except zlib.error as error:
        raise ProtocolError(400, f"the body cannot be unpacked: {error}") from None
    if len(unpacked) > limit:
        raise too_large(limit)
    return unpacked


def parse_infer(body: bytes, json_length: str | None, config: Config) -> Inference:
    """The request in a body; json_length is the header Inference-Header-Content-Length. Raises ProtocolError."""
    text, raw = body, b""
    if json_length is not None:
        if not json_length.isdecimal() or int(json_length) > len(body):
            raise ProtocolError(400, f"Inference-Header-Content-Length {json_length!r} does not fit the body")
        text, raw = body[: int(json_length)], body[int(json_length) :]
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(400, f"malformed JSON: {error}") from None
    try:
        inputs, parameters = asked["inputs"], asked.get("parameters") or {}
        (tensor,) = inputs
        name, datatype, shape = tensor["name"], tensor["datatype"], tensor["shape"]
        outputs = asked.get("outputs") or ()
        wants = [(one["name"], one.get("parameters") or {}) for one in outputs]
        name_id = asked.get("id")
        binary = bool(parameters.get("binary_data_output", False))
        binary = binary or any(more.get("binary_data", False) for _, more in wants)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ProtocolError(
            400,
            f"the body must be an object with one input, of name {INPUT!r}, and its shape, datatype and data",
        ) from None
    if name != INPUT or any(one != OUTPUT for one, _ in wants):
        raise ProtocolError(400, f"model {MODEL!r} has the input {INPUT!r} and the output {OUTPUT!r}")
    if datatype != "INT64":
        raise ProtocolError(400, f"input {INPUT!r} has datatype {datatype!r}; it must be 'INT64'")
    rows = _rows(shape, config)
    if not isinstance(name_id, str | None):
        raise ProtocolError(400, "id must be a string")
    return Inference(
        rows=rows,
        tokens=_tokens(tensor, raw, rows * config.tokens),
        priority=_priority(parameters.get("priority", 0)),
        timeout_s=_timeout_s(parameters.get("timeout", 0)),
        id=name_id,
        binary=binary,
    )


def _rows(shape: Any, config: Config) -> int:
    whole = isinstance(shape, list) and all(type(size) is int for size in shape)
    if not whole or len(shape) != 2 or shape[1] != config.tokens or shape[0] < 1:
        raise ProtocolError(400, f"input {INPUT!r} has shape {shape}; it must be [rows, {config.tokens}]")
    if shape[0] > config.max_batch:
        raise ProtocolError(
            400, f"{shape[0]} rows are more than max_batch={config.max_batch}; split the request"
        )
    return int(shape[0])


def _tokens(tensor: dict[str, Any], raw: bytes, count: int) -> bytes:
    size = (tensor.get("parameters") or {}).get("binary_data_size")
    if size is not None:
        if size != count * 8 or len(raw) != size:
            raise ProtocolError(
                400,
                f"input {INPUT!r} needs {count * 8} bytes, binary_data_size is {size} and {len(raw)} came",
            )
        return raw
    try:
        values = np.array(tensor["data"])
    except KeyError:
        raise ProtocolError(400, f"input {INPUT!r} has neither data nor binary_data_size") from None
    except (
        ValueError,
        OverflowError,
        RecursionError,
    ):  # numpy's words for ragged lists and numbers of any length
        raise ProtocolError(400, f"the data of input {INPUT!r} is no regular array of INT64") from None
    if values.size != count:
        raise ProtocolError(400, f"input {INPUT!r} has {values.size} values; its shape needs {count}")
    if values.dtype != np.int64:
        raise ProtocolError(
            400, f"the data of input {INPUT!r} is not INT64: NaN, a fraction, a text or out of range"
        )
    return values.tobytes()


def _priority(asked: Any) -> int:
    if type(asked) is not int or not 0 <= asked <= LEVELS:
        raise ProtocolError(
            400, f"priority must be 1 (highest) to {LEVELS}, or 0 for the default; it is {asked!r}"
        )
    return asked - 1 if asked else DEFAULT_PRIORITY


def _timeout_s(asked: Any) -> float:
    if type(asked) is not int or asked < 0:
        raise ProtocolError(400, f"timeout must be whole microseconds, 0 for none; it is {asked!r}")
    return asked * 1e-6 if asked else math.inf


_TIMES = '"queue_s":%.6f,"batch_wait_s":%.6f,"service_s":%.6f,"batch_size":%d,"replica":%d,"retries":%d'


def infer_body(asked: Inference, answer: Answer, *, paced: bool) -> tuple[bytes, int | None]:
    """The body of a good answer, and the length of its JSON where binary data follows. The response's parameters
    hold where the time went; put together by hand, since this is the hottest line of the front."""
    times = _TIMES % (
        answer.queue_s, answer.batch_wait_s, answer.service_s, answer.batch_size, answer.replica, answer.retries,
    )  # fmt: skip
    if asked.binary:
        data = f'"parameters":{{"binary_data_size":{len(answer.output)}}}'
    else:
        data = '"data":' + json.dumps(np.frombuffer(answer.output, np.float32).tolist())
    text = "".join(
        (
            f'{{"model_name":"{MODEL}","model_version":"{VERSION}",',
            "" if asked.id is None else f'"id":{json.dumps(asked.id)},',
            '"parameters":{' + times + (',"paced":true' if paced else "") + "},",
            f'"outputs":[{{"name":"{OUTPUT}","datatype":"FP32","shape":[{asked.rows},{CLASSES}],{data}}}]}}',
        )
    ).encode()
    return (text + answer.output, len(text)) if asked.binary else (text, None)


def server_metadata(version: str) -> dict[str, Any]:
    """GET /v2."""
    return {
        "name": "mlsyslab",
        "version": version,
        "extensions": ["binary_tensor_data", "parameters", "schedule_policy"],
    }


def model_metadata(config: Config) -> dict[str, Any]:
    """GET /v2/models/{name}."""
    return {
        "name": MODEL,
        "versions": [VERSION],
        "platform": "paced" if config.paced else "pytorch",
        "inputs": [{"name": INPUT, "datatype": "INT64", "shape": [-1, config.tokens]}],
        "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": [-1, CLASSES]}],
    }
